"""An all-reduce in CuTe DSL that the NVLink switch sums, through a multicast address.

A multicast address and a rank's own address of the same bytes are two names of one place. What was accessed
by the one name and is then accessed by the other needs, between the two, a ``fence.proxy.alias`` in addition
to what orders them (PTX ISA, memory consistency model, "Causality Order").
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, Uint32, cute

LANES = 32
WORDS = 4
VALUES = 8
"""Of bfloat16, in the words that one lane sums: 16 bytes."""


def _at(address, dtype, number=1):
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16 if number > 1 else 4)
    return cute.make_tensor(pointer, cute.make_layout(number))


@cute.jit
def _meet(flags: cute.Tensor, own_flags: Int64, epoch: Int32, ranks: cutlass.Constexpr):
    """All lanes of the rank's warp: raise its flag at every rank, and wait for every rank's."""
    lane = cute.arch.lane_idx()
    cute.arch.sync_warp()
    if lane < ranks:
        cute.arch.store(_at(flags[lane], Int32).iterator, epoch, sem="release", scope="sys")
        seen = Int32(0)
        while seen < epoch:
            own = _at(own_flags + Int64(lane) * 4, Int32).iterator
            seen = cute.arch.load(own, Int32, sem="acquire", scope="sys")
    cute.arch.sync_warp()


@cute.kernel
def all_reduce_kernel(
    src: cute.Tensor,
    out: cute.Tensor,
    data: Int64,
    multicast: Int64,
    flags: cute.Tensor,
    own_flags: Int64,
    rank: Int32,
    ranks: cutlass.Constexpr,
    fenced: cutlass.Constexpr,
):
    lane = cute.arch.lane_idx()
    for part in cutlass.range_constexpr(ranks):
        chunk = Int64(part * LANES + lane) * 16
        _at(data + chunk, Uint32, WORDS).store(src[(None, lane, part)].load())
    _meet(flags, own_flags, Int32(1), ranks)  # every rank has stored by its own address
    if cutlass.const_expr("before" in fenced):
        cute.arch.fence_proxy("alias")
    here = multicast + Int64(rank * LANES + lane) * 16  # this rank's part of all ranks' data
    summed = cute.arch.inline_ptx(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * WORDS,
        read_only_args=[here],
    )
    cute.arch.inline_ptx(
        "multimem.st.relaxed.sys.global.v4.bf16x2 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[here, *summed],
    )
    if cutlass.const_expr("after" in fenced):
        cute.arch.fence_proxy("alias")
    _meet(flags, own_flags, Int32(2), ranks)  # every rank has stored its part everywhere
    for part in cutlass.range_constexpr(ranks):
        chunk = Int64(part * LANES + lane) * 16
        out[(None, lane, part)].store(_at(data + chunk, Uint32, WORDS).load())


@cute.jit
def all_reduce(
    src: cute.Tensor,
    out: cute.Tensor,
    data: Int64,
    multicast: Int64,
    flags: cute.Tensor,
    own_flags: Int64,
    rank: Int32,
    ranks: cutlass.Constexpr,
    fenced: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    """Sums the ranks' ``src``, ``(WORDS, LANES, ranks)`` words of two bfloat16; every rank sums one part.

    Args:
        src: This rank's values.
        out: The sums.
        data: Address of this rank's symmetric block, as large as `src`.
        multicast: Address of the block of all ranks.
        flags: ``Int64[ranks]``: address, at each rank, of this rank's flag, which is 0.
        own_flags: Address of this rank's flags, one of each rank.
        rank: This rank.
        ranks: How many there are.
        fenced: On which sides of the accesses by `multicast` there is an alias fence: "before", "after".
        stream: Of the launch.
    """
    kernel = all_reduce_kernel(src, out, data, multicast, flags, own_flags, rank, ranks, fenced)
    kernel.launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream)
