"""Calls that ranks compare afterwards, since no rank waits for the transfer: as over NCCL, without a GPU."""

import contextlib
import io
import time

import pytest
import torch
import torch.distributed as dist

from overlap_gemm.runtime import agree
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.group import find

CUDA = torch.device("cuda")
PATIENCE = 20.0
"""Seconds; on an idle machine a difference is named in one."""


def entering(group, op):
    """Begins the transfer of such a call."""
    agree.of_calls(find(group), CUDA, (("op", op), ("rows", 4))).enter("all-reduce")


def until_named(group, op):
    """The error of a later call."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE:
        try:
            entering(group, op)
        except DisagreementError as error:
            return str(error)
        time.sleep(0.05)
    raise AssertionError("not named")


def another_order(rank, size):
    group = dist.new_group()
    began = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        for op in ("a", "b", "c") if rank == size - 1 else ("a", "c", "b"):
            entering(group, op)
        while "disagree on call 2: rank" not in printed.getvalue():  # although no call follows
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.05)
    message = until_named(group, "d")
    assert "disagree on call 2: rank" in message, message
    assert "op=b, rows=4, transfer=all-reduce" in message and "op=c, rows=4" in message, message
    everyone = [None] * size
    dist.all_gather_object(everyone, message)
    assert len(set(everyone)) == 1, everyone


def refused_by_one(rank, size):
    group = dist.new_group()
    entering(group, "a")
    if rank == 1:
        progress = find(group).progress
        try:
            raise MemoryError("planted")
        except MemoryError:
            progress.raised(progress.events, "a", None)
    message = until_named(group, "a")
    assert "disagree on call 2: " in message and "a: MemoryError: planted" in message, message


def in_step(rank, size):
    """Ranks that are far apart in time, and alike."""
    group = dist.new_group()
    for number in range(3000):
        entering(group, f"op {number % 7}")
        if rank == 1 and number % 500 == 0:
            time.sleep(0.3)
    time.sleep(1.0)
    entering(group, "last")
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("body", [another_order, refused_by_one, in_step])
def test_calls_are_compared_afterwards(ranks, body, world):
    ranks(world).run(body)
