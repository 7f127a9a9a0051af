"""Errors instead of hangs: ranks that disagree, ranks that refuse, ranks that die."""

import os
import re
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.runtime import agree
from overlap_gemm.runtime.group import find
from tests.support.chosen import in_turn
from tests.support.ranks import RankError, Ranks


def raises_everywhere(rank, size, function, pattern, error=RuntimeError):
    find(None).calls.clear()  # what other tests called is known, and not looked at again
    with mock.patch.object(agree, "_checking", True):
        with pytest.raises(error, match=pattern):
            function()
        # The group is still in step.
        out = overlap_gemm.gemm_all_reduce(torch.ones(2, 3), torch.ones(4, 3))
        assert torch.equal(out, torch.full((2, 4), 3.0 * size))


def other_dtype(rank, size):
    dtype = torch.float16 if rank == 1 else torch.float32
    raises_everywhere(
        rank,
        size,
        lambda: overlap_gemm.gemm_reduce_scatter(
            torch.ones(4, 3, dtype=dtype), torch.ones(5, 3, dtype=dtype)
        ),
        r"disagree on dtype: rank 1 has torch.float16, rank 0 2 has torch.float32",
    )


def other_rows(rank, size):
    raises_everywhere(
        rank,
        size,
        lambda: overlap_gemm.gemm_all_reduce(torch.ones(4 + (rank == 2), 3), torch.ones(5, 3)),
        r"disagree on rows: rank 2 has 5, rank 0 1 has 4",
    )


def other_width(rank, size):
    raises_everywhere(
        rank,
        size,
        lambda: overlap_gemm.all_gather_gemm(torch.ones(2, 3 + (rank == 0)), torch.ones(5, 3 + (rank == 0))),
        r"disagree on k: rank 0 has 4, rank 1 2 has 3",
    )


def other_op(rank, size):
    op = overlap_gemm.gemm_all_reduce if rank else overlap_gemm.gemm_reduce_scatter
    raises_everywhere(
        rank,
        size,
        lambda: op(torch.ones(4, 3), torch.ones(5, 3)),
        r"disagree on op: rank 0 has gemm_reduce_scatter, rank 1 2 has gemm_all_reduce",
    )


def other_backend(rank, size):
    backend = "decomposed" if rank == 2 else "sequential"
    raises_everywhere(
        rank,
        size,
        lambda: overlap_gemm.gemm_all_reduce(torch.ones(4, 3), torch.ones(5, 3), backend=backend),
        r"disagree on backend: rank 2 has decomposed, rank 0 1 has sequential",
    )


def bad_arguments(rank, size):
    """One rank's weight does not fit: it gets its ValueError, the others learn which rank and why."""
    weight = torch.ones(5, 4 if rank == 1 else 3)
    pattern = r"weight must be \[N, K\] .* K=3 of x \[4, 3\], got \[5, 4\]"
    raises_everywhere(
        rank,
        size,
        lambda: overlap_gemm.all_gather_gemm(torch.ones(4, 3), weight),
        pattern if rank == 1 else "rank 1 failed in all_gather_gemm: ValueError: .*" + pattern,
        ValueError if rank == 1 else RuntimeError,
    )


@pytest.mark.parametrize(
    "body", [other_dtype, other_rows, other_width, other_op, other_backend, bad_arguments]
)
def test_check_mode_names_the_rank_on_every_rank(ranks, body):
    ranks(3).run(body)


def wrong_shards(rank, size):
    """Also without the debug mode."""
    x, weight = torch.ones(1 if rank == 0 else 2, 3), torch.ones(3 if rank == 0 else 1, 3)
    with pytest.raises(ValueError, match=r"the ranks hold \[1, 2, 2\] rows; 5 .* \[2, 2, 1\]"):
        overlap_gemm.all_gather_gemm(x, torch.ones(4, 3), rows="exchange")
    with pytest.raises(ValueError, match=r"the ranks hold \[3, 1, 1\] columns; 5 .* \[2, 2, 1\]"):
        overlap_gemm.gemm_all_gather(torch.ones(2, 3), weight, columns="exchange")
    with pytest.raises(ValueError, match=rf"of rows=7 rank {rank} of 3 owns {3 if rank < 2 else 1}"):
        overlap_gemm.all_gather_gemm(torch.ones(2, 3), torch.ones(4, 3), rows=7)


def test_wrong_shards(ranks):
    ranks(3).run(wrong_shards)


def survive(rank, size, op, backend, victim):
    """The victim dies by SIGKILL in the middle of a series of calls; the others must get an error soon."""
    x, weight = torch.ones(64, 32), torch.ones(48, 32)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)connection|closed|reset|timed out|peer|rank"):
        for i in range(1000):
            if rank == victim and i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            getattr(overlap_gemm, op)(x, weight, backend=backend)
            dist.barrier()
    return time.monotonic() - begin


@pytest.mark.parametrize(
    ("op", "backend"),
    in_turn(
        ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_gather"],
        ["sequential", "decomposed"],
    ),
)
def test_killed_rank_ends_in_an_error(op, backend):
    group = Ranks(3, timeout=5, limit=40)
    with pytest.raises(RankError) as failure:
        group.run(survive, op, backend, 1)
    text = str(failure.value)
    assert re.search(r"rank 1 of 3, after .* s:\nthe process is gone, exit code -9", text), text
    assert "rank 0 of 3" not in text, text
    assert "rank 2 of 3" not in text, text


def straggle(rank, size, backend, known, told):
    """A peer that never comes: the error names the op and the ranks, long before `limit`."""
    x, weight = torch.ones(64, 32), torch.ones(48, 32)
    if known:
        overlap_gemm.gemm_reduce_scatter(x, weight, backend=backend)
    if rank == 1:
        while not told.exists():  # a process that ends closes its connections, which is another error
            time.sleep(0.05)
        return None
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as failure:
        overlap_gemm.gemm_reduce_scatter(x, weight, backend=backend)
    seconds = time.monotonic() - begin
    if rank == 0:
        told.touch()
    return str(failure.value), seconds


@pytest.mark.parametrize(
    ("backend", "known", "world"),
    [
        ("decomposed", True, 3),
        ("torch", True, 2),
        pytest.param("sequential", True, 2, marks=pytest.mark.slow),
        pytest.param("torch", True, 3, marks=pytest.mark.slow),
        ("decomposed", False, 2),
    ],
)
def test_a_peer_that_never_comes_is_named(backend, known, world, tmp_path):
    with Ranks(world, timeout=3, limit=40) as group:
        answers = group.run(straggle, backend, known, tmp_path / "told")
    for rank, answer in enumerate(answers):
        if rank != 1:
            message, seconds = answer
            words = "rank 1 has exited or makes no matching call"
            assert f"on rank {rank}: {words}" in message, message
            assert seconds < 9, "the time-out is 3"
