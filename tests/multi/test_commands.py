"""The commands under the launchers that users start them with."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlap_gemm.backends.base import OPS
from overlap_gemm.tuning.timing import Timings, measure

ROOT = Path(__file__).parents[2]


def launch(launcher: str, ranks: int, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", f"launch/{launcher}.sh", "-n", str(ranks), *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OVERLAP_GEMM_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_bench(launcher, tmp_path):
    data, picture = tmp_path / "out.json", tmp_path / "out.png"
    shape = ["--m", "31", "--n", "16", "--k", "16", "--rounds", "2"]
    files = ["--json", data, "--plot", picture]
    done = launch(launcher, 2, "python", "-m", "overlap_gemm.cli", "bench", *shape, *files)
    assert done.returncode == 0, done.stderr
    report = json.loads(data.read_text())
    assert (report["machine"]["ranks"], report["machine"]["launcher"]) == (2, launcher)
    assert {r["op"]: r["backend"] for r in report["results"]} == dict.fromkeys(OPS, "decomposed")
    assert picture.stat().st_size > 1000
    assert done.stdout.count("T_overlap") == 1, "one rank prints"


def time_naps(rank: int, size: int) -> Timings:
    naps = {"even": 0.01, "skewed": 0.03 if rank == 1 else 0.001}
    calls = {name: lambda nap=nap: time.sleep(nap) for name, nap in naps.items()}
    return measure(calls, rounds=3, burst_seconds=0.01)


def test_a_sample_is_the_slowest_ranks_and_all_ranks_know_it(ranks):
    first, second = ranks(2).run(time_naps)
    assert first == second
    assert 0.03 <= first.median("skewed") < 0.3
    assert first.median("even") >= 0.01


TINY = shlex.split("--steps 2 --batch 2 --sequence 15 --layers 1 --head-dim 4 --rows 9 --rounds 1")


@pytest.mark.parametrize("backend", ["auto", "decomposed"])
def test_demo(tmp_path, backend):
    options = [*TINY, "--backend", backend, "--out", tmp_path]
    done = launch("torchrun", 2, "python", "-m", "overlap_gemm.cli", "demo", *options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo-timeline.png").read_bytes().startswith(b"\x89PNG")
    assert f"as '{'sequential' if backend == 'auto' else backend}'" in done.stdout
    last = done.stdout[done.stdout.index("PASS") :]
    assert "2 CPU ranks" in last
    assert "equals the unsharded model" in " ".join(last.split())


SABOTAGE = """
import sys
import torch
from overlap_gemm.backends import collectives, decomposed
from overlap_gemm.cli import app
honest = collectives.sum_in_rank_order
def forgetful(partials, bias=None, out=None):
    return honest([partials[0], partials[1] * (1 - 1e-4)], bias, out)
collectives.sum_in_rank_order = decomposed.sum_in_rank_order = forgetful
app(sys.argv[1:])
"""


def test_demo_fails_when_a_sum_over_the_ranks_is_a_little_wrong(tmp_path):
    done = launch("torchrun", 2, "python", "-c", SABOTAGE, "demo", *TINY, "--out", tmp_path)
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "DIFFERS FROM the unsharded model" in said, done.stderr
    assert said.count("TOO FAR") == 2
