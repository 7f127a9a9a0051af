"""The set of processes that other tests run on: what it says when a rank fails, hangs or crashes."""

import os
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist

from overlap_gemm.testing.ranks import RankError, Ranks


def hangs(rank, size):
    dist.barrier()  # all have come here before one fails
    if rank == 1:
        raise ValueError("this one came first")
    if rank == 2:
        threading.Event().wait(60)
    if rank == 0:
        time.sleep(60)


def test_the_first_failure_stands_first_and_a_hang_shows_its_stack(monkeypatch):
    ranks = Ranks(3)
    monkeypatch.setattr(ranks, "_grace", 0.5)
    with pytest.raises(RankError) as failure:
        ranks.run(hangs)
    text = str(failure.value)
    assert text.startswith("rank 1 of 3, after ")
    assert "this one came first" in text
    for rank, what in ((0, "in hangs"), (2, "in wait")):
        found = rf"rank {rank} of 3, after .* s:\ndid not end in time\n(.*\n)*.*{what}\n"
        assert re.search(found, text), text
    assert not ranks.alive


def crashes(rank, size):
    if rank == 1:
        os.abort()
    return rank


def test_a_crash_shows_its_signal_and_its_stack():
    with Ranks(2) as ranks, pytest.raises(RankError) as failure:
        ranks.run(crashes)
    text = str(failure.value)
    assert text.startswith("rank 1 of 2, after ")
    assert re.search(
        r"the process is gone, exit code -6\nFatal Python error: Aborted\n(.*\n)*.* in crashes\n", text
    ), text


def killed(rank, size):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("function", [killed, crashes])
def test_nothing_is_forgiven(function, monkeypatch):
    """A crash in torch, too, is a failure of the test that it was in, with the stacks that it left."""
    ranks = Ranks(3)
    monkeypatch.setattr(ranks, "_grace", 0.5)
    with pytest.raises(RankError):
        ranks.run(function)
    with pytest.raises(RuntimeError, match="have been closed, or ended by a failure"):
        ranks.run(function)
