"""`overlap-gemm emulate` and `compile-check`."""

import pytest
from typer.testing import CliRunner

from overlap_gemm.cli import app
from overlap_gemm.spec import OPS, TRANSPORTS, transports_of
from overlap_gemm.testing import emulated
from overlap_gemm_tools import compile_check
from overlap_gemm_tools.lint import Inspected
from tests.support.ops import FUSED

SMALL = ["emulate", "gemm_reduce_scatter", "--m", "100", "--n", "64", "--k", "64", "--launches", "1"]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    "options",
    [
        ("--arch", "sm_100a", "--tile", "128x64", "--cta-group", "1", "--mode", "lazy"),
        ("--arch", "sm_90a", "--tile", "64x128", "--dtype", "f16", "--world-size", "3"),
        ("--arch", "sm_90a", "--tile", "64x128", "--transport", "nvshmem"),
        pytest.param(("--arch", "sm_90a", "--tile", "64x128", "--without-p2p"), marks=pytest.mark.slow),
    ],
)
def test_a_right_run_ends_with_code_0_and_its_figures(options):
    result = invoke(*SMALL, *options)
    assert result.exit_code == 0, result.output
    for word in ("largest error", "right: 1 launches", "warp-instructions", "0 findings"):
        assert word in result.output


@pytest.mark.parametrize(
    "call",
    [
        ("gemm_all_reduce", "--algorithm", "two_shot", "--tile", "128x64", "--cta-group", "1"),
        ("all_gather_gemm", "--transport", "copy_engine", "--arch", "sm_90a", "--tile", "64x128"),
        pytest.param(
            ("gemm_all_reduce", "--algorithm", "one_shot", "--arch", "sm_90a"), marks=pytest.mark.slow
        ),
        pytest.param(("gemm_all_gather", "--arch", "sm_90a", "--mode", "lazy"), marks=pytest.mark.slow),
        pytest.param(("all_gather_gemm", "--transport", "nvshmem"), marks=pytest.mark.slow),
    ],
)
def test_the_other_ops_run(call):
    result = invoke("emulate", *call, *SMALL[2:])
    assert result.exit_code == 0, result.output
    assert "right: 1 launches" in result.output and "0 findings" in result.output


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("op", FUSED)
def test_a_transport_that_an_op_has_not_is_refused_by_name(op, transport):
    if transport in transports_of(OPS[op]):
        return
    result = invoke("emulate", op, "--transport", transport)
    said = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and f"{op} has no {transport}; it has" in said


def test_what_an_op_cannot_do_is_said():
    result = invoke("emulate", "gemm_all_gather", "--n", "24")
    assert result.exit_code == 1
    assert "12 columns a rank" in " ".join(result.output.split())


def test_a_wrong_result_ends_with_code_1(monkeypatch):
    right = emulated.judge

    def against_other_data(case, given, outs, *how):
        return right(case, emulated.operands(case.with_seed(99)), outs, *how)

    monkeypatch.setattr(emulated, "judge", against_other_data)
    result = invoke(*SMALL)
    assert result.exit_code == 1
    assert "wrong: 1 launches" in result.output


def test_operands_that_need_scales_are_no_choice():
    result = invoke(*SMALL, "--dtype", "e4m3")
    assert result.exit_code == 2
    assert "'e4m3' is not one of 'bf16', 'f16'" in " ".join(result.output.split())


def test_a_tile_that_is_none_is_refused():
    assert "must look like 128x128" in invoke(*SMALL, "--tile", "wide").output


@pytest.fixture
def few_kernels(monkeypatch):
    """The other kernels of `compile-check` are tests/compiled's."""
    monkeypatch.setattr(compile_check, "KERNELS", ("GEMM", "GEMM-RS"))


@pytest.mark.usefixtures("few_kernels")
def test_compile_check_lists_what_ptxas_says():
    result = invoke("compile-check", "--arch", "sm_100a", "--match", "1cta_128x64_c1x1_bf16")
    assert result.exit_code == 0, result.output
    assert "sm_100a_1cta_128x64_c1x1_bf16" in result.output
    assert "2 kernels compiled, 0 with findings" in result.output


@pytest.mark.usefixtures("few_kernels")
def test_compile_check_fails_on_a_finding(monkeypatch):
    monkeypatch.setattr(Inspected, "findings", lambda self, *given, **more: ["planted finding"])
    result = invoke("compile-check", "--arch", "sm_100a", "--match", "128x64_c1x1_bf16")
    assert result.exit_code == 1
    assert "planted finding" in result.output
