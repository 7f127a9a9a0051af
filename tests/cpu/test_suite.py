"""How the suite itself runs: the folder of compiled kernels, and how tests are dealt (tests/conftest.py)."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels for a GPU are the user's")


def lock(folder):
    """A descriptor that holds a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


@without_gpu
def test_a_run_removes_what_killed_runs_have_left_and_leaves_nothing(tmp_path):
    left, live = (tmp_path / f"overlap_gemm_test_kernels_{name}" for name in ("left", "live"))
    for folder in (left, live):
        folder.mkdir()
        (folder / "kernel.o").touch()
    descriptor = lock(live)
    try:
        subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/cpu/test_timing.py"],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            check=True,
            timeout=240,
        )
    finally:
        os.close(descriptor)
    assert [path for path in tmp_path.iterdir() if "kernels" in path.name] == [live]
    assert (live / "kernel.o").exists()


@without_gpu
def test_this_run_holds_its_folder():
    with pytest.raises(BlockingIOError):
        lock(os.environ["OVERLAP_GEMM_CACHE_DIR"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_its_tests_do_not_run_even_if_they_are_named():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu/test_tune.py", "tests/gpu/test_order.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "no CUDA device: tests/gpu does not run" in done.stdout
    assert "no tests ran" in done.stdout or " deselected in " in done.stdout
    assert " failed" not in done.stdout and " error" not in done.stdout
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
