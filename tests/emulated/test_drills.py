"""Drills of docs/drills.md on emulated ranks, which share one process; the page says which ones need more."""

import os
import resource
from pathlib import Path

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.fused.launch_plan import Plan
from overlap_gemm.runtime.failures import MismatchedCallsError
from tests.support.emulated.op_runs import world_of
from tests.support.emulated.rank_scripts import lines_of_ranks

ROWS, WIDTH = 128, 64


def call(world, rank):
    """Queues one rank's call; with two ranks all elements of the sum are `2 * WIDTH`."""
    x, weight = torch.ones(ROWS, WIDTH).bfloat16(), torch.ones(WIDTH, WIDTH).bfloat16()
    return overlap_gemm.gemm_reduce_scatter(x, weight, group=world.names[rank], backend="fused")


def calls(world):
    """Makes one call on each rank and checks the results."""
    outs = [call(world, rank) for rank in range(2)]
    world.synchronize()
    assert all((out == 2 * WIDTH).all() for out in outs)


@pytest.fixture
def world():
    with world_of("sm_90a", 2, num_sms=3) as world:
        calls(world)
        yield world


def refused_call_is_named(world):
    """Makes one call on each rank after rank 1 has refused one."""
    for rank in range(2):
        call(world, rank)
    with pytest.raises(MismatchedCallsError, match="rank 1 in .* after 1 calls that raised before their"):
        world.synchronize()


def test_a_keyboard_interrupt_before_a_launch_is_named_by_the_next_call(world, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Plan, "launch", interrupted)
        call(world, 1)
    refused_call_is_named(world)


def test_calls_need_no_more_open_files(world):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        calls(world)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_call_that_exceeds_ulimit_v_is_named_by_the_next_call(world):
    # A copy of x takes 512 MiB; 64 are left.
    x, weight = torch.ones(WIDTH, WIDTH).bfloat16(), torch.ones(WIDTH, WIDTH).bfloat16()
    x = x[:1].expand(4 << 20, WIDTH)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            overlap_gemm.gemm_reduce_scatter(x, weight, group=world.names[1], backend="fused")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    refused_call_is_named(world)


SCRIPT = """
    import torch, overlap_gemm
    import torch.distributed as dist

    def call():
        out = overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")
        torch.cuda.synchronize()
        assert (out == 128).all()

    world = overlap_gemm.init()
    assert overlap_gemm.init() is world
    x, weight = torch.ones(2, 64, 64, dtype=torch.bfloat16, device=world.device)
    call()
    dist.destroy_process_group()
    try:
        call()
    except RuntimeError as error:
        assert "2 ranks has been destroyed before finalize(): call overlap_gemm.finalize()" in str(error)
    else:
        raise AssertionError
    overlap_gemm.finalize()
    world = overlap_gemm.init()
    call()
    print("right on rank", world.rank)
"""
"""Program of each rank. It does not finalize its second world."""


def test_a_destroyed_world_is_named_and_an_exit_without_finalize_ends_with_0(tmp_path):
    assert lines_of_ranks(tmp_path, SCRIPT) == ["right on rank 0", "right on rank 1"]
