"""Optimizers of parallelized models: those whose step is right on shards, and the refusal of others.

A step that treats every element by itself is right on any shard. A step that needs a full matrix is right
only if DTensor implements each of its operations: Adafactor's means of rows, L-BFGS's products of all
gradients. Most of these fail in the middle of the first step, with an error of DTensor's. torch calls
`_before_step` before every step of every optimizer.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from ..api.linears import gather_dtensor
from .modules.parts import packed_parameters
from .places import GROUPS

RIGHT = tuple(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD", "Muon")
    if hasattr(torch.optim, name)
)
"""Optimizer classes that are right on shards (tests/multi/test_model_optimizers.py); AdamW is an Adam."""
OF_MATRICES = tuple(kind for kind in RIGHT if kind.__name__ == "Muon")
"""Classes whose step depends on which rows are in one matrix."""
FUSED = (torch.optim.Adam,)
"""Classes whose fused step DTensor supports: Adam and AdamW. `fused=True` of other classes is refused."""

REASONS = {
    "Adafactor": "it takes means over rows and columns of a full matrix, but a rank has a part of it",
    "LBFGS": "it makes one vector of all parameters",
    "Rprop": "DTensor has no rule for an operation of its step",
}

_checked: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
"""Number of parameter groups that each optimizer had when it was last checked."""


def check_class(kind: type, settings: Iterable[dict[str, Any]], marked: object = None) -> None:
    """Raises a ValueError unless an optimizer class is right on shards.

    Args:
        kind: Class of the optimizer.
        settings: Parameter groups of the optimizer, or the default settings of the class.
        marked: The optimizer, or None; accepted if `sees_shards` has marked it.
    """
    if getattr(marked, "sees_shards", False):
        return
    if not (isinstance(kind, type) and issubclass(kind, RIGHT)):
        why = REASONS.get(kind.__name__, "its step on shards has not been tried")
        names = ", ".join(each.__name__ for each in (*RIGHT, torch.optim.AdamW))
        _refuse(
            kind,
            f"{why}. Supported: {names}. Mark another one, if its step supports DTensors or treats each "
            f"element by itself, with overlap_gemm.parallel.sees_shards(optimizer)",
        )
    if any(group.get("fused") for group in settings) and not issubclass(kind, FUSED):
        _refuse(kind, "DTensor supports fused=True for Adam and AdamW only; set fused=False")


def _refuse(kind: type, why: str) -> None:
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise ValueError(f"parallelize has no rule for the optimizer {name}: {why}")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError if an optimizer of a parallelized model's parameters is not right on shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    if any(group.group_name in GROUPS for mesh in meshes for group in mesh.get_all_groups()):
        check_class(type(optimizer), optimizer.param_groups, optimizer)
        is_marked = getattr(optimizer, "sees_shards", False)
        if isinstance(optimizer, OF_MATRICES) and not is_marked:
            packed = packed_parameters()
            if any(id(parameter) in packed for parameter in parameters):
                _refuse(
                    type(optimizer),
                    "its step is one of full matrices, and packed projections (qkv_proj, gate_up_proj) are "
                    "sharded in parts. Leave their parameters to another optimizer",
                )


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Checks an optimizer if its parameter groups are new. Pre-step hook of all optimizers."""
    if torch.compiler.is_compiling() or _checked.get(optimizer) == len(optimizer.param_groups):
        return
    check_optimizer(optimizer)
    _checked[optimizer] = len(optimizer.param_groups)


def full_norm(tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the norm of one or several full tensors, the same on every rank. Collective.

    In contrast, `norm()` of a DTensor is a DTensor of partial results: its `.item()` differs by rank.

    Args:
        tensors: Parameter or gradient, or several: DTensors, or plain tensors that are the same on all ranks.
        norm_type: Order p of the norm: positive, or infinity.

    Returns:
        Plain 0-d tensor.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        by_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor.detach())
    norms = [gather_dtensor(nn.utils.get_total_norm(each, norm_type)) for each in by_mesh.values()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())


torch_optimizer.register_optimizer_step_pre_hook(_before_step)
