"""Our ops in Megatron-LM's tensor-parallel linears.

    from overlap_gemm.integrations.megatron import with_overlap
    model = GPTModel(config, with_overlap(get_gpt_layer_local_spec()), ...)

The layers are Megatron's own, with their parameters, initialisation and checkpoints; only forward, and so
backward, is replaced. In specifications of Transformer Engine, as of
`get_gpt_layer_with_transformer_engine_spec()`, they have the arguments, names of parameters and results of
its linears; its attention, and its norms outside of linears, stay. A layer with an unsupported option calls
Megatron's forward, and the logger of this module reports the reason once. Unsupported are:

- experts, and shared experts that overlap with the dispatcher,
- gradient accumulation fusion, deferred weight gradients, `disable_grad_reduce` of column-parallel layers,
- CPU offloading, weights gathered for each use (`gtp_remat`), Megatron's own inference kernels.

8-bit and 4-bit training, and weight gradients that a schedule delays, are errors.
"""

import copy
import dataclasses
import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from ..api.functional import (
    all_gather_gemm,
    column_parallel_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)

logger = logging.getLogger(__name__)


class ColumnParallelLinear(megatron_layers.ColumnParallelLinear):
    """Megatron's layer with `all_gather_gemm` under sequence parallelism, `column_parallel_gemm` without."""

    def __init__(self, *args: Any, config: Any, **options: Any) -> None:
        _check(config)
        super().__init__(*args, config=config, **options)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the product of `[s, b, h]`, and the bias with `skip_bias_add`, as Megatron's layer does."""
        why = _why_not(self) or ("disable_grad_reduce" if self.disable_grad_reduce else None)
        if why is not None:
            _log_fallback(type(self).__name__, why)
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        if weight is None or tuple(weight.shape) != (self.output_size_per_partition, self.input_size):
            return super().forward(input_, weight, runtime_gather_output)  # which raises the error
        bias = None if self.skip_bias_add else self.bias
        if self.sequence_parallel:
            out = all_gather_gemm(
                input_, weight, bias=bias, group=self.tp_group, rows="equal", columns=self.output_size
            )
        else:
            out = column_parallel_gemm(input_, weight, bias, self.tp_group)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            out = mappings.gather_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out, self.bias if self.skip_bias_add else None


class RowParallelLinear(megatron_layers.RowParallelLinear):
    """Megatron's layer with `gemm_reduce_scatter` under sequence parallelism, `gemm_all_reduce` without."""

    def __init__(self, *args: Any, config: Any, **options: Any) -> None:
        _check(config)
        super().__init__(*args, config=config, **options)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the sum over the ranks for this rank's features of `[s, b, h]`, plus bias, and None.

        With `skip_bias_add` returns the sum and the bias. The bias is not passed to the op: under sequence
        parallelism Megatron sums the gradient of the bias over the ranks itself.
        """
        why = _why_not(self)
        if why is not None:
            _log_fallback(type(self).__name__, why)
            return super().forward(input_)
        if not self.input_is_parallel:
            input_ = mappings.scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        sum_of_products = gemm_reduce_scatter if self.sequence_parallel else gemm_all_reduce
        out = sum_of_products(input_, self.weight, group=self.tp_group, k=self.input_size)
        if self.skip_bias_add or self.bias is None:
            return out, self.bias if self.skip_bias_add else None
        # Added outside of the op: Megatron itself sums the gradient of a bias that is applied to local rows.
        return out + self.bias, None


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm of the local rows, then `ColumnParallelLinear`, as Transformer Engine's `LayerNormLinear`.

    Attributes:
        layer_norm_weight: `[h]`; with `layernorm_zero_centered_gamma` the scale minus 1.
        layer_norm_bias: `[h]`, or None for RMSNorm.
    """

    def __init__(self, input_size: int, *args: Any, config: Any, **options: Any) -> None:
        super().__init__(input_size, *args, config=config, **options)
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(
                f"normalization must be LayerNorm or RMSNorm, got {config.normalization!r} for a layer that "
                "replaces TELayerNormColumnParallelLinear"
            )
        start = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
        kind = {"dtype": config.params_dtype, "device": self.weight.device}
        self.layer_norm_weight = nn.Parameter(start(input_size, **kind))
        has_bias = config.normalization == "LayerNorm"
        self.layer_norm_bias = nn.Parameter(torch.zeros(input_size, **kind)) if has_bias else None
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = config.sequence_parallel  # Megatron then sums the gradient
                parameter.allreduce = True

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the product of the normalized input, and the bias with `skip_bias_add`."""
        scale, shape, eps = self.layer_norm_weight, (self.input_size,), self.config.layernorm_epsilon
        if self.config.layernorm_zero_centered_gamma:
            scale = scale + 1
        if self.config.normalization == "RMSNorm":
            rows = F.rms_norm(input_, shape, scale, eps)
        else:
            rows = F.layer_norm(input_, shape, scale, self.layer_norm_bias, eps)
        return super().forward(rows, weight, runtime_gather_output)


class OverlapSpecProvider(LocalSpecProvider):
    """Megatron's `LocalSpecProvider` with our linears."""

    def column_parallel_linear(self) -> type:
        """Returns the class of column-parallel linears."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Returns the class of row-parallel linears."""
        return RowParallelLinear


OURS: dict[type, type] = {
    megatron_layers.ColumnParallelLinear: ColumnParallelLinear,
    megatron_layers.RowParallelLinear: RowParallelLinear,
}

TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"
OURS_FOR_TRANSFORMER_ENGINE: dict[str, type] = {
    "TEColumnParallelLinear": ColumnParallelLinear,
    "TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
    "TERowParallelLinear": RowParallelLinear,
}
"""Layers by the names of Megatron's classes in the module `TRANSFORMER_ENGINE`."""

CHECKED_BY_MLA = ("linear_q_down_proj", "linear_kv_down_proj")
"""Fields whose class Megatron's latent attention (MLA) compares with a fixed list; they stay Megatron's."""


def with_overlap(spec: Any) -> Any:
    """Returns a module specification with our linears in place of Megatron's and Transformer Engine's.

    Args:
        spec: `ModuleSpec`, such as `get_gpt_layer_local_spec()` returns; an object with several
            specifications, such as `get_gpt_decoder_block_spec` returns; or a part of one. It is not changed.

    Raises:
        ValueError: The specification has no tensor-parallel linears of these.
    """
    replaced: list[type] = []
    changed = _with_overlap(spec, replaced)
    if not replaced:
        raise ValueError(
            "with_overlap: the specification must contain Megatron's own linears (tensor_parallel."
            "ColumnParallelLinear, RowParallelLinear) or Transformer Engine's (TEColumnParallelLinear, "
            "TELayerNormColumnParallelLinear, TERowParallelLinear), got none: use one such as "
            "get_gpt_layer_local_spec()"
        )
    return changed


def _with_overlap(spec: Any, replaced: list[type]) -> Any:
    """Returns `with_overlap`'s result, and appends the replaced linears to `replaced`."""
    if isinstance(spec, type):
        ours = OURS.get(spec)
        if spec.__module__ == TRANSFORMER_ENGINE:
            ours = OURS_FOR_TRANSFORMER_ENGINE.get(spec.__name__)
        if ours is not None or spec in OURS.values():
            replaced.append(ours or spec)
        return ours or spec
    if isinstance(spec, ModuleSpec):
        changed = copy.copy(spec)
        changed.module, changed.submodules = (
            _with_overlap(each, replaced) for each in (spec.module, spec.submodules)
        )
        return changed
    if isinstance(spec, (list, tuple)):
        return type(spec)(_with_overlap(each, replaced) for each in spec)
    if isinstance(spec, functools.partial):  # Megatron 0.19's form of module and submodules
        arguments = _with_overlap(spec.args, replaced)
        named = {key: _with_overlap(each, replaced) for key, each in spec.keywords.items()}
        return functools.partial(spec.func, *arguments, **named)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = {
            field.name: _with_overlap(getattr(spec, field.name), replaced)
            for field in dataclasses.fields(spec)
            if field.name not in CHECKED_BY_MLA
        }
        return dataclasses.replace(spec, **fields)
    return spec


def _check(config: Any) -> None:
    """Raises a ValueError for options of Transformer Engine that no forward of ours or Megatron's has."""
    options = {name: getattr(config, name, None) for name in ("fp8", "fp4", "delay_wgrad_compute")}
    wrong = [f"{name}={value!r}" for name, value in options.items() if value]
    if wrong:
        raise ValueError(
            f"with_overlap: the configuration must have no {', '.join(wrong)}: unset it, or use "
            "Transformer Engine's layers"
        )


def _why_not(layer: Any) -> str | None:
    """Returns the first option of a layer that our forward does not support, or None."""
    options = {
        "experts": layer.is_expert,
        # Set on a shared expert that overlaps with the dispatcher, which communicates for it.
        "explicit_expert_comm": layer.explicit_expert_comm,
        "gradient_accumulation_fusion": layer.gradient_accumulation_fusion,
        "defer_embedding_wgrad_compute": layer.config.defer_embedding_wgrad_compute,
        "cpu_offloading": layer.config._cpu_offloading_context is not None,
        # Options of Megatron 0.19: weights gathered for each use, and its own inference kernels.
        "gtp_remat": getattr(layer, "gtp_remat_size", 1) > 1,
        "inference_optimized": getattr(layer, "use_inference_optimized_all_gather", False)
        and not layer.training,
    }
    return next((name for name, is_set in options.items() if is_set), None)


@functools.cache
def _log_fallback(layer: str, why: str) -> None:
    """Logs each reason once."""
    logger.warning("Megatron's own forward of %s runs: %s", layer, why)
