"""The time model of kernels that multiply a list of weights."""

from dataclasses import replace

import pytest

from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.peer_access import PeerAccess
from overlap_gemm.backends.select import predicted
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.exchange.geometry import ExchangeShape
from overlap_gemm.tuning.machine import load
from overlap_gemm.tuning.time_model import Facts, fused_time
from tests.support.problems import problem


def test_each_weight_of_a_list_begins_with_a_tile():
    config, chunks = GemmConfig(tile=(128, 128)), (136, 72, 72)
    shape = ExchangeShape(64, 2 * sum(chunks), 2, sum(chunks), "column_exchange", chunks)
    assert shape.weight_begins(config) == [0, 256, 384, 512]
    assert shape.grid(config).cols == 4 and shape.cta_tiles(config) == 4
    call = Facts("gemm_all_to_all", 128, 560, 64, "bf16", 2)
    joined, apart = (
        fused_time(config, one, load("b200"), 1).waves for one in (call, replace(call, weights=chunks))
    )
    assert apart == pytest.approx(joined * 4 / 3)


def test_auto_predicts_one_kernel_of_a_list_by_its_weights():
    access = PeerAccess("sm_90a", 132, None)
    joined = problem("gemm_all_to_all", 8192, 3072, 4096, device_type="cuda", peer_access=access)
    narrow = replace(joined, num_weights=24, widths=(128,) * 24)
    empty = replace(narrow, widths=(*(128,) * 22, 256, 0))
    by_list, by_one, by_each = (predicted(one).seconds for one in (narrow, joined, empty))
    assert by_list["fused"] > 1.2 * by_one["fused"] and by_list["torch"] == by_one["torch"]
    assert by_each == by_one


def test_parts_of_k_that_tma_cannot_load_are_named():
    fitting = problem("all_to_all_gemm", 64, 72, 64, parts=(48, 16))
    assert Fused().why_no_kernel(fitting) is None
    reason = Fused().why_no_kernel(replace(fitting, parts=(40, 24)))
    assert reason is not None and reason.startswith("K=40+24 in 2 parts must be a multiple of 8 a rank")
