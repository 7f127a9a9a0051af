"""The vLLM plug-in in vLLM itself, where it is installed: registry, layers, loaders, compiler; CPU ranks."""

import importlib.util
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from overlap_gemm.integrations import vllm as plugin

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

IN, OUT, TOKENS = 64, 48, 600


def layer(kind, dtype, whole, bias, **options):
    """One of vLLM's layers with its weights loaded as vLLM loads them."""
    made = kind(IN, OUT, bias=bias is not None, params_dtype=dtype, **options)
    made.weight.weight_loader(made.weight, whole)
    if bias is not None:
        made.bias.weight_loader(made.bias, bias)
    made.quant_method.process_weights_after_loading(made)
    return made


def equals_vllms_own(rank, size):
    os.environ.setdefault("VLLM_DIST_IDENT", f"overlap-{os.getppid()}")  # as vLLM's engine does
    # oneDNN packs the weights of vLLM's CPU layers, which are its own then.
    with mock.patch.dict(os.environ, {plugin.SWITCH: "1", "VLLM_PLUGINS": "overlap_gemm"}):
        from vllm import _custom_ops, envs
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.model_executor import custom_op
        from vllm.model_executor.layers import linear
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        assert plugin.SWITCH in envs.compile_factors()
    ours = custom_op.op_registry_oot["RowParallelLinear"]
    with set_current_vllm_config(VllmConfig()), mock.patch.object(_custom_ops, "_supports_onednn", False):
        parallel_state.init_distributed_environment(size, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(size)
        try:
            for overlaps in (True, False):
                with mock.patch.object(plugin, "_overlaps", lambda _, answer=overlaps: answer):
                    compare(rank, size, ours, linear.RowParallelLinear, custom_op)
                    gathers(rank, size, custom_op)
            compiles(rank, size, linear.RowParallelLinear)
            for scheme in ("dynamic", "static"):
                in_8_bits(rank, size, ours, linear.RowParallelLinear, custom_op, scheme)
        finally:
            parallel_state.destroy_model_parallel()


def compare(rank, size, ours, kind, custom_op):
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-1)):
        torch.manual_seed(1)
        whole, bias = torch.randn(OUT, IN, dtype=dtype), torch.randn(OUT, dtype=dtype)
        x = torch.randn(TOKENS, IN, dtype=dtype)
        own = x.chunk(size, 1)[rank].contiguous()
        for options, served in (
            ({}, True),
            ({"bias": None}, True),
            ({"skip_bias_add": True}, True),
            ({"return_bias": False}, True),
            ({"bias": None, "reduce_results": False}, False),
            ({"input_is_parallel": False}, False),
            ({"disable_tp": True}, False),
        ):
            options = {"bias": bias, "prefix": "model.layers.0.mlp.down_proj", **options}
            made = layer(kind, dtype, whole, **options)
            assert type(made) is ours
            with mock.patch.dict(custom_op.op_registry_oot, clear=True):
                theirs = layer(kind, dtype, whole, **options)
            assert type(theirs) is kind
            takes_all = not options.get("input_is_parallel", True) or options.get("disable_tp")
            given = x if takes_all else own
            with mock.patch.object(plugin, "find", side_effect=plugin.find) as asked, torch.inference_mode():
                found, expected = made(given), theirs(given)
            assert bool(asked.call_count) == served, options
            if options.get("return_bias", True):
                skips = made.skip_bias_add
                assert found[1] is (made.bias if skips else None) and expected[1] is (
                    theirs.bias if skips else None
                )
                found, expected = found[0], expected[0]
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def gathers(rank, size, custom_op):
    """Compares a gathered linear, and the logits of a vocabulary that vLLM pads, with vLLM's own."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    torch.manual_seed(4)
    full, bias, x = torch.randn(OUT, IN), torch.randn(OUT), torch.randn(TOKENS, IN)
    head = ParallelLMHead(OUT + 1, IN, params_dtype=torch.float32)
    vocabulary = torch.randn(OUT + 1, IN)
    head.weight.weight_loader(head.weight, vocabulary)
    head.quant_method.process_weights_after_loading(head)
    results = []
    for is_ours in (True, False):
        with mock.patch.dict(custom_op.op_registry_oot, clear=not is_ours):
            linear = layer(ColumnParallelLinear, torch.float32, full, bias, gather_output=True)
            logits = LogitsProcessor(OUT + 1)
        names = {type(linear).__module__, type(logits).__module__}
        assert names == {plugin.__name__} if is_ours else plugin.__name__ not in names
        with mock.patch.object(plugin, "find", side_effect=plugin.find) as ours, torch.inference_mode():
            results.append((linear(x)[0], logits(head, x)))
        assert ours.call_count == 2 * is_ours
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0][1], x @ vocabulary.t(), rtol=1e-4, atol=1e-4)


def in_8_bits(rank, size, ours, kind, custom_op, scheme):
    """Weights by tensor, as `fp8` checkpoints have them, by vLLM's kernel of torch's product."""
    from vllm import _custom_ops
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    torch.manual_seed(3)
    dtype, scale = torch.bfloat16, torch.tensor(0.01)
    whole, bias = torch.randn(OUT, IN), torch.randn(OUT, dtype=dtype)
    values = (whole / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    x = torch.randn(TOKENS, IN, dtype=dtype)
    own = x.chunk(size, 1)[rank].contiguous()
    model = SimpleNamespace(dtype=dtype)

    def rounded(x, scale):  # an operator of vLLM's that its build for CPUs lacks
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    def made():
        config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme=scheme)
        with mock.patch.object(get_current_vllm_config(), "model_config", model):
            layer = kind(IN, OUT, params_dtype=dtype, quant_config=config, prefix="model.layers.0.o_proj")
        layer.weight.weight_loader(layer.weight, values)
        layer.weight_scale.weight_loader(layer.weight_scale, scale)
        layer.bias.weight_loader(layer.bias, bias)
        if scheme == "static":
            layer.input_scale.weight_loader(layer.input_scale, scale)
        with mock.patch.object(_custom_ops, "scaled_fp8_quant", rounded):
            layer.quant_method.process_weights_after_loading(layer)
        return layer

    mine = made()
    with mock.patch.dict(custom_op.op_registry_oot, clear=True):
        theirs = made()
    assert type(mine) is ours and type(theirs) is kind and mine._scaled is not None
    for overlaps in (True, False):
        with (
            mock.patch.object(plugin, "_overlaps", lambda _, answer=overlaps: answer),
            mock.patch.object(plugin, "find", side_effect=plugin.find) as asked,
            torch.inference_mode(),
        ):
            found, expected = mine(own)[0], theirs(own)[0]
        assert asked.call_count
        torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=0.05)
        exact = x.double() @ (values.double() * 0.01).t() + bias.double()
        assert 0 < float((found - exact).norm() / exact.norm()) < 0.05


def compiles(rank, size, kind):
    """One graph, with nothing in it that names a group, for numbers of tokens on both sides of the choice."""
    torch.manual_seed(2)
    whole, bias = torch.randn(OUT, IN), torch.randn(OUT)
    block = nn.Sequential(layer(kind, torch.float32, whole, bias, return_bias=False), nn.SiLU())
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (3, 1024 * size):
        x = torch.randn(tokens, IN)
        with torch.inference_mode():
            found = compiled(x.chunk(size, 1)[rank].contiguous())
        torch.testing.assert_close(found, nn.functional.silu(x @ whole.t() + bias), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    assert "vllm_row_parallel" in graphs[0]


def test_equals_vllms_own(ranks):
    ranks(2).run(equals_vllms_own)
