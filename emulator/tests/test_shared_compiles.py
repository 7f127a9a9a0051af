"""Equal modules are compiled once, for all runs of a script, and run the same; ptxas does not optimise."""

import re
import subprocess
import sys

import cutlass
import pytest
import torch
from cutlass import cute
from cutlass.base_dsl.compiler import Compiler
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator
from cute_emulator.host.dsl import shared_compiles


@cute.kernel
def scale(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread] * cutlass.Float32(factor)


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Constexpr):
    scale(x, y, factor).launch(grid=(1, 1, 1), block=(32, 1, 1))


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """Pipelines of the compiles that the DSL made, in a folder without earlier results."""
    seen, compile_module = [], Compiler.compile

    def counted(compiler, module, pipeline, *args, **kwargs):
        seen.append(pipeline)
        return compile_module(compiler, module, pipeline, *args, **kwargs)

    monkeypatch.setattr(Compiler, "compile", counted)
    monkeypatch.setattr(shared_compiles, "folder", lambda: tmp_path)
    return seen


def run(factor, options=""):
    x, y = torch.arange(32, dtype=torch.float32), torch.zeros(32)
    with Emulator("sm_90a") as emulator:
        views = from_dlpack(x), from_dlpack(y)
        compiled = cute.compile(launch, *views, factor, options=options)
        compiled(*views)
    assert torch.equal(y, x * factor) and emulator.report.instructions
    return emulator.report.instructions


def test_equal_modules_are_compiled_once_and_give_the_same_run(compiles):
    assert run(3.0) == run(3.0) == run(3.0)
    assert len(compiles) == 1


def test_another_constant_or_option_is_another_compile(compiles):
    run(3.0)
    run(4.0)
    assert len(compiles) == 2
    run(3.0, options="--opt-level 1")
    assert len(compiles) == 3


def test_ptx_that_is_asked_for_is_written_each_time(compiles, tmp_path, monkeypatch):
    texts = []
    for name in ("first", "second"):
        monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path / name))
        (tmp_path / name).mkdir()
        run(5.0, options=f"--keep-ptx --dump-dir={tmp_path / name}")
        texts.append([file.read_text() for file in sorted((tmp_path / name).glob("*.ptx"))])
    assert len(compiles) == 1
    assert texts[0] == texts[1] and len(texts[0]) == 1


def test_a_damaged_result_is_compiled_again(compiles, tmp_path):
    run(3.0)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for number, damaged in enumerate((content[:-1], content[:-1] + b"?", b"", b"\xff\n" + content)):
        file.write_bytes(damaged)
        run(3.0)
        assert len(compiles) == number + 2
        assert file.read_bytes() == content, "the result was not replaced"


SCRIPT = """
import cutlass
from cutlass import cute
from cutlass.base_dsl.compiler import Compiler
from cuda.bindings.driver import CUstream
from cute_emulator import Emulator

compile_module, compiles = Compiler.compile, []
Compiler.compile = lambda *args, **kwargs: compiles.append(1) or compile_module(*args, **kwargs)

@cute.kernel
def say():
    cute.printf("{}", 7)

@cute.jit
def launch(stream: CUstream):
    say().launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

with Emulator("sm_90a"):
    cute.compile(launch, CUstream(0))(CUstream(0))
print("compiles", len(compiles))
"""


def test_processes_share_the_folder_of_the_variable_until_a_line_changes(tmp_path, monkeypatch):
    folder, script = tmp_path / "compiles", tmp_path / "script.py"
    folder.mkdir()
    monkeypatch.setenv("CUTE_EMULATOR_COMPILES", str(folder))
    outputs = []
    for text in (SCRIPT, SCRIPT, SCRIPT.replace("7)", "8)")):
        script.write_text(text)
        command = [sys.executable, str(script)]
        outputs.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert outputs == [["7", "compiles", "1"], ["7", "compiles", "0"], ["8", "compiles", "1"]]
    assert len(list(folder.iterdir())) == 2


def test_ptxas_does_not_optimise_unless_the_caller_sets_its_options_or_dumps_the_binary(compiles, tmp_path):
    run(3.0)
    run(3.0, options="--ptxas-options=-O2")
    run(3.0, options=f"--keep-cubin --dump-dir={tmp_path}")
    options = [re.findall(r"ptx-options='([^']*)'", pipeline) for pipeline in compiles]
    assert options == [["-O0"], ["-O2"], []]
