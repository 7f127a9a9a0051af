"""Two calls of a script whose kernels run beside each other: programmatic dependent ones, and two streams."""

import contextlib

import cuda.bindings.driver as cuda
import pytest
import torch
from cutlass import Constexpr, Int32, const_expr, cute
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator, FindingsError
from cute_emulator.errors import EmulatorError
from cute_emulator.host.script import one_device

STREAM = cuda.CUstream(0)


@cute.kernel
def _add_one(src: cute.Tensor, dst: cute.Tensor, waits: Constexpr, lets_go: Constexpr):
    i = cute.arch.thread_idx()[0] + cute.arch.block_idx()[0] * 64
    if const_expr(waits):
        cute.arch.griddepcontrol_wait()
    if const_expr(lets_go):
        cute.arch.griddepcontrol_launch_dependents()
    dst[i] = src[i] + 1


@cute.jit
def add_one(src: cute.Tensor, dst: cute.Tensor, waits: Constexpr, lets_go: Constexpr, stream: cuda.CUstream):
    kernel = _add_one(src, dst, waits, lets_go)
    kernel.launch(grid=(2, 1, 1), block=(64, 1, 1), stream=stream, use_pdl=True)


def twice(emulator: Emulator, waits: bool, lets_go: bool) -> torch.Tensor:
    with emulator, one_device(emulator):
        a, b, c = (torch.zeros(128, dtype=torch.int32, device="cuda") for _ in range(3))
        views = [from_dlpack(t) for t in (a, b, c)]
        first = cute.compile(add_one, views[0], views[1], False, lets_go, STREAM)
        second = cute.compile(add_one, views[1], views[2], waits, False, STREAM)
        first(views[0], views[1], STREAM)
        second(views[1], views[2], STREAM)
        return c.cpu()


@pytest.mark.parametrize(("waits", "lets_go"), [(True, True), (False, False), (True, False)])
def test_a_dependent_kernel_that_waits_or_need_not_is_clean(waits, lets_go):
    assert (twice(Emulator("sm_90a"), waits, lets_go) == 2).all()


def test_a_dependent_kernel_that_does_not_wait_is_a_race():
    with pytest.raises(FindingsError, match=r"\[race\]"):
        twice(Emulator("sm_90a"), waits=False, lets_go=True)


def test_a_kernel_that_lets_go_runs_before_anybody_looks():
    emulator = Emulator("sm_90a")
    with emulator, one_device(emulator):
        a, b = (torch.zeros(128, dtype=torch.int32, device="cuda") for _ in range(2))
        views = [from_dlpack(t) for t in (a, b)]
        one = cute.compile(add_one, *views, False, True, STREAM)
        one(*views, STREAM)
        assert emulator.has_pending(0)
        assert int(b.sum()) == 128
        one(*views, STREAM)
    assert not emulator.has_pending(0)


@cute.kernel
def _meet(mine: cute.Tensor, other: cute.Tensor):
    cute.arch.store(mine.iterator, Int32(1), sem="release", scope="gpu")
    while cute.arch.load(other.iterator, Int32, sem="acquire", scope="gpu") == 0:
        pass


@cute.jit
def meet(mine: cute.Tensor, other: cute.Tensor, stream: cuda.CUstream):
    _meet(mine, other).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@pytest.mark.parametrize("waits", [False, True])
def test_kernels_of_two_streams_can_wait_for_each_other(waits):
    """Unless the second stream waits for the first."""
    blocked = pytest.raises(EmulatorError, match="deadlock") if waits else contextlib.nullcontext()
    with blocked, Emulator("sm_90a") as emulator, one_device(emulator):
        flags = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in flags]
        views = [from_dlpack(flag) for flag in flags]
        compiled = cute.compile(meet, *views, STREAM)
        compiled(*views, cuda.CUstream(streams[0].cuda_stream))
        assert emulator.has_pending(0)
        if waits:
            streams[1].wait_stream(streams[0])
        compiled(*views[::-1], cuda.CUstream(streams[1].cuda_stream))
        torch.cuda.synchronize()
        assert [int(flag) for flag in flags] == [1, 1]
