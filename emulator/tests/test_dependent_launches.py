"""Programmatic dependent launches of compiled kernels: two calls of a script, one beside the other."""

import cuda.bindings.driver as cuda
import pytest
import torch
from cutlass import Constexpr, const_expr, cute
from cutlass.cute.runtime import from_dlpack

from cute_emulator.host.emulator import Emulator, FindingsError
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
    assert not emulator.waits
