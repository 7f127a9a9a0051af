"""The first kernel of the emulator's page runs as pasted, and so do the page's other snippets."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator, mutate
from cute_emulator.testing import emulator_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "emulator" / "docs" / "index.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def run_snippet(words, **names):
    """Executes the one snippet that has these words; returns its names."""
    (text,) = (text for text in SNIPPETS if words in text)
    exec(text, names)
    return names


def test_the_step_of_a_workflow_fails_for_a_race_and_writes_it_for_code_review(tmp_path, monkeypatch):
    front = (ROOT / "emulator" / "README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", front, re.S)
    command, *words = shlex.split(re.findall(r"```yaml\n- run: (.*)\n", front)[0])
    assert command == "cute-emulator" and f"sarif_file: {words[words.index('--report') + 1]}" in front
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    for text, code, rules in (
        (script, 0, set()),
        (script.replace("    cute.arch.sync_threads()\n", ""), 1, {"shared-race"}),
    ):
        (tmp_path / words[-1]).write_text(text)
        done = emulator_command(*words)
        assert done.returncode == code, done.stderr
        (run,) = json.loads((tmp_path / "races.sarif").read_text())["runs"]
        assert {result["ruleId"] for result in run["results"]} == rules


def test_the_example_runs_as_pasted(tmp_path):
    section = PAGE.split("## A first kernel")[1].split("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.S)
    script = tmp_path / "add_one.py"
    script.write_text(example)
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert result.returncode == 0, result.stderr
    numbers = [float(n) for n in re.findall(r"(\d+)\.", result.stdout)]
    assert numbers == [n + 1.0 for n in range(32)]
    assert re.search(r"[1-9]\d* warp instructions", result.stdout)


@cute.kernel
def add_one_kernel(x: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    x[tid] = x[tid] + 1.0


@cute.jit
def add_one(x: cute.Tensor):
    add_one_kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


def test_one_rank():
    x = torch.arange(32.0)
    names = run_snippet(
        "ranks=1", Emulator=Emulator, cute=cute, from_dlpack=from_dlpack, add_one=add_one, x=x
    )
    assert x.tolist() == [n + 1.0 for n in range(32)]
    assert names["emu"].report.instructions > 0


@cute.kernel
def greet_kernel(addresses: cute.Tensor, inbox: cute.Tensor, rank: Int32):
    """Every rank tells the next one its number, and keeps its own."""
    tid, _, _ = cute.arch.thread_idx()
    there = addresses[(rank + 1) % 4]
    pointer = cute.make_ptr(inbox.element_type, there, cute.AddressSpace.gmem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(1024))[tid] = (rank + 1).to(inbox.element_type)
    inbox[32 + tid] = (10 * rank).to(inbox.element_type)


@cute.jit
def greet(addresses: cute.Tensor, inbox: cute.Tensor, rank: Int32, stream: CUstream):
    greet_kernel(addresses, inbox, rank).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def test_several_ranks():
    with Emulator(ranks=4):
        table, inbox = torch.zeros(4, dtype=torch.int64), torch.zeros(1024)
        compiled = cute.compile(greet, from_dlpack(table), from_dlpack(inbox), 1, CUstream(0))
    names = run_snippet(
        "ranks=4",
        Emulator=Emulator,
        torch=torch,
        from_dlpack=from_dlpack,
        compiled=compiled,
        stream=CUstream(0),
    )
    for rank in range(4):
        assert names["inbox"][rank][:32].tolist() == [(rank - 1) % 4 + 1.0] * 32
        assert names["inbox"][rank][32:64].tolist() == [10.0 * rank] * 32


@cute.kernel
def mirror_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    """``c`` is ``a`` and ``b`` in turn, by way of shared memory."""
    tid, _, _ = cute.arch.thread_idx()
    row = cute.make_tensor(cute.arch.alloc_smem(a.element_type, 64), cute.make_layout(64))
    row[tid] = a[tid] + b[tid]
    cute.arch.sync_threads()
    c[tid] = row[63 - tid]


@cute.jit
def mirror(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: CUstream):
    mirror_kernel(a, b, c).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


def test_mutations():
    a, b, c = torch.arange(64.0), torch.arange(64.0) ** 2, torch.zeros(64)
    stream = CUstream(0)
    with Emulator("sm_100a"):
        compiled = cute.compile(mirror, *map(from_dlpack, (a, b, c)), stream)

    def call(*arguments):
        *tensors, on = arguments
        compiled(*map(from_dlpack, tensors), on)

    names = run_snippet(
        "mutate.run", mutate=mutate, Emulator=Emulator, torch=torch, compiled=call,
        a=a, b=b, c=c, stream=stream, reference=(a + b).flip(0),
    )  # fmt: skip
    assert [(o.mutation.change, o.verdict) for o in names["outcomes"]] == [("remove", "detected")]


SAXPY = """.version 8.8
.target sm_90
.address_size 64
.visible .entry saxpy(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n)
{
.reg .pred %p<2>; .reg .b32 %r<5>; .reg .f32 %f<4>; .reg .b64 %d<4>;
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r1, %r1, %r2, %r3;
ld.param.u32 %r4, [n]; setp.ge.u32 %p1, %r1, %r4; @%p1 ret;
ld.param.u64 %d1, [x]; ld.param.u64 %d2, [y];
mul.wide.u32 %d3, %r1, 4; add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
ld.global.f32 %f1, [%d1]; ld.global.f32 %f2, [%d2]; ld.param.f32 %f3, [a];
fma.rn.f32 %f2, %f1, %f3, %f2; st.global.f32 [%d2], %f2;
ret;
}
"""


def test_a_kernel_from_elsewhere(tmp_path, monkeypatch):
    x, y = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
    run_snippet("import run", ptx=SAXPY, x=x, y=y)
    np.testing.assert_array_equal(y, 2.5 * x + 1)

    (launch,) = re.findall(r"```json\n(.*?)```", (ROOT / "emulator" / "docs" / "index.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.json").write_text(launch)
    (tmp_path / "k.ptx").write_text(SAXPY)
    np.save("y.npy", y)
    done = emulator_command("run", "k.ptx", "launch.json")
    assert done.returncode == 0, done.stderr
    assert np.isfinite(np.load("out.npy")).all() and (np.load("out.npy") != y).any()
