"""CUDA C++ in the emulator, where NVRTC is installed: errors, lines, and the page for newcomers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cute_emulator import compile_cuda, run

try:
    compile_cuda("")
except ImportError as missing:
    pytest.skip(f"{missing}", allow_module_level=True)

PAGE = (Path(__file__).parents[1] / "docs" / "cuda.md").read_text()


def block(language):
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return text


def python(*words, cwd):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )


def test_an_error_of_the_compiler_is_shown():
    with pytest.raises(
        ValueError, match=r'(?s)k\.cu does not compile for sm_90a.*k\.cu\(1\): error: .*"y" is und'
    ):
        compile_cuda("__global__ void k() { y = 1; }", name="k.cu")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_each_architecture_and_parameters_of_its_types(arch):
    source = """struct Pair { short a; double b; };
    extern "C" __global__ void k(double* out, float f, bool t, signed char c, Pair pair) {
      out[0] = f; out[1] = t; out[2] = c; out[3] = pair.a; out[4] = pair.b; }"""
    out, pair = np.zeros(5), np.zeros(1, np.dtype([("a", "i2"), ("b", "f8")], align=True))
    pair[0] = -3, 0.5
    run(compile_cuda(source, arch), "k", 1, 1, [out, 1.5, True, -7, pair.tobytes()])
    assert out.tolist() == [1.5, 1, -7, -3, 0.5]


def test_the_page_for_newcomers(tmp_path):
    source, fence = block("cuda"), "    __threadfence();\n"
    (tmp_path / "sum.cu").write_text(source)
    (tmp_path / "sum.py").write_text(block("python"))
    (tmp_path / "launch.json").write_text(block("json"))
    done = python("sum.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "the sum is right\n"), done.stderr
    done = python("-m", "cute_emulator", "run", "--arch", "sm_90a", "sum.cu", "launch.json", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "out.npy").exists(), done.stderr

    (tmp_path / "sum.cu").write_text(source.replace(fence, "", 1))
    done = python("sum.py", cwd=tmp_path)
    shown = re.findall(r"(AssertionError: .*\n.*)\n```", PAGE)[0]
    assert done.returncode == 1
    assert re.sub("0x[0-9a-f]+", "", shown) in re.sub("0x[0-9a-f]+", "", done.stderr)
    done = python("-m", "cute_emulator", "run", "--arch", "sm_90a", "sum.cu", "launch.json", cwd=tmp_path)
    assert done.returncode == 1 and "of parts" in done.stderr and "sum.cu:12" in done.stderr
