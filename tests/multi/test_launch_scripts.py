"""The scripts of launch/ start one process per rank, each with its share of the cores."""

import os

import pytest

# One string per print: ranks share the output, and pieces of lines could interleave.
SAY = {
    "torchrun": "import os; rank, size = os.environ['RANK'], os.environ['WORLD_SIZE']",
    "mpirun": "import os; from mpi4py.MPI import COMM_WORLD as w; rank, size = w.rank, w.size",
}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_every_rank_is_started(launch, launcher, ranks):
    say = "print(f\"rank {rank} of {size}, {os.environ['OMP_NUM_THREADS']} threads\\n\", end='')"
    done = launch(launcher, ranks, "python", "-c", f"{SAY[launcher]}; {say}")
    assert done.returncode == 0, done.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}, {threads} threads" in done.stdout


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_failure_is_passed_on(launch, launcher):
    assert launch(launcher, 2, "python", "-c", "raise SystemExit(7)").returncode != 0


def test_options_reach_the_command_and_not_the_launcher(launch):
    """torchrun would take `--m` for an abbreviation of its own options."""
    done = launch("torchrun", 1, "python", "-c", "import sys; print(sys.argv[1:])", "--m", "3", "-n", "4")
    assert "['--m', '3', '-n', '4']" in done.stdout, done.stderr
