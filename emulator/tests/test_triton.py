"""Triton in the emulator, where it is installed: unchanged kernels, in Python and in scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_emulator import Emulator
from cute_emulator.settings import settings

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

from .kernels_triton import RUNS, add, matmul, numbers  # noqa: E402

ARCHS = ("sm_90a", "sm_100a")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", RUNS)
def test_kernels_compute_what_torch_does(arch, name):
    torch.manual_seed(0)
    for setting in settings(seeds=1)[:3]:
        with Emulator(arch, **setting.options()) as emu:
            out, want = RUNS[name]()
        torch.testing.assert_close(out.float(), want.float(), rtol=1e-2, atol=3e-2)
        assert emu.report.instructions > 0 and not emu.report.findings


def test_each_architecture_compiles_its_own():
    kernels, a = [], torch.zeros(64, 64).half()
    for arch in ARCHS:
        with Emulator(arch):
            kernel = matmul[1, 1](a, a, a, 64, 64, ROWS=64, COLUMNS=64, DEPTH=32, num_stages=1)
            kernels.append(kernel.asm["ptx"])
    assert "wgmma" in kernels[0] and "tcgen05.mma" in kernels[1]


def test_a_compiled_kernel_has_the_registers_of_its_machine_code():
    x = torch.zeros(64)
    with Emulator("sm_90a"):
        simple = add[1,](x, x, torch.empty_like(x), 64, BLOCK=64)
        a, b, c = torch.zeros(3, 64, 64).half()
        large = matmul[1, 1](a, b, c, 64, 64, ROWS=64, COLUMNS=64, DEPTH=32, num_stages=1)
    assert 0 < simple.n_regs < large.n_regs <= 255


def test_memory_beyond_a_tensor_is_a_fault_that_names_the_line():
    x = torch.zeros(100)
    with Emulator("sm_90a"), pytest.raises(Exception, match=r"kernels_triton\.py:12.*out of bounds"):
        add[(1,)](x, x, x, 101, BLOCK=256)


def test_tuples_and_numbers_of_every_type():
    out = torch.zeros(6, dtype=torch.float64)
    with Emulator("sm_90a"):
        numbers[(1,)](out, (3, 0.5), -7, 2**40, 1.25, True)
    assert out.tolist() == [3, 0.5, -7, 2**40, 1.25, 1]


SCRIPT = """
import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = triton.runtime.driver.active.get_active_torch_device()

@triton.autotune([triton.Config({"BLOCK": 4096}, num_warps=64), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def shift(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)
    tl.store(out + at + 1, tl.load(x + at, mask=at < n), mask=at + 1 < n - LESS)

@triton.jit
def tiles(a, b, out, k, scale, SIZE: tl.constexpr):
    sums = tl.zeros((SIZE, SIZE), tl.float32)
    for at in range(0, k, SIZE):
        sums = tl.dot(a.load([0, at]), b.load([at, 0]), sums)
    out.store([0, 0], (sums * scale).to(tl.float16))

print(triton.testing.do_bench(lambda: None) > 0, DEVICE == torch.zeros(1, device="cuda").device)
a, b, c = (torch.randn(64, 64, device=DEVICE).half() for _ in range(3))
tiles[(1,)](*(TensorDescriptor.from_tensor(t, [32, 32]) for t in (a, b, c)), 64, 0.5, SIZE=32)
torch.testing.assert_close(c[:32, :32], ((a.float() @ b.float()) / 2).half()[:32, :32], rtol=1e-2, atol=1e-2)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    x = torch.arange(1000.0, device=DEVICE)
    out = torch.empty_like(x)
    shift[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, out, 1000)
print("done")
try:
    shift[(1,)](torch.zeros(64), out, 64)
except ValueError as error:
    print(error)
"""


def command(*words, cwd):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, "-m", "cute_emulator", *words]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_script_runs_unchanged_and_its_race_is_named(arch, tmp_path):
    (tmp_path / "shift.py").write_text(SCRIPT.replace("LESS", "10000"))
    done = command("--arch", arch, "shift.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    want = ["True True", "done", "Pointer argument x cannot be accessed from Triton (cpu tensor?)"]
    assert done.stdout.splitlines() == want
    (tmp_path / "shift.py").write_text(SCRIPT.replace("LESS", "0"))
    done = command("--arch", arch, "shift.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "[race]" in done.stderr and "shift.py:12" in done.stderr and "shift.py:11" in done.stderr


def without_addresses(text):
    return re.sub(r" \[0x\w+, 0x\w+\)|0x\w+", "", text)


def test_the_page_for_newcomers(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "triton.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.S)
    shell = re.findall(r"```\n\$ (.*?)```", page, re.S)
    (bug,) = re.findall(r"```\n(    tl.*?)```", page, re.S)
    right, wrong = ("    tl.atomic_add(sums + row, tl.sum(part, 0))\n", bug)
    (tmp_path / "sums.py").write_text(script)
    done = command(*shell[0].splitlines()[0].split()[1:], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == shell[0].splitlines()[1]
    assert done.stderr.split(" in ")[0] == shell[0].splitlines()[2].split(" in ")[0]

    assert right in script
    (tmp_path / "sums.py").write_text(script.replace(right, wrong))
    done = command("--arch", "sm_90a", "sums.py", cwd=tmp_path)
    assert done.returncode == 1
    assert without_addresses(shell[1].splitlines()[1]) in without_addresses(done.stderr)

    (tmp_path / "sums.py").write_text(script.replace(", mask=column < columns, other=0.0", ""))
    done = command("--arch", "sm_90a", "sums.py", cwd=tmp_path)
    (fault,) = re.findall(r"```\n(MemoryFault.*?)\n```", page, re.S)
    assert fault.partition("bytes at")[0] in done.stderr
