"""Optimizers of parallelized models: those whose step is right on shards, and the refusal of others by name.

A step that treats every element by itself is right on any shard. One that sees a matrix (Adafactor's means of
rows, L-BFGS's products of all gradients) is not, unless DTensor carries each of its operations out; most end
in the middle of the first step, in DTensor's words. torch calls `_before_step` before any optimizer's step.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from ..api.linears import whole_of
from .places import GROUPS

RIGHT = tuple(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD", "Muon")
    if hasattr(torch.optim, name)
)
"""Classes, AdamW among them, tested in tests/multi/test_model_optimizers.py."""
FUSED = (torch.optim.Adam,)
"""Those of which DTensor carries out the fused step, too."""

REASONS = {
    "Adafactor": "it takes means over rows and columns of a full matrix, of which a rank has a part",
    "LBFGS": "it makes one vector of all parameters",
    "Rprop": "DTensor has no rule for an operation of its step",
}

_checked: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
"""Groups of parameters of optimizers that have been looked at."""


def check_class(kind: type, settings: Iterable[dict[str, Any]], marked: object = None) -> None:
    """Raises a ValueError unless an optimizer is right on shards.

    Args:
        kind: Its class.
        settings: Of its groups of parameters, or of the class.
        marked: The optimizer, if there is one, which `sees_shards` may have marked.
    """
    if getattr(marked, "sees_shards", False):
        return
    if not (isinstance(kind, type) and issubclass(kind, RIGHT)):
        why = REASONS.get(kind.__name__, "its step on shards has not been tried")
        names = ", ".join(each.__name__ for each in (*RIGHT, torch.optim.AdamW))
        _refuse(
            kind,
            f"{why}. Right are {names}, and others that are registered, since each of their steps knows "
            f"DTensors or treats elements alone, as overlap_gemm.parallel.sees_shards(optimizer)",
        )
    if any(group.get("fused") for group in settings) and not issubclass(kind, FUSED):
        _refuse(kind, "DTensor has no rule for fused=True, which Adam and AdamW have; without it it is right")


def _refuse(kind: type, why: str) -> None:
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise ValueError(f"parallelize has no rule for the optimizer {name}: {why}")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError unless an optimizer has no parallelized model's parameters, or is right on them."""
    meshes = {
        parameter.device_mesh
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(parameter, DTensor)
    }
    if any(group.group_name in GROUPS for mesh in meshes for group in mesh.get_all_groups()):
        check_class(type(optimizer), optimizer.param_groups, optimizer)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Pre-step hook of all optimizers."""
    if torch.compiler.is_compiling() or _checked.get(optimizer) == len(optimizer.param_groups):
        return
    check_optimizer(optimizer)
    _checked[optimizer] = len(optimizer.param_groups)


def full_norm(tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the norm of a full tensor, or of several together, the same on every rank. Collective.

    A DTensor's own `norm()` is a DTensor of which each rank has a part: its `.item()` differs by rank.

    Args:
        tensors: A parameter, a gradient, or several: DTensors, or plain tensors that all ranks have.
        norm_type: p of the norm, positive; infinity is one.

    Returns:
        A plain tensor, 0-d.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        by_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor.detach())
    norms = [whole_of(nn.utils.get_total_norm(each, norm_type)) for each in by_mesh.values()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())


torch_optimizer.register_optimizer_step_pre_hook(_before_step)
