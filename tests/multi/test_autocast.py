"""`torch.autocast`: the dtypes that nn.Linear has under it, and its values."""

import pytest
import torch
from torch import nn

from overlap_gemm.nn import ColumnParallelLinear, ParallelMLP, RowParallelLinear

KINDS = {
    "all_gather": (ColumnParallelLinear, {"sequence_parallel": True}),
    "local": (ColumnParallelLinear, {}),
    "gather_output": (ColumnParallelLinear, {"gather_output": True}),
    "reduce_scatter": (RowParallelLinear, {"sequence_parallel": True}),
    "all_reduce": (RowParallelLinear, {}),
    "whole_input": (RowParallelLinear, {"input_is_parallel": False}),
}


def same_dtypes_as_linear(rank, size, kind, x_dtype, weight_dtype, autocast_dtype):
    layer_class, options = KINDS[kind]
    torch.manual_seed(0)
    linear = nn.Linear(8, 8, dtype=weight_dtype)
    layer = layer_class.from_linear(linear, **options)
    whole = torch.randn(2 * size, 3, 8, dtype=x_dtype)
    own = whole
    if kind == "all_gather":
        own = whole.chunk(size)[rank]
    elif kind in ("reduce_scatter", "all_reduce"):
        own = whole.chunk(size, -1)[rank].contiguous()
    results = []
    for module, given in ((linear, whole), (layer, own)):
        given = given.clone().requires_grad_()
        with torch.autocast("cpu", autocast_dtype):
            out = module(given)
        (out.float() ** 2).sum().backward()
        results.append((out, given.grad, module.weight.grad, module.bias.grad))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
    rows = results[0][0]
    if kind == "reduce_scatter":
        rows = rows.chunk(size)[rank]
    if kind in ("all_gather", "local"):
        rows = rows.chunk(size, -1)[rank]
    torch.testing.assert_close(results[1][0].double(), rows.double(), rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", autocast_dtype, enabled=False):  # no trace of it is left
        if x_dtype != weight_dtype:
            with pytest.raises((TypeError, RuntimeError), match="same dtype|operands must share dtype"):
                layer(own)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.float16),
        (torch.float64, torch.float64, torch.bfloat16),
    ],
    ids=lambda dtypes: "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
)
def test_same_dtypes_as_linear(ranks, kind, dtypes):
    ranks(2).run(same_dtypes_as_linear, kind, *dtypes)


def compiled(rank, size):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = ParallelMLP(8, 10, sequence_parallel=True, bias=True)
    x = torch.randn(6, 2, 8)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    out = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, call(x))


def test_compiled(ranks):
    ranks(2).run(compiled)
