"""The scripts of launch/ start one process per rank, each with its share of the cores."""

import os

import pytest

SAY = {
    "torchrun": "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])",
    "mpirun": "from mpi4py.MPI import COMM_WORLD as w; print('rank', w.rank, 'of', w.size)",
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_every_rank_is_started(launch, launcher, ranks):
    threads = "import os; print('threads', os.environ['OMP_NUM_THREADS'])"
    done = launch(launcher, ranks, "python", "-c", f"{SAY[launcher]}; {threads}")
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}" in done.stdout
    cores = len(os.sched_getaffinity(0))
    assert done.stdout.count(f"threads {max(1, cores // ranks)}") == ranks


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_failure_is_passed_on(launch, launcher):
    assert launch(launcher, 2, "python", "-c", "raise SystemExit(7)").returncode != 0


def test_options_reach_the_command_and_not_the_launcher(launch):
    """torchrun would take `--m` for an abbreviation of its own options."""
    done = launch("torchrun", 1, "python", "-c", "import sys; print(sys.argv[1:])", "--m", "3", "-n", "4")
    assert "['--m', '3', '-n', '4']" in done.stdout, done.stderr
