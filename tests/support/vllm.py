"""Stand-in of vLLM's modules, with the names and contracts that the plug-in uses, for CPU ranks."""

import os
import sys
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from overlap_gemm import quantize_rows
from overlap_gemm.integrations import vllm as plugin

NAMES = {
    "vllm.config": ["get_current_vllm_config_or_none"],
    "vllm.distributed": ["tensor_model_parallel_all_gather", "tensor_model_parallel_all_reduce"],
    "vllm.distributed.parallel_state": ["get_tp_group"],
    "vllm.envs": ["environment_variables", "VLLM_BATCH_INVARIANT"],
    "vllm.model_executor.custom_op": ["maybe_get_oot_by_class"],
    "vllm.model_executor.layers.linear": [
        "ColumnParallelLinear",
        "RowParallelLinear",
        "UnquantizedLinearMethod",
    ],
    "vllm.model_executor.layers.logits_processor": ["LogitsProcessor"],
    "vllm.model_executor.layers.vocab_parallel_embedding": ["UnquantizedEmbeddingMethod"],
    "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel": ["FP8ScaledMMLinearKernel"],
}
"""Names that the plug-in imports."""


def stand_in(calls):
    """Returns modules with the names, the registry by class names and the forward's contract of vLLM's."""
    registry = {}

    class UnquantizedLinearMethod:
        pass

    class QuantFP8:
        """Scales of each token, or the layer's own; rows padded to 17, as vLLM pads for torch's product."""

        def __init__(self, by_token):
            self.static, self.use_per_token_if_dynamic = False, by_token

        def __call__(self, x, scale, bound):
            padded = nn.functional.pad(x, (0, 0, 0, max(0, 17 - len(x))), value=7.0)
            if scale is None:
                return quantize_rows(padded)
            return (padded / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    class FP8ScaledMMLinearKernel:
        def __init__(self, by_token=True):
            self.config = SimpleNamespace(out_dtype=None, by_token=by_token)
            self.quant_fp8 = QuantFP8(by_token)

        def apply_weights(self, layer, x, bias=None):
            raise AssertionError("the layer's own forward is a stand-in")

        def _get_layer_params(self, layer):
            return layer.weight, layer.weight_scale, layer.input_scale, None

        def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
            calls.append("product")
            out = ((A.float() * As) @ (B.float() * Bs.reshape(1, -1))).to(out_dtype)
            return (out if bias is None else out + bias).view(output_shape)

    class PluggableLayer(nn.Module):
        def __new__(cls, *args, **kwargs):
            return super().__new__(registry.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, layer):
            assert cls.__name__ not in registry, "Duplicate layer name"
            registry[cls.__name__] = layer
            return layer

    class ColumnParallelLinear(PluggableLayer):
        def __init__(self, weight, bias, **options):
            super().__init__()
            self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
            self.tp_size, self.quant_method = dist.get_world_size(), UnquantizedLinearMethod()
            self.gather_output = self.return_bias = True
            self.skip_bias_add = False
            vars(self).update(options)

        def forward(self, input_):
            calls.append("own")
            return "vLLM's", None

    class LogitsProcessor(PluggableLayer):
        def __init__(self, vocab_size, **options):
            super().__init__()
            self.org_vocab_size, self.use_all_gather, self.head_dtype = vocab_size, True, None
            vars(self).update(options)

        def _get_logits(self, hidden_states, lm_head, embedding_bias, *skip_gather):
            calls.append("own")
            return "vLLM's"

    class RowParallelLinear(PluggableLayer):
        def __init__(self, weight, bias, **options):
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=weight.dtype != torch.float8_e4m3fn)
            self.bias = None if bias is None else nn.Parameter(bias)
            self.tp_size, self.input_size = dist.get_world_size(), weight.shape[1] * dist.get_world_size()
            self.output_size = len(weight)
            self.input_is_parallel = self.reduce_results = self.return_bias = True
            self.skip_bias_add, self.quant_method = False, UnquantizedLinearMethod()
            vars(self).update(options)

        def forward(self, input_):
            calls.append("own")
            return "vLLM's", None

    def tensor_model_parallel_all_reduce(x):
        calls.append("all_reduce")
        dist.all_reduce(x)
        return x

    def tensor_model_parallel_all_gather(x):
        calls.append("all_gather")
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    group = SimpleNamespace(device_group=dist.group.WORLD)
    settings = SimpleNamespace(
        kernel_config=SimpleNamespace(linear_backend="auto"),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
    )
    contents = {
        "get_current_vllm_config_or_none": lambda: settings,
        "environment_variables": {},
        "VLLM_BATCH_INVARIANT": False,
        "maybe_get_oot_by_class": lambda kind: registry.get(kind.__name__, kind),
        "tensor_model_parallel_all_gather": tensor_model_parallel_all_gather,
        "tensor_model_parallel_all_reduce": tensor_model_parallel_all_reduce,
        "ColumnParallelLinear": ColumnParallelLinear,
        "LogitsProcessor": LogitsProcessor,
        "UnquantizedEmbeddingMethod": type("UnquantizedEmbeddingMethod", (), {}),
        "get_tp_group": lambda: group,
        "RowParallelLinear": RowParallelLinear,
        "UnquantizedLinearMethod": UnquantizedLinearMethod,
        "FP8ScaledMMLinearKernel": FP8ScaledMMLinearKernel,
    }
    modules = {
        name: ModuleType(name)
        for name in (
            "vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.kernels",
            "vllm.model_executor.kernels.linear", "vllm.model_executor.kernels.linear.scaled_mm",
        )
    }  # fmt: skip
    for name, wanted in NAMES.items():
        modules[name] = ModuleType(name)
        for one in wanted:
            setattr(modules[name], one, contents[one])
    modules["vllm"].envs = modules["vllm.envs"]
    return modules, RowParallelLinear, registry, settings


@contextmanager
def registered(calls):
    """Installs the stand-in with the plug-in switched on."""
    import_module("torch.testing._internal.optests")  # opcheck's: imported within the block it is forgotten
    modules, layer_class, registry, settings = stand_in(calls)
    plugin._register.cache_clear()
    plugin._overlaps.cache_clear()
    plugin._kernels.clear()
    plugin._log_fallback.cache_clear()
    with mock.patch.dict(sys.modules, modules):
        plugin.register()
        assert not registry, "off unless it is asked for"
        with mock.patch.dict(os.environ, {plugin.SWITCH: "1"}):
            plugin.register()
            plugin.register()  # as vLLM may
            yield modules, layer_class, registry, settings
    plugin._register.cache_clear()
