"""Our ops in Megatron-LM's tensor-parallel linears.

    from overlap_gemm.integrations.megatron import with_overlap
    model = GPTModel(config, with_overlap(get_gpt_layer_local_spec()), ...)

The layers are Megatron's own, with their parameters, initialisation and checkpoints; only the forward (and so
the backward) is ours. A layer asked for what ours has not (experts, shared experts that overlap with the
dispatcher, gradient accumulation fusion, deferred weight gradients, CPU offloading) calls Megatron's forward,
and the logger of this module says so, once.
"""

import copy
import dataclasses
import functools
import logging
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from ..api.functional import (
    all_gather_gemm,
    column_parallel_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)

logger = logging.getLogger(__name__)


class ColumnParallelLinear(megatron_layers.ColumnParallelLinear):
    """Megatron's, with `all_gather_gemm` under sequence parallelism and a summed gradient without."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: `[s, b, h]` to the product and, with `skip_bias_add`, the bias."""
        why = _why_not(self) or ("disable_grad_reduce" if self.disable_grad_reduce else None)
        if why is not None:
            _say(type(self).__name__, why)
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        if weight is None or tuple(weight.shape) != (self.output_size_per_partition, self.input_size):
            return super().forward(input_, weight, runtime_gather_output)  # which says what is wrong
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
    """Megatron's, with `gemm_reduce_scatter` under sequence parallelism and `gemm_all_reduce` without."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: this rank's features to the sum and, with `skip_bias_add`, the bias."""
        why = _why_not(self)
        if why is not None:
            _say(type(self).__name__, why)
            return super().forward(input_)
        if not self.input_is_parallel:
            input_ = mappings.scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        sum_of_products = gemm_reduce_scatter if self.sequence_parallel else gemm_all_reduce
        out = sum_of_products(input_, self.weight, group=self.tp_group, k=self.input_size)
        if self.skip_bias_add or self.bias is None:
            return out, self.bias if self.skip_bias_add else None
        # Outside of the op: Megatron sums the gradient of a bias that saw a rank's rows only.
        return out + self.bias, None


class OverlapSpecProvider(LocalSpecProvider):
    """A `BackendSpecProvider`: Megatron's local modules with our linears."""

    def column_parallel_linear(self) -> type:
        """Which column parallel linear module the backend uses."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Which row parallel linear module the backend uses."""
        return RowParallelLinear


OURS = {
    megatron_layers.ColumnParallelLinear: ColumnParallelLinear,
    megatron_layers.RowParallelLinear: RowParallelLinear,
}


MLAS_OWN = ("linear_q_down_proj", "linear_kv_down_proj")
"""Fields whose class Megatron's latent attention compares with a list of its own."""


def with_overlap(spec: Any) -> Any:
    """A module specification with our linears in place of Megatron's local ones.

    Args:
        spec: A `ModuleSpec`, such as `get_gpt_layer_local_spec()` returns, what holds several, as
            `get_gpt_decoder_block_spec` does, or a part of one; not changed.

    Raises:
        ValueError: There is none of Megatron's local linears in it, as in Transformer Engine's.
    """
    found: list[type] = []
    changed = _with_overlap(spec, found)
    if not found:
        raise ValueError(
            "with_overlap found none of Megatron's own linears (tensor_parallel.ColumnParallelLinear and "
            "RowParallelLinear) in the specification, and those of Transformer Engine it does not replace: "
            "start from a local one, such as get_gpt_layer_local_spec()"
        )
    return changed


def _with_overlap(spec: Any, found: list[type]) -> Any:
    """`with_overlap`, which adds the linears that it comes across to `found`."""
    if isinstance(spec, type):
        ours = OURS.get(spec, spec)
        if ours in OURS.values():
            found.append(ours)
        return ours
    if isinstance(spec, ModuleSpec):
        changed = copy.copy(spec)
        changed.module, changed.submodules = (
            _with_overlap(each, found) for each in (spec.module, spec.submodules)
        )
        return changed
    if isinstance(spec, (list, tuple)):
        return type(spec)(_with_overlap(each, found) for each in spec)
    if isinstance(spec, functools.partial):  # how Megatron 0.19 says module and submodules
        arguments = _with_overlap(spec.args, found)
        named = {key: _with_overlap(each, found) for key, each in spec.keywords.items()}
        return functools.partial(spec.func, *arguments, **named)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = {
            field.name: _with_overlap(getattr(spec, field.name), found)
            for field in dataclasses.fields(spec)
            if field.name not in MLAS_OWN
        }
        return dataclasses.replace(spec, **fields)
    return spec


def _why_not(layer: Any) -> str | None:
    """What a layer is asked for that our forward has not."""
    asked = {
        "experts": layer.is_expert,
        # Set on a shared expert that overlaps with the dispatcher, which communicates for it.
        "explicit_expert_comm": layer.explicit_expert_comm,
        "gradient_accumulation_fusion": layer.gradient_accumulation_fusion,
        "defer_embedding_wgrad_compute": layer.config.defer_embedding_wgrad_compute,
        "cpu_offloading": layer.config._cpu_offloading_context is not None,
        # Of Megatron 0.19: weights that are gathered for each use, and kernels of its own for inference.
        "gtp_remat": getattr(layer, "gtp_remat_size", 1) > 1,
        "inference_optimized": getattr(layer, "use_inference_optimized_all_gather", False)
        and not layer.training,
    }
    return next((name for name, wanted in asked.items() if wanted), None)


@functools.cache
def _say(layer: str, why: str) -> None:
    """Once for each reason."""
    logger.warning("Megatron's own forward of %s runs: %s", layer, why)
