"""The README as a newcomer follows it, with this package alone: its script runs, its planted bug is named."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cute_emulator

README = (Path(__file__).parents[1] / "README.md").read_text()
SOURCES = Path(cute_emulator.__file__).parents[1]


def blocks(heading, language=""):
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.S | re.M)
    return [text for said, text in found if said == language]


ALONE = """
import sys

for name in ("overlap_gemm", "cuda.core", "matplotlib", "jax", "tvm_ffi", "nvshmem", "hypothesis"):
    sys.modules[name] = None
"""
"""What `pip install ./emulator` does not bring cannot be imported."""


def alone(*words, cwd):
    (cwd / "sitecustomize.py").write_text(ALONE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), str(SOURCES)])}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )


def command(*words, cwd):
    return alone("-m", "cute_emulator", *words, cwd=cwd)


def test_the_readme_runs_alone_and_names_the_planted_bug(tmp_path):
    (script,) = blocks("Run a kernel", "python")
    (tmp_path / "mirror.py").write_text(script)
    done = command("mirror.py", cwd=tmp_path)
    shown = blocks("Run a kernel")[0].splitlines()
    assert (done.returncode, done.stdout.strip()) == (0, shown[1]), done.stderr
    assert done.stderr.split(" in ")[0] == shown[2].split(" in ")[0]

    barrier = "    cute.arch.sync_threads()\n"
    assert barrier in script
    (tmp_path / "mirror.py").write_text(script.replace(barrier, ""))
    done = command("mirror.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "mirror(from_dlpack(x), from_dlpack(y))" in done.stderr
    assert "Traceback" not in done.stderr and "seam.py" not in done.stderr
    said = [line.strip() for line in done.stderr.splitlines()]
    for line in blocks("Plant a bug")[0].splitlines()[1:]:
        assert line.strip() in said, line

    done = command("check", "mirror.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "13 of 13 runs are not clean" in done.stdout


def test_a_picture_without_matplotlib_is_refused_before_the_run(tmp_path):
    (script,) = blocks("Run a kernel", "python")
    (tmp_path / "mirror.py").write_text(script)
    done = command("--trace", "gemm.png", "mirror.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "cute-emulator[plots]" in done.stderr and "gemm.html" in done.stderr
    assert "mirrored" not in done.stdout


def test_every_module_imports_alone(tmp_path):
    code = (
        "import importlib, pkgutil, cute_emulator\n"
        "names = [m.name for m in pkgutil.walk_packages(cute_emulator.__path__, 'cute_emulator.')]\n"
        "print(len([importlib.import_module(n) for n in names if not n.endswith('__main__')]))"
    )
    done = alone("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80
