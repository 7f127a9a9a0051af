"""Replicated parameters between layers with sequence parallelism: each rank applies them to its rows only.

The gradient of such a parameter is a partial sum on each rank and must be summed over the ranks. `LayerNorm`
and `RMSNorm` sum it in backward. Parameters of other modules are marked (`sequence_parallel_parameters`), and
their gradients are summed after backward (`sum_sequence_parallel_gradients`), in one message per dtype. The
mark is that of Megatron and TransformerEngine: `parameter.sequence_parallel`.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..dispatch import shard_ops
from ..runtime.group import GroupLike, find, group_name

MARK = "_sequence_parallel_parameters"
"""Attribute of modules whose direct parameters are marked; unlike parameters' attributes it is copied."""


class SequenceParallelWarning(UserWarning):
    """A parameter is applied to this rank's rows, and its gradient is not summed over the ranks."""


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` on this rank's rows of the sequence, with complete gradients of its parameters.

    Args:
        *args: Positional arguments of `torch.nn.LayerNorm`.
        sequence_parallel: True: the input is this rank's rows. False: it is the same on every rank.
        tp_group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        **options: Keyword arguments of `torch.nn.LayerNorm`.
    """

    def __init__(
        self, *args: Any, sequence_parallel: bool = True, tp_group: GroupLike = None, **options: Any
    ):
        super().__init__(*args, **options)
        self.sequence_parallel, self.tp_group = sequence_parallel, group_name(tp_group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes `[..., normalized_shape]`."""
        weight, bias = (_summed(self, parameter) for parameter in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` on this rank's rows of the sequence, with the complete gradient of its weight.

    Args:
        *args: Positional arguments of `torch.nn.RMSNorm`.
        sequence_parallel: True: the input is this rank's rows. False: it is the same on every rank.
        tp_group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        **options: Keyword arguments of `torch.nn.RMSNorm`.
    """

    def __init__(
        self, *args: Any, sequence_parallel: bool = True, tp_group: GroupLike = None, **options: Any
    ):
        super().__init__(*args, **options)
        self.sequence_parallel, self.tp_group = sequence_parallel, group_name(tp_group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes `[..., normalized_shape]`."""
        return F.rms_norm(x, self.normalized_shape, _summed(self, self.weight), self.eps)


def _summed(norm: Any, parameter: Tensor | None) -> Tensor | None:
    if parameter is None or not norm.sequence_parallel:
        return parameter
    return shard_ops.for_each_rank(parameter, norm.tp_group)


def sequence_parallel_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Marks the parameters of a module, and of modules in it, as applied to this rank's rows of the sequence.

    Args:
        module: Module without tensor-parallel layers, for example a custom norm, a gate, a position
            embedding.

    Returns:
        The parameters, whose gradients `sum_sequence_parallel_gradients` sums.
    """
    for part in module.modules():
        if list(part.parameters(recurse=False)):
            setattr(part, MARK, True)
    for parameter in module.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return list(module.parameters())


@torch.no_grad()
def sum_sequence_parallel_gradients(module: nn.Module, tp_group: GroupLike = None) -> None:
    """Sums the gradients of marked parameters over the ranks, in place. Collective.

    Call it once per step, after the last backward pass and before clipping: a second call would sum the sums.
    On a rank without a gradient of a marked parameter (`requires_grad=True`), a gradient of zeros is created.

    Args:
        module: Model with parameters marked by `sequence_parallel_parameters`, or by Megatron's and
            TransformerEngine's attribute `sequence_parallel`.
        tp_group: ProcessGroup, 1-D DeviceMesh, or None for the world.
    """
    group = find(tp_group)
    if group.size == 1:
        return
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in _marked(module):
        # A rank without a gradient takes part, too.
        if parameter.grad is None:
            if not parameter.requires_grad:
                continue
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        buckets.setdefault((grad.dtype, grad.device), []).append(grad)
    for gradients in buckets.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group.process_group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, summed in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _marked(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of a module that are marked, by the module or on the parameter, each once."""
    seen: set[int] = set()
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            is_marked = getattr(part, MARK, False) or getattr(parameter, "sequence_parallel", False)
            if is_marked and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def warn_unmarked_parameters(layer: nn.Module, x: Tensor) -> None:
    """Warns, once per layer, of unmarked parameters between an op of this library and a gathered input.

    Args:
        layer: Column-parallel layer with sequence parallelism.
        x: Input of the layer, this rank's rows.
    """
    if torch.compiler.is_compiling() or x.grad_fn is None or vars(layer).get("_checked_for_unmarked"):
        return
    vars(layer)["_checked_for_unmarked"] = True
    shapes = [str(list(parameter.shape)) for parameter in _unmarked_parameters(x)]
    if shapes:
        warnings.warn(
            f"parameters of shape {', '.join(shapes)} are applied to this rank's rows of the sequence, "
            f"before a layer with sequence_parallel=True: their gradients must be summed over the ranks. Use "
            f"overlap_gemm.nn.LayerNorm or RMSNorm, or mark the module by overlap_gemm.nn."
            f"sequence_parallel_parameters(module) and call sum_sequence_parallel_gradients(model)",
            SequenceParallelWarning,
            stacklevel=3,
        )


def _unmarked_parameters(x: Tensor) -> Iterator[Tensor]:
    """Yields unmarked parameters among the leaves of x's graph, up to ops of this library."""
    left: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen or "_Eager" in node.name() or "overlap_gemm" in node.name():
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and not getattr(leaf, "sequence_parallel", False):
            yield leaf
        left += [following for following, _ in node.next_functions]
