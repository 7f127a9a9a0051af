"""The command itself: it starts without torch, and its commands are what it says they are."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import overlap_gemm
from overlap_gemm import cli
from overlap_gemm.cli import app
from overlap_gemm.spec import OPS


@pytest.fixture(autouse=True)
def alone():
    yield
    overlap_gemm.finalize()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_no_torch(option):
    """It is torch's import that takes seconds."""
    heavy = ("torch", "numpy", "cutlass", "matplotlib", "rich.table")
    script = (
        f"import sys; sys.argv = ['overlap-gemm', {option!r}]\n"
        "from overlap_gemm.cli import app\n"
        "try:\n    app()\n"
        f"finally:\n    print('imported:', [name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "imported: []" in done.stdout, done


def test_every_command_is_found_and_described_as_it_describes_itself():
    said = CliRunner().invoke(app, ["--help"]).output
    for name in (*cli.COMMANDS, *cli.TOOLS):
        assert f"  {name} " in said
        own = cli._command(name)
        assert own.name == name
        assert own.help == cli._help(name)
        assert own.params


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("transformers", "hf"),
        ("matplotlib.pyplot", "plots"),
        ("cute_emulator", "emulator"),
        ("mpi4py", "mpi"),
    ],
)
def test_a_command_without_its_extra_names_the_extra(monkeypatch, module, extra):
    def missing(name, package):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(cli, "import_module", missing)
    result = CliRunner().invoke(app, ["plan", "gemm_reduce_scatter"])
    expected = f"Error: {module} is not installed: pip install 'overlap-gemm[{extra}]'\n"
    assert (result.exit_code, result.output) == (1, expected)


@pytest.mark.parametrize("name", cli.TOOLS)
def test_a_tool_that_is_not_installed_names_its_extra(monkeypatch, name):
    monkeypatch.setattr(cli, "find_spec", lambda package: None)
    result = CliRunner().invoke(app, [name, "--help"])
    expected = f"Error: {name} is a tool for developers: pip install 'overlap-gemm[tools]'\n"
    assert (result.exit_code, result.output) == (1, expected)
    assert cli._help(name) == "Tool for developers: pip install 'overlap-gemm[tools]'."


@pytest.mark.parametrize("module", ["overlap_gemm.cli.lost", "torch", None])
def test_a_missing_module_of_no_extra_is_our_own_mistake(monkeypatch, module):
    def missing(name, package):
        raise ModuleNotFoundError("No module", name=module)

    monkeypatch.setattr(cli, "import_module", missing)
    assert type(CliRunner().invoke(app, ["plan", "gemm_reduce_scatter"]).exception) is ModuleNotFoundError


def explained(*arguments):
    result = CliRunner().invoke(app, ["explain", *map(str, arguments), "--device", "cpu"])
    return result.exit_code, result.output


def test_explain_says_what_the_library_says():
    code, said = explained("all_gather_gemm", 6, 4, 8)
    assert code == 0, said
    overlap_gemm.init(device="cpu")
    choice = overlap_gemm.explain("all_gather_gemm", torch.empty(6, 8), torch.empty(4, 8), rows=6, columns=4)
    assert said == f"{choice}\n"
    assert "P=1" in said


def test_explain_as_if_of_more_ranks():
    code, said = explained("gemm_reduce_scatter", 8192, 4096, 64, "--ranks", 8, "--dtype", "bfloat16")
    assert code == 0, said
    assert said.startswith("gemm_reduce_scatter runs as 'torch'") and "P=8" in said
    assert "backward: all_gather_gemm runs as 'torch'" in said


@pytest.mark.parametrize("op", [name for name in OPS if OPS[name].weight is None])
def test_explain_as_if_of_more_ranks_divides_rows_and_scales_among_them(op):
    for options in ((), ("--dtype", "float8_e4m3fn", "--block", 128)):
        code, text = explained(op, 512, 512, 512, "--ranks", 2, *options)
        assert code == 0 and "P=2" in text and "without any" not in text, text


@pytest.mark.parametrize(
    ("op", "name", "place"),
    [
        ("gemm_reduce_scatter", "add_residual", "after the op"),
        ("all_gather_gemm", "swiglu", "after the op"),
        ("all_gather_gemm", "scale_gathered_rows", "after the op"),
    ],
)
def test_explain_states_where_a_named_epilogue_is_applied(op, name, place):
    for ranks in ((), ("--ranks", 8)):
        code, text = explained(op, 64, 128, 64, "--epilogue", name, *ranks)
        assert code == 0 and f"epilogue {name}: {place}, " in text, text
        assert "epilogue" not in explained(op, 64, 128, 64, *ranks)[1]
    code, text = explained("gemm_all_reduce", 64, 128, 64, "--epilogue", "scale_rows_and_columns")
    assert code == 0 and "epilogue scale_rows_and_columns: before the sum over the ranks" in text, text
    code, text = explained(op, 64, 128, 64, "--epilogue", "norm")
    assert code == 2 and "'norm' is not among add_bias, add_residual" in " ".join(text.split())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_explain_knows_operands_of_8_bits(dtype):
    for ranks in ((), ("--ranks", 8)):
        code, said = explained("gemm_reduce_scatter", 64, 32, 64, "--dtype", dtype, *ranks)
        assert code == 0 and f"torch.{dtype} x torch.{dtype} to torch.bfloat16" in said
        assert "backward:" not in said, "there is no gradient"
    code, said = explained("gemm_reduce_scatter", 64, 32, 272, "--dtype", dtype, "--block", 32)
    assert code == 0 and "scales of blocks of 32 x 32" in said
    assert explained("gemm_reduce_scatter", 64, 32, 272, "--dtype", dtype, "--block", 64)[0] == 2
    assert explained("gemm_reduce_scatter", 64, 32, 40, "--dtype", dtype)[0] == 0
    code, said = explained("gemm_reduce_scatter", 64, 32, 64, "--dtype", dtype, "--block", "mx")
    assert code == 0 and "scales of blocks of 1 x 32" in said
    assert explained("gemm_reduce_scatter", 64, 32, 40, "--dtype", dtype, "--block", "mx")[0] != 0


def test_explain_refuses_what_cannot_be():
    assert explained("gemm", 1, 1, 1)[0] == 2
    code, said = explained("gemm_all_reduce", 1, 1, 1, "--backend", "fused")
    assert code == 1 and "cannot run" in said
