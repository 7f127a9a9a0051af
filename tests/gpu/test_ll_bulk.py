"""Whether a GPU tears what PTX has no rule for: words polled while a bulk store writes them (`ll_bulk`).

Most of the time is compilation: two kernels an op. Waits are bounded by seconds, so words that do not come
are named.
"""

import pytest
import torch

from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from tests.support.launches import sequence
from tests.support.polled import KERNEL, SIZES, assert_same_bits

WORLDS = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]
OPS = {"gemm_reduce_scatter": {}, "gemm_all_reduce": {"algorithm": "one_shot"}, "gemm_all_gather": {}}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_no_word_is_torn_on_one_gpu(device, monkeypatch, op, shape, size):
    """Every word of every chunk has been waited for by itself."""
    monkeypatch.setenv("OVERLAP_GEMM_TIMEOUT", "5")
    assert_same_bits(op, OPS[op], shape, lambda: VirtualWorld(size, device=device), launches=20)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", OPS)
def test_no_word_is_torn_on_its_way(ranks, op, world):
    """A GPU per rank; each call judged by its values. Waits are bounded by the group's own time-out."""
    cases = [Case(op, *SIZES[shape], torch.bfloat16, seed=i) for i in range(12) for shape in SIZES]
    ranks(world).run(sequence, cases, [{**KERNEL, **OPS[op], "transport": "ll_bulk"}])
