"""The launch scripts and the pinned sets, without starting more than a shell."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / ".ci" / "run"])


def bash(command: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_env_takes_a_named_python_as_it_is():
    done = bash("source launch/env.sh && command -v python", OVERLAP_GEMM_PYTHON=sys.executable)
    assert done.stdout.strip() == str(Path(sys.executable).parent / "python")
    assert done.stderr == ""


@pytest.mark.parametrize("script", ["torchrun.sh", "mpirun.sh"])
def test_launchers_ask_for_a_command(script):
    done = bash(f"bash launch/{script} -n 2", OVERLAP_GEMM_PYTHON=sys.executable)
    assert done.returncode == 2
    assert "usage:" in done.stderr


FAKE = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/../calls"
echo "Collecting torch"; echo "no matching wheel" >&2
case "$*" in *--dry-run*) exit ${FAKE_PROBE:-0} ;; esac
exit ${FAKE_STATUS:-0}
"""


def fake_checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv exists already; its python records its arguments instead of obeying them."""
    for folder in ("emulator", "tools"):
        (tmp_path / folder).mkdir()
    for name in [
        "pyproject.toml",
        "emulator/pyproject.toml",
        "tools/pyproject.toml",
        *(path.name for path in ROOT.glob("constraints*.txt")),
    ]:
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "env.sh").write_text((LAUNCH / "env.sh").read_text())
    bin_dir = tmp_path / ".venv" / "bin"
    bin_dir.mkdir(parents=True)
    for name in ("python", "pip"):
        (bin_dir / name).write_text(FAKE)
        (bin_dir / name).chmod(0o755)
    return tmp_path


def test_env_installs_once_and_again_after_a_pin_changed(tmp_path):
    checkout = fake_checkout(tmp_path)
    calls = checkout / ".venv" / "calls"
    source = f"set -euo pipefail; source {checkout}/launch/env.sh"
    env = {"OVERLAP_GEMM_PYTHON": ""}

    first = bash(source, **env)
    assert first.returncode == 0, first.stderr
    assert "installing overlap_gemm[" in first.stderr
    log = checkout / ".venv" / "install.log"
    assert f"pip's words go to {log}" in first.stderr and "Collecting torch" in log.read_text()
    assert "Collecting torch" not in first.stdout + first.stderr
    assert f"-e {checkout}[" in calls.read_text()

    calls.unlink()
    second = bash(source, **env)
    assert second.returncode == 0
    assert second.stderr == ""
    assert not calls.exists()

    with (checkout / "constraints-common.txt").open("a") as file:
        file.write("# another pin\n")
    assert "installing" in bash(source, **env).stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="about machines without a GPU")
@pytest.mark.parametrize(("probe", "chosen"), [("0", "constraints.txt"), ("1", "constraints-cuda.txt")])
def test_without_a_cpu_build_of_torch_the_cuda_set_is_taken_and_named(tmp_path, probe, chosen):
    checkout = fake_checkout(tmp_path)
    done = bash(f"source {checkout}/launch/env.sh", OVERLAP_GEMM_PYTHON="", FAKE_PROBE=probe)
    assert done.returncode == 0
    assert f"at the pins of {chosen}" in done.stderr
    assert ("no CPU build of torch" in done.stderr) == (probe == "1")
    assert f"-c {checkout}/{chosen} -e" in (checkout / ".venv" / "calls").read_text()


def test_a_failed_installation_is_not_taken_for_a_good_one(tmp_path):
    checkout = fake_checkout(tmp_path)
    source = f"set -euo pipefail; source {checkout}/launch/env.sh; echo went on"
    for _ in range(2):
        done = bash(source, OVERLAP_GEMM_PYTHON="", FAKE_STATUS="1")
        assert done.returncode == 1
        assert "no matching wheel\noverlap_gemm: installation failed (see above)" in done.stderr
        assert "went on" not in done.stdout


def pins(*files: str) -> list[Requirement]:
    lines = [line for name in files for line in (ROOT / name).read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-c"))]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


OURS = ("overlap-gemm", "cute-emulator", "overlap-gemm-tools")
"""Distributions of this repository."""


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.13"])
@pytest.mark.parametrize("chosen", ["constraints.txt", "constraints-cuda.txt"])
def test_every_direct_dependency_is_pinned_exactly_once(chosen, python):
    def applies(marker: Marker | None) -> bool:
        return marker is None or marker.evaluate({"python_version": python, "extra": ""})

    project = ""
    for folder in (ROOT, ROOT / "emulator", ROOT / "tools"):
        pyproject = (folder / "pyproject.toml").read_text()
        project += re.split(r"\[project.scripts\]|\[tool", pyproject)[0].split("dependencies = [", 1)[1]
    required = [Requirement(text) for text in re.findall(r'"([a-zA-Z][\w.-]*[^"\n]*[>=][^"]*)"', project)]
    required = [each for each in required if each.name not in OURS]
    wanted = {canonical(each.name) for each in required if applies(each.marker)}
    assert len(wanted) > 15, "the parser of this test no longer finds the dependencies"
    names = [canonical(pin.name) for pin in pins(chosen, "constraints-common.txt") if applies(pin.marker)]
    assert {name for name in wanted if names.count(name) != 1} == set()


def test_ci_runs_every_check_that_contributing_names():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    run = (ROOT / ".ci" / "run").read_text().splitlines()
    for check in ("ruff check .", "mypy", "lint-imports"):
        assert check in contributing and check in run
    assert "ruff format --check ." in run
    assert [
        line for line in run if line.startswith("shellcheck ") and "launch/*.sh" in line and ".ci/run" in line
    ]
    assert run[-1] == "exec bash launch/test.sh" and "set -euo pipefail" in run
