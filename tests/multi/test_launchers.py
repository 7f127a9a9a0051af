"""The launchers start one process per rank, each with its share of the cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SAY = {
    "torchrun": "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])",
    "mpirun": "from mpi4py.MPI import COMM_WORLD as w; print('rank', w.rank, 'of', w.size)",
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_launcher_starts_every_rank(launcher, ranks):
    threads = "import os; print('threads', os.environ['OMP_NUM_THREADS'])"
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ["bash", f"launch/{launcher}.sh", "-n", str(ranks), "python", "-c", f"{SAY[launcher]}; {threads}"],
        cwd=ROOT,
        env={**env, "OVERLAP_GEMM_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}" in done.stdout
    cores = len(os.sched_getaffinity(0))
    assert done.stdout.count(f"threads {max(1, cores // ranks)}") == ranks


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_launcher_passes_on_a_failure(launcher):
    done = subprocess.run(
        ["bash", f"launch/{launcher}.sh", "-n", "2", "python", "-c", "raise SystemExit(7)"],
        cwd=ROOT,
        env={**os.environ, "OVERLAP_GEMM_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
