"""Runs under_launcher.py under the launchers that users start their scripts with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import overlap_gemm
from overlap_gemm.runtime import bootstrap
from overlap_gemm.spec import OPS

BODY = str(Path(__file__).with_name("under_launcher.py"))
PYTEST = ["pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "pytest_mpi", BODY]
FOREIGN = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_")
RENDEZVOUS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def environment(launcher: str, ranks: int, **more: str) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN) and name not in RENDEZVOUS
    }
    return {
        **env, "EXPECTED_LAUNCHER": launcher, "EXPECTED_RANKS": str(ranks), "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **more  # the others' imports cost more than the tests
    }  # fmt: skip


def run(ranks: int, reports: Path, *started: tuple[list[str], dict[str, str]]) -> None:
    """Starts the commands at once; every rank must report every test of the file."""
    processes = [
        subprocess.Popen(
            command,
            env={**env, "REPORTS": str(reports)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, env in started
    ]
    text = "".join(process.communicate(timeout=240)[0] for process in processes)
    assert not any(process.returncode for process in processes), text
    found = {int(report.name): report.read_text().split("\n") for report in reports.iterdir()}
    assert sorted(found) == list(range(ranks)), text
    assert all(len(names) == 3 + 3 * len(OPS) for names in found.values()), found


def slow(ranks):
    """A rank here is seconds of imports."""
    return pytest.param(ranks, marks=pytest.mark.slow)


@pytest.mark.parametrize("ranks", [slow(1), 2, slow(3), slow(4)])
def test_torchrun(ranks, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run(ranks, tmp_path, ([*command, "-m", *PYTEST], environment("torchrun", ranks)))


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_mpirun(ranks, tmp_path):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    command += [sys.executable, "-m", *PYTEST, "--only-mpi"]
    run(ranks, tmp_path, (command, environment("mpirun", ranks)))


def test_slurm(tmp_path):
    """The environment that srun gives its tasks, without slurm."""
    ranks = 2
    tasks = [
        (
            [sys.executable, "-m", *PYTEST],
            environment(
                "slurm",
                ranks,
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
                SLURM_STEP_NUM_TASKS=str(ranks),
                SLURM_STEP_NODELIST="localhost",
                SLURM_JOB_ID=str(os.getpid()),
                SLURM_STEP_ID="0",
            ),
        )
        for rank in range(ranks)
    ]
    run(ranks, tmp_path, *tasks)


def test_alone(monkeypatch):
    for name in list(os.environ):
        if name.startswith(FOREIGN) or name in RENDEZVOUS:
            monkeypatch.delenv(name)
    world = overlap_gemm.init(device="cpu")
    assert (world.rank, world.size, world.local_rank, world.launcher) == (0, 1, 0, "none")
    assert overlap_gemm.init() is world
    overlap_gemm.finalize()


def adopted(rank, size):
    """A process group that is there already is taken as it is, and left as it is."""
    import torch.distributed as dist

    world = overlap_gemm.init(device="cpu")
    assert (world.rank, world.size, world.launcher) == (rank, size, "torch.distributed")
    overlap_gemm.finalize()
    assert dist.is_initialized()


def test_an_existing_process_group_is_adopted(ranks):
    ranks(2).run(adopted)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("node7,node9", "node7"),
        ("node[007-012,031],login", "node007"),
        ("gpu[3]", "gpu3"),
        ("rack[1,4]-n2,other", "rack1-n2"),
    ],
)
def test_first_host_of_a_slurm_list(nodelist, host):
    assert bootstrap.first_host(nodelist) == host


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="local rank 2 has no GPU of its own: this machine shows 2"):
        bootstrap._pick_device("cuda", 2)
