"""The time model of kernels that multiply a list of weights."""

from dataclasses import replace

import pytest
import torch

from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.peer_access import PeerAccess
from overlap_gemm.backends.select import predicted
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.exchange.geometry import ExchangeShape
from overlap_gemm.tuning import prediction
from overlap_gemm.tuning.machine import load
from overlap_gemm.tuning.time_model import Facts, copies_seconds, fused_time
from tests.support.figures import report
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
    by_list, by_one = (predicted(one).seconds for one in (narrow, joined))
    further = 23 * prediction.FURTHER_PRODUCT * load("h200").launch
    assert by_list["fused"] > 1.2 * by_one["fused"]
    assert by_list["torch"] == pytest.approx(by_one["torch"] + further)


def losses():
    """Returns the times of what the model chooses for lists of gathered rows, relative to the fastest."""
    access, lost = PeerAccess("sm_90a", 132, None), []
    for one in report("h200x2-list-choices")["results"]:
        facts = {"device_type": "cuda", "peer_access": access, "captured": True, "num_weights": len(one["n"])}
        seconds = predicted(problem(one["op"], one["m"], sum(one["n"]), one["k"], **facts)).seconds
        us = {way: one["graph"]["us"][f"list {way}"] for way in ("fused", "decomposed", "torch")}
        lost.append(us[min(us, key=lambda way: seconds[way])] / min(us.values()))
    return lost


def test_the_choice_for_a_measured_list_is_the_fastest_or_nearly(monkeypatch):
    assert len(losses()) == 20 and max(losses()) < 1.04
    monkeypatch.setattr(prediction, "_predict", prediction._predict.__wrapped__)
    monkeypatch.setattr(prediction, "FURTHER_PRODUCT", 0)
    assert max(losses()) > 1.7, "further products might as well cost nothing"


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("op", ["gemm_all_to_all", "all_to_all_gemm", "all_gather_gemm"])
def test_auto_predicts_the_sum_of_the_kernels_of_a_list(op, captured):
    """Compares with calls of each weight. If x is sent, later kernels have it: their link is neutralized."""
    access = PeerAccess("sm_90a", 132, None)
    facts = {"device_type": "cuda", "peer_access": access, "captured": captured}
    unit = 4096 if captured else 64  # eager calls are so small that host time decides
    sizes, widths = (unit, 3 * unit // 2, unit), (unit // 2,) * 3
    several = {"num_weights": 3}
    if op != "all_gather_gemm":
        several["widths"] = widths = unit, unit // 4, unit // 4
    if op != "all_to_all_gemm":  # two dtypes need a kernel each
        several |= {"weight_dtypes": (torch.bfloat16, torch.float16, torch.float16)}
    joined = problem(op, *sizes, **facts)
    predictions = [predicted(problem(op, sizes[0], n, sizes[2], **facts)) for n in widths]
    first, *later = [one.fused for one in predictions]
    total = first.total + sum(
        (one if op == "gemm_all_to_all" else replace(one, link=0.0, tail=0.0, receive=0.0)).total
        for one in later
    )
    of_list = predicted(replace(joined, **several))
    if not captured:
        calls, host = 3 if op == "gemm_all_to_all" else 1, predictions[0].machine.host["fused"]
        total = max(total, calls * host + copies_seconds(Facts(op, *sizes, "bf16", 2), of_list.machine))
    assert of_list.seconds["fused"] == pytest.approx(total)
    further = 2 * prediction.FURTHER_PRODUCT * of_list.machine.launch
    of_one = predicted(joined).seconds["torch"]
    if captured:
        assert of_list.seconds["torch"] == pytest.approx(of_one + further)
    else:
        assert of_one <= of_list.seconds["torch"] <= of_one + further


def test_auto_predicts_one_kernel_of_all_columns_of_gathered_rows():
    facts = {"device_type": "cuda", "peer_access": PeerAccess("sm_90a", 132, None), "captured": True}
    of_one = problem("all_gather_gemm", 2048, 5120, 8192, **facts)
    assert predicted(replace(of_one, num_weights=3)).seconds["fused"] == predicted(of_one).seconds["fused"]


def test_only_portable_sums_of_a_list_along_k_take_copies():
    facts = {"device_type": "cuda", "peer_access": PeerAccess("sm_90a", 132, None), "captured": True}
    dual = problem("all_gather_gemm", 8192, 4096, 1024, num_weights=3, **facts).dual()
    assert dual is not None and (dual.parts, dual.num_weights) == ((0, 0, 0), 1)
    of_list, of_one = predicted(dual), predicted(replace(dual, parts=()))
    machine, copies = of_list.machine, 2 * (8192 + 1024) * 2048 * 2
    more = {name: seconds - of_one.seconds[name] for name, seconds in of_list.seconds.items()}
    assert more.pop("fused") == 0 and len(more) == 3
    assert list(more.values()) == pytest.approx([2 * machine.launch + copies / machine.memory_rate] * 3)


def test_parts_of_k_that_tma_cannot_load_are_named():
    fitting = problem("all_to_all_gemm", 64, 72, 64, parts=(48, 16))
    assert Fused().why_no_kernel(fitting) is None
    reason = Fused().why_no_kernel(replace(fitting, parts=(40, 24)))
    assert reason is not None and reason.startswith("K=40+24 in 2 parts must be a multiple of 8 a rank")
