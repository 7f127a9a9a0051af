"""Whether a GPU tears what PTX has no rule for: words polled while a bulk store writes them (`ll_bulk`)."""

import pytest
import torch

from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import run_launches
from overlap_gemm.testing.launches import sequence
from overlap_gemm.tuning.settings import configured

WORLDS = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]
SIZES = {"tail": (512, 4096, 2048), "many-tiles": (4096, 2048, 512), "ragged": (200, 136, 72)}
OPS = {"gemm_reduce_scatter": {}, "gemm_all_reduce": {"algorithm": "one_shot"}, "gemm_all_gather": {}}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_no_word_is_torn_on_one_gpu(device, op, shape, size):
    """The bits of `peer_bulk`, 50 calls; every word of every chunk has been waited for by itself."""
    case = Case(op, *SIZES[shape], torch.bfloat16)

    def outs(transport):
        with configured(**OPS[op], transport=transport), VirtualWorld(size, device=device) as world:
            return [torch.cat(each) for _, each in run_launches(case, world, 50)]

    for polled, flagged in zip(outs("ll_bulk"), outs("peer_bulk"), strict=True):
        assert torch.equal(polled, flagged)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", OPS)
def test_no_word_is_torn_on_its_way(ranks, op, world):
    """A GPU per rank; each call judged by its values."""
    cases = [Case(op, *SIZES[shape], torch.bfloat16, seed=i) for i in range(12) for shape in SIZES]
    ranks(world).run(sequence, cases, [{**OPS[op], "transport": "ll_bulk"}])
