"""A CuTe DSL kernel whose sums the emulated switch makes: right, and each alias fence is missed."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import from_dlpack

from cute_emulator import FindingsError

from .kernels_multicast import LANES, VALUES, all_reduce

STREAM = cuda.CUstream(0)


def reduced(emulate, arch, ranks, fenced, mode):
    """What each rank has of small integers, and their sum."""
    emu = emulate(arch, ranks=ranks, mode=mode)
    data, flags = emu.symmetric((ranks, LANES, VALUES), torch.bfloat16), emu.symmetric((ranks,), torch.int32)
    for flag in flags.tensors:
        flag.zero_()
    draw = torch.Generator().manual_seed(0)
    values = [
        torch.randint(-8, 8, (ranks, LANES, VALUES), generator=draw).bfloat16().contiguous()
        for _ in range(ranks)
    ]
    outs = [torch.full_like(value, float("nan")) for value in values]
    tables = [torch.tensor([address + 4 * rank for address in flags.addresses]) for rank in range(ranks)]

    def words(tensor):
        return from_dlpack(tensor.view(torch.int32).permute(2, 1, 0))

    def arguments(rank):
        block = Int64(data.addresses[rank]), Int64(data.multicast)
        meeting = from_dlpack(tables[rank]), Int64(flags.addresses[rank]), Int32(rank)
        return words(values[rank]), words(outs[rank]), *block, *meeting

    compiled = cute.compile(all_reduce, *arguments(0), ranks, fenced, STREAM)
    for rank in range(ranks):
        with emu.rank(rank):
            compiled(*arguments(rank), STREAM)
    emu.run()
    return outs, sum(value.float() for value in values).bfloat16()


@pytest.mark.parametrize(("arch", "ranks", "mode"), [("sm_90a", 2, "lazy"), ("sm_100a", 3, "random")])
def test_the_switch_sums_and_stores_on_every_rank(emulate, arch, ranks, mode):
    outs, want = reduced(emulate, arch, ranks, ("before", "after"), mode)
    assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("fenced", [("before",), ("after",)], ids=str)
def test_either_alias_fence_taken_out_is_found(emulate, fenced):
    with pytest.raises(FindingsError, match=r"alias-fence.*no fence\.proxy\.alias between"):
        reduced(emulate, "sm_90a", 2, fenced, "immediate")
