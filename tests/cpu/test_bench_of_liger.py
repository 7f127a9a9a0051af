"""`bench --epilogue` times an op followed by Liger's kernels; here torch's operations stand for those."""

from types import SimpleNamespace

import pytest
import torch

from overlap_gemm.cli.command_options import epilogue_named
from overlap_gemm.runtime.group import Group, resolve
from overlap_gemm.testing.workload import Workload
from overlap_gemm_tools import liger_calls, norm_calls
from overlap_gemm_tools.epilogue_calls import EpilogueCalls


def functions_of_liger():
    """Returns torch's operations by the names of Liger's kernels, which need a GPU."""

    def liger_rms_norm(x, weight, eps, in_place):
        assert not in_place
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    def liger_fused_add_rms_norm(x, residual, weight, eps, in_place):
        return liger_rms_norm(x + residual, weight, eps, in_place), x + residual

    return SimpleNamespace(
        liger_rms_norm=liger_rms_norm,
        liger_fused_add_rms_norm=liger_fused_add_rms_norm,
        liger_swiglu=lambda gate, up: torch.nn.functional.silu(gate) * up,
        liger_geglu=lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    )


@pytest.mark.parametrize(
    ("op", "name", "end"),
    [
        ("all_gather_gemm", "swiglu", ""),
        ("all_gather_gemm", "geglu_tanh", ""),
        ("all_gather_gemm", "geglu", None),
        ("gemm_reduce_scatter", "swiglu", None),
        ("gemm_reduce_scatter", "add_residual_squared", ", norm"),
        ("gemm_all_reduce", "add_residual_rms_norm", ", norm"),
        ("all_gather_gemm", "scale_gathered_rows", ", norm"),
    ],
)
def test_liger_follows_the_op_where_it_has_an_equal_kernel(op, name, end, monkeypatch):
    functions = functions_of_liger()
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for module in (liger_calls, norm_calls):
        monkeypatch.setattr(module, "kernels", lambda device: functions)
    workload = Workload("", op, 6, 128, 32, torch.float32)
    operands = workload.operands(Group("", 0, 1), torch.device("cpu"))
    made = EpilogueCalls(epilogue_named(name), workload).by(operands, resolve(""), ["decomposed"])
    names = [one for one in made if one.endswith(", liger")]
    assert names == ([] if end is None else [f"decomposed{end}, liger"])
    for one in names:
        results = made[one](), made[one.replace("liger", "eager")]()
        result, wanted = ([r] if isinstance(r, torch.Tensor) else list(r) for r in results)
        torch.testing.assert_close(result, wanted)


def test_liger_is_timed_on_gpus_where_it_is_installed(monkeypatch):
    assert liger_calls.kernels(torch.device("cpu")) is None
    monkeypatch.setattr(liger_calls.importlib.util, "find_spec", lambda name: None)
    assert liger_calls.kernels(torch.device("cuda")) is None
