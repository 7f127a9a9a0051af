"""Mistakes are refused where they are made, in one line; the version is known."""

import importlib.metadata
import re
import subprocess
import sys
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ParallelStyle
from typer.testing import CliRunner

import overlap_gemm
from overlap_gemm import nn, parallel
from overlap_gemm.backends.op_call import BackendName
from overlap_gemm.backends.select import BACKENDS
from overlap_gemm.cli import app


@pytest.fixture(autouse=True)
def alone():
    """A command that was refused after its mesh leaves a world of one, which other tests must not meet."""
    yield
    overlap_gemm.finalize()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", overlap_gemm.__version__)
    assert importlib.metadata.version("overlap-gemm") == overlap_gemm.__version__
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.output) == (0, f"overlap-gemm {overlap_gemm.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--m", "-3"], r"Invalid value for '--m'"),
        (["bench", "--op", "all_gather"], r"Invalid value for --op: \['all_gather'\] is not among"),
        (["demo", "--backend", "decompsed"], r"Invalid value for '--backend': .*'auto', 'torch', 'seq"),
        (["demo", "--text", "no/such/file"], r"no/such/file"),
        (["demo", "--device", "cuda:1"], r"init\(device='cuda:1'\): device must be 'cpu' or 'cuda'"),
        (["dmeo"], r"No such command 'dmeo'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_on_the_command_line_is_told_in_one_line(arguments, words):
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code in (1, 2)
    errors = [line for line in said.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, said.stderr
    assert re.search(words, errors[0]), errors
    assert "Traceback" not in said.output
    overlap_gemm.finalize()


def test_backends_have_names_that_type_checkers_know():
    assert set(get_args(BackendName)) == {"auto", *(backend.name for backend in BACKENDS)}


SCRIPT = """
from typing import assert_type

import torch
from torch import Tensor

import overlap_gemm
from overlap_gemm import nn, parallel

x, weight = torch.randn(2, 4), torch.randn(3, 4)
assert_type(overlap_gemm.all_gather_gemm(x, weight), Tensor)
assert_type(overlap_gemm.all_gather_gemm(x, [weight, weight], backend="decomposed"), list[Tensor])
assert_type(overlap_gemm.all_gather_gemm(x, weight, return_gathered=True), tuple[Tensor, Tensor])
assert_type(overlap_gemm.all_gather_gemm(x, [weight], return_gathered=True), tuple[list[Tensor], Tensor])
assert_type(overlap_gemm.gemm_reduce_scatter(x, weight, bias=None, dim=0), Tensor)
assert_type(overlap_gemm.gemm_all_reduce(x, weight, reserve_sms=8), Tensor)
assert_type(nn.column_parallel_gemm(x, weight, None, None, "torch"), Tensor)
assert_type(overlap_gemm.__version__, str)
assert_type(overlap_gemm.init().rank, int)
assert_type(overlap_gemm.workspace_bytes(), int)


class Model(torch.nn.Linear):
    def generate(self) -> int:
        return 1


mesh = torch.distributed.init_device_mesh("cpu", (1,))
assert_type(parallel.parallelize(Model(4, 4), mesh).generate(), int)
with parallel.exportable(Model(4, 4)) as model:
    assert_type(model.generate(), int)
layer = nn.RowParallelLinear(4, 4, sequence_parallel=True)
overlap_gemm.gemm_all_reduce(x, weight, backend="decompsed")
nn.ParallelMLP(4, 4, backend="decompsed")
parallel.OverlapRowwiseParallel(backend="decompsed")
overlap_gemm.all_gather_gemm(x, weight, rows="same")
nn.column_parallel_gemm(x, weight, None, None, "decompsed")
parallel.parallelize(Model(4, 4), mesh, logits="same")
"""


def test_mypy_knows_what_calls_return_and_refuses_names_that_are_not_there(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports",
            "--follow-imports=silent", "--python-version=3.11", f"--cache-dir={tmp_path}", script,
        ],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    errors = re.findall(r"script\.py:(\d+): error: (.*)", done.stdout)
    lines = enumerate(SCRIPT.splitlines(), 1)
    wrong = [number for number, line in lines if '"decompsed"' in line or '"same"' in line]
    assert sorted({int(number) for number, _ in errors}) == wrong, done.stdout


def test_layers_refuse_what_they_could_never_do():
    for layer in (nn.ColumnParallelLinear, nn.RowParallelLinear, nn.ParallelMLP):
        with pytest.raises(ValueError, match="backend='decompsed' is not available"):
            layer(4, 4, backend="decompsed")
        for wrong in (7, -1, None):
            with pytest.raises(ValueError, match=rf"sequence_dim must be 0 .* got {wrong}"):
                layer(4, 4, sequence_dim=wrong)


def test_styles_refuse_what_they_could_never_do():
    styles = [getattr(parallel, name) for name in parallel.__all__ if name.startswith("Overlap")]
    assert len(styles) == 3
    for style in styles:
        assert issubclass(style, ParallelStyle)
        with pytest.raises(ValueError, match="backend='decompsed' is not available"):
            style(backend="decompsed")


def test_init_refuses_devices_that_are_not_there():
    with pytest.raises(ValueError, match=r"init\(device='cuda:1'\): device must be 'cpu' or 'cuda'"):
        overlap_gemm.init(device="cuda:1")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"init\(device='cuda'\): this machine has no CUDA device"):
            overlap_gemm.init(device="cuda")
