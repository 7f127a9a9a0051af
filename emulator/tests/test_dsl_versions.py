"""Versions of CuTe DSL other than the one that is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_emulator.host.dsl.capture import keep_ptx
from cute_emulator.host.dsl.seam import SEAM

from .test_front_door import SOURCES, blocks

FOLDERS = [Path(p) for p in os.environ.get("CUTE_DSL_VERSIONS", "").split(os.pathsep) if p]
"""Each holds the unpacked wheels of one version: nvidia-cutlass-dsl, its -libs-base, -core, -cu12 or 13."""


def test_a_compiler_that_changes_the_module_in_place_is_served():
    """As that of 4.6."""
    from cutlass._mlir import ir

    with ir.Context(), ir.Location.unknown():
        in_place, given, other = map(ir.Module.parse, ("module @a {}", "module @b {}", "module @c {}"))
        assert SEAM._checked(keep_ptx(lambda *_: None))(None, in_place, "") is in_place
        assert SEAM._checked(keep_ptx(lambda *_: other))(None, given, "") is other


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=[f.name for f in FOLDERS])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_readme_with_another_version(folder, arch, tmp_path):
    (script,) = blocks("Run a kernel", "python")
    path = [str(folder), str(folder / "nvidia_cutlass_dsl" / "dsl_packages"), str(SOURCES)]
    for text, code in ((script, 0), (script.replace("    cute.arch.sync_threads()\n", ""), 1)):
        (tmp_path / "mirror.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "cute_emulator", "--arch", arch, "mirror.py"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert ("[shared-race]" in done.stderr) == bool(code)
