"""Runs of a script share compiles: an equal module is compiled once, and runs the same."""

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
