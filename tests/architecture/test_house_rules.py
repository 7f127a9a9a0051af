"""Rules of the house that a reader would otherwise have to check by eye."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 450
"""The habit is about 400 lines (CONTRIBUTING.md); this is where nobody would defend it any more."""


def lint_imports(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", *arguments]
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)


def test_imports_keep_the_contracts():
    done = lint_imports()
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


PLANTED = {
    "emulator/trace.py": "overlap_gemm.kernels.config",
    "emulator/settings.py": "overlap_gemm.runtime.group",
    "emulator/errors.py": "overlap_gemm.emulator.machine",
    "emulator/numbers/lanes.py": "overlap_gemm.emulator.ptx.ir",
    "emulator/ptx/parse.py": "overlap_gemm.emulator.translate.flow",
    "emulator/units/tma.py": "overlap_gemm.emulator.machine.memory",
    "emulator/machine/warp.py": "overlap_gemm.emulator.run.scheduler",
    "emulator/instructions/sync.py": "overlap_gemm.emulator.translate.program",
    "emulator/run/launch.py": "overlap_gemm.emulator.host.emulator",
    "emulator/host/torch/turns.py": "overlap_gemm.emulator.host.dsl",
    "transports/nvshmem.py": "torch",
    "transports/peer_bulk.py": "overlap_gemm.runtime.workspace",
    "runtime/executor.py": "overlap_gemm.emulator",
    "runtime/order.py": "overlap_gemm.ops",
    "kernels/config.py": "overlap_gemm.transports",
    "backends/base.py": "overlap_gemm.nn",
    "schedules/orders.py": "nvshmem",
}


def test_upward_imports_and_unknown_rooms_are_noticed(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "src" / "overlap_gemm"
    for file, module in PLANTED.items():
        with (package / file).open("a") as text:
            text.write(f"\nimport {module}\n")
    (package / "attic.py").write_text("")
    done = lint_imports(root=tmp_path)
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    for file, module in PLANTED.items():
        edge = f"overlap_gemm.{file.removesuffix('.py').replace('/', '.')} -> {module}"
        assert f"{edge} (l." in said or f"{edge}. (l." in said, edge
    assert "- overlap_gemm.attic (Since this contract is marked as 'exhaustive'" in said


@pytest.mark.parametrize("folder", ["src", "tests"])
def test_no_file_outgrows_its_reader(folder):
    lengths = {file: len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")}
    assert {str(file): lines for file, lines in lengths.items() if lines > LONGEST_FILE} == {}
