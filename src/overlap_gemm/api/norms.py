"""Parameters of all ranks between layers with sequence parallelism, each of which sees its rows only.

Such a parameter's gradient is a part on each rank, and must be summed over them. `LayerNorm` and `RMSNorm` do
so by themselves, in backward. Any other module is marked (`sequence_parallel_parameters`), and the gradients
of all that are marked are summed after backward (`sum_sequence_parallel_gradients`), one message per dtype.
The mark is Megatron's and TransformerEngine's: `parameter.sequence_parallel`.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..dispatch import moves
from ..runtime.group import GroupLike, find, group_name

MARK = "_sequence_parallel_parameters"
"""Of a module whose own parameters are marked; copied with it, unlike attributes of parameters."""


class SequenceParallelWarning(UserWarning):
    """A parameter works on this rank's rows, and nothing says that its gradient is summed over the ranks."""


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` on this rank's rows of the sequence, with whole gradients of its parameters.

    Args:
        *args: As for `torch.nn.LayerNorm`.
        sequence_parallel: The input is this rank's rows. False: it is the same on every rank.
        tp_group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        **options: As for `torch.nn.LayerNorm`.
    """

    def __init__(
        self, *args: Any, sequence_parallel: bool = True, tp_group: GroupLike = None, **options: Any
    ):
        super().__init__(*args, **options)
        self.sequence_parallel, self.tp_group = sequence_parallel, group_name(tp_group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `[..., normalized_shape]`."""
        weight, bias = (_summed(self, parameter) for parameter in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` on this rank's rows of the sequence, with the whole gradient of its weight.

    Args:
        *args: As for `torch.nn.RMSNorm`.
        sequence_parallel: As for `LayerNorm`.
        tp_group: As for `LayerNorm`.
        **options: As for `torch.nn.RMSNorm`.
    """

    def __init__(
        self, *args: Any, sequence_parallel: bool = True, tp_group: GroupLike = None, **options: Any
    ):
        super().__init__(*args, **options)
        self.sequence_parallel, self.tp_group = sequence_parallel, group_name(tp_group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `[..., normalized_shape]`."""
        return F.rms_norm(x, self.normalized_shape, _summed(self, self.weight), self.eps)


def _summed(norm: Any, parameter: Tensor | None) -> Tensor | None:
    if parameter is None or not norm.sequence_parallel:
        return parameter
    return moves.for_each_rank(parameter, norm.tp_group)


def sequence_parallel_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Marks the parameters of a module, and of those in it, as working on this rank's rows of the sequence.

    Args:
        module: One without tensor-parallel layers in it: a norm of your own, a gate, a position embedding.

    Returns:
        The parameters. `sum_sequence_parallel_gradients` sums their gradients.
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

    To be called once per step, after the last backward pass and before clipping: a second call would sum what
    has been summed.

    Args:
        module: The model; parameters are marked by `sequence_parallel_parameters`, or have the attribute
            `sequence_parallel` that Megatron and TransformerEngine give them.
        tp_group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
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
    seen: set[int] = set()
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            is_marked = getattr(part, MARK, False) or getattr(parameter, "sequence_parallel", False)
            if is_marked and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def warn_of_forgotten(layer: nn.Module, x: Tensor) -> None:
    """Warns, once per layer, of unmarked parameters between the last op of ours and a gathered input.

    Args:
        layer: With sequence parallelism, of column-parallel weight.
        x: Its input, this rank's rows.
    """
    if torch.compiler.is_compiling() or x.grad_fn is None or vars(layer).get("_looked_for_forgotten"):
        return
    vars(layer)["_looked_for_forgotten"] = True
    shapes = [str(list(parameter.shape)) for parameter in _forgotten(x)]
    if shapes:
        warnings.warn(
            f"parameters of shape {', '.join(shapes)} work on this rank's rows of the sequence, before a "
            f"layer with sequence_parallel=True: their gradients are parts, to be summed over the ranks. "
            f"overlap_gemm.nn.LayerNorm and RMSNorm do so; other modules are marked by overlap_gemm.nn."
            f"sequence_parallel_parameters(module), for sum_sequence_parallel_gradients(model)",
            SequenceParallelWarning,
            stacklevel=3,
        )


def _forgotten(x: Tensor) -> Iterator[Tensor]:
    """Leaves of the graph of x, up to ops of ours, that are parameters without the mark."""
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
