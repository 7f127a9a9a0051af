"""How the suite itself runs: the folder of compiled kernels, and how tests are dealt (tests/conftest.py)."""

import fcntl
import os
import re
import shutil
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
@pytest.mark.parametrize("variable", ["OVERLAP_GEMM_CACHE_DIR", "CUTE_EMULATOR_COMPILES"])
def test_this_run_holds_its_folders(variable):
    with pytest.raises(BlockingIOError):
        lock(os.environ[variable])


def test_a_process_lives_as_long_as_a_test_may_take(tmp_path):
    """Ends a process that hangs in a usual test, not one in a test that is marked to take longer."""
    (tmp_path / "test_two.py").write_text(
        "import pytest, time\n\n@pytest.mark.timeout(60)\ndef test_longer():\n    time.sleep(3)\n\n"
        "def test_usual():\n    time.sleep(60)\n"
    )
    how = ["-v", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "-o", "faulthandler_timeout=2"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *how, str(tmp_path / "test_two.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "test_longer PASSED" in done.stdout
    assert "Timeout (0:00:02)!" in done.stderr
    assert "test_usual" in done.stderr


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


TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
"""
TESTS = """
import os, pytest, time

process = os.environ["PYTEST_XDIST_WORKER"]
{before}

@pytest.mark.parametrize("i", range({count}))
def test_it(i):
    if i == {dies}:
        time.sleep(1)
        os._exit(3)
"""


def small_suite(root, files):
    """A checkout with these launch scripts, settings and conftest.py; torch and the library do nothing."""
    shutil.copytree(ROOT / "launch", root / "launch")
    shutil.copy(ROOT / "pyproject.toml", root)
    for folder in ("tests/cpu", "emulator/tests", "stub", "bin"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", root / "tests")
    (root / "stub" / "torch.py").write_text(TORCH)
    (root / "stub" / "overlap_gemm.py").write_text("register = None\n")
    for name, printed in (("nproc", "2"), ("nvidia-smi", "none")):
        (root / "bin" / name).write_text(f"#!/bin/sh\necho {printed}\n")
        (root / "bin" / name).chmod(0o755)
    for name, (count, dies, before) in files.items():
        (root / "tests" / "cpu" / f"test_{name}.py").write_text(
            TESTS.format(count=count, dies=dies, before=before)
        )


DEATHS = {
    "in the middle of the last file": ({"a": (4, None, ""), "b": (4, None, ""), "z": (4, 2, "")}, 11, 1),
    "in the very last test": ({"a": (2, None, ""), "b": (2, None, ""), "z": (4, 3, "")}, 7, 1),
    "when the other process has ended, and one test of each file is left": (
        {"a": (2, 0, ""), "b": (1, None, ""), "c": (1, None, ""), "d": (1, None, "")},
        4,
        1,
    ),
    "while the other does": ({"a": (2, 0, "process == 'gw2' and time.sleep(2)"), "b": (2, 0, "")}, 2, 2),
}


@pytest.mark.parametrize("case", DEATHS)
def test_a_run_in_which_processes_die_ends_and_names_the_tests(tmp_path, case):
    files, passed, died = DEATHS[case]
    small_suite(tmp_path, files)
    done = run_small_suite(tmp_path)
    assert f"{died} failed, {passed} passed" in done.stdout, done.stdout
    named = re.findall(r"crashed while running 'tests/cpu/test_(\w)\.py::test_it\[(\d)]'", done.stdout)
    assert sorted(named) == [(name, str(dies)) for name, (_, dies, _) in files.items() if dies is not None]
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


def test_a_process_that_replaces_another_but_has_other_tests_ends_the_run(tmp_path):
    small_suite(tmp_path, {"a": (4, 0, ""), "b": ("5 if process == 'gw2' else 4", None, "")})
    done = run_small_suite(tmp_path)
    assert "replaces a process, but has other tests" in done.stdout
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR


def run_small_suite(root):
    """Runs the suite's command, of pytest's plug-ins with those alone that a run needs: the others' imports
    cost more than the tests. Without the variables by which pytest knows a CI system, where its summary would
    repeat each failure's message in full."""
    return subprocess.run(
        ["bash", "launch/test.sh"],
        cwd=root,
        env={
            **{name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")},
            "PATH": f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join((str(root / "stub"), os.environ.get("PYTHONPATH", ""))),
            "OVERLAP_GEMM_PYTHON": sys.executable,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p xdist -p pytest_timeout",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
