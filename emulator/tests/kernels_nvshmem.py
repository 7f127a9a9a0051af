"""A kernel that reaches its neighbour in every way of NVSHMEM's device library that is served."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import nvshmem.core.device.cute as nv
from nvshmem.core import ComparisonType, SignalOp

SET = int(SignalOp.SIGNAL_SET)
ADD = int(SignalOp.SIGNAL_ADD)
GE = int(ComparisonType.CMP_GE)

THREADS = 64
WAYS = (
    "put",
    "put_warp",
    "put_block",
    "put_nbi",
    "put_nbi_warp",
    "put_nbi_block",
    "put_signal",
    "put_signal_warp",
    "put_signal_block",
    "put_signal_nbi",
    "put_signal_nbi_warp",
    "put_signal_nbi_block",
    "peer",
)
"""Slot `i` of the destination is written in way `i`."""


@cute.jit
def slot(tensor, i: cutlass.Constexpr):
    """Column `i`, through a global pointer of natural alignment, the only kind the bindings accept."""
    column = tensor[None, i]
    dtype = tensor.element_type
    pointer = cute.make_ptr(
        dtype, column.iterator.toint(), cute.AddressSpace.gmem, assumed_align=dtype.width // 8
    )
    return cute.make_tensor(pointer, column.layout)


@cute.jit
def send(way: cutlass.Constexpr, dst, src, signal, peer):
    """Writes `src` to `dst` of `peer` and then raises its signal by one, in one way; all threads call it."""
    tid, _, _ = cute.arch.thread_idx()
    function = getattr(nv, way) if way != "peer" else None
    if cutlass.const_expr(way == "peer"):
        remote = nv.get_peer_tensor(dst, peer)
        for i in cutlass.range(tid, cute.size(src), THREADS):
            remote[i] = src[i]
    elif cutlass.const_expr("signal" in way):
        if cutlass.const_expr(way.endswith("block")):
            function(dst, src, signal, 1, ADD, peer)
        elif cutlass.const_expr(way.endswith("warp")):
            if tid < 32:
                function(dst, src, signal, 1, ADD, peer)
        else:
            if tid == 0:
                function(dst, src, signal, 1, ADD, peer)
    elif cutlass.const_expr(way.endswith("block")):
        function(dst, src, peer)
    elif cutlass.const_expr(way.endswith("warp")):
        if tid < 32:
            function(dst, src, peer)
    else:
        if tid == 0:
            function(dst, src, peer)


@cute.kernel
def exchange_kernel(
    src: cute.Tensor, dst: cute.Tensor, signals: cute.Tensor, out: cute.Tensor, who: cute.Tensor,
    ways: cutlass.Constexpr, quiet: cutlass.Constexpr, scribble: cutlass.Constexpr,
):  # fmt: skip
    tid, _, _ = cute.arch.thread_idx()
    me, count = nv.my_pe(), nv.n_pes()
    peer = (me + 1) % count
    if tid == 0:
        who[0] = me
        who[1] = count
    for i in cutlass.range_constexpr(len(ways)):
        send(ways[i], slot(dst, i), slot(src, i), slot(signals, i), peer)
    if cutlass.const_expr(scribble):
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(len(ways)):
            for j in cutlass.range(tid, cute.size(src, mode=[0]), THREADS):
                src[j, i] = -1
    if cutlass.const_expr(quiet):
        nv.quiet()
    cute.arch.sync_threads()
    if tid == 0:
        if cutlass.const_expr("peer" in ways):
            nv.fence()  # the signal releases other warps' stores, too: after the barrier, before the signal
        for i in cutlass.range_constexpr(len(ways)):
            if cutlass.const_expr("signal" not in ways[i]):
                nv.signal_op(slot(signals, i), 1, SET, peer)
        for i in cutlass.range_constexpr(len(ways)):
            nv.signal_wait(slot(signals, i), GE, 1)
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(len(ways)):
        for j in cutlass.range(tid, cute.size(dst, mode=[0]), THREADS):
            out[j, i] = dst[j, i]


@cute.jit
def exchange(
    src: cute.Tensor, dst: cute.Tensor, signals: cute.Tensor, out: cute.Tensor, who: cute.Tensor,
    ways: cutlass.Constexpr, quiet: cutlass.Constexpr, scribble: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    """out[:, i] = what the left neighbour sent of its src[:, i], in way i.

    Without `quiet`, the signals of ways that do not carry one may overtake their data. With `scribble`, src
    is overwritten as soon as the calls have returned.
    """
    exchange_kernel(src, dst, signals, out, who, ways, quiet, scribble).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )
