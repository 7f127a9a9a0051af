"""Between DTensors and what this rank has of them: the parameters, inputs and outputs of one linear."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ...api.functional import Length
from ...runtime.order import is_capturing

Rows: TypeAlias = Length | Callable[[], Length]
"""The `rows` of `overlap_gemm.all_gather_gemm`, or a function that says them in each call."""


def unsaid() -> Length:
    """For `rows` of which nobody has said how many there are: sequences of any length are cut over the ranks.

    They ask each other; in a graph, which cannot, shards are equal.
    """
    if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and is_capturing(torch.device("cuda"))):
        return "equal"
    return "exchange"


def distribute(
    module: nn.Module, mesh: DeviceMesh, layouts: dict[str, Placement], src_data_rank: int | None = 0
) -> None:
    """Makes DTensors of a linear's parameters.

    Args:
        module: An `nn.Linear`.
        mesh: The ranks, of one dimension.
        layouts: How each parameter shall lie, by its name.
        src_data_rank: Whose values are taken; None: each rank's own, without communication.
    """
    if not isinstance(module, nn.Linear):
        raise TypeError(f"this style is for nn.Linear, got {type(module).__name__}")
    check_mesh(mesh)
    cut(module, mesh, layouts, src_data_rank)


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises a ValueError unless a mesh is the ranks in a row."""
    if mesh.ndim != 1:
        raise ValueError(f"the mesh must have one dimension, as mesh['tp'] has, got {mesh}")


def cut(
    module: nn.Module,
    mesh: DeviceMesh,
    layouts: Mapping[str, Placement] | None = None,
    src_data_rank: int | None = 0,
) -> None:
    """Makes DTensors of a module's own parameters: replicated, where nothing else is said."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        layout, source = (layouts or {}).get(name, Replicate()), None if parameter.is_meta else src_data_rank
        sharded = distribute_tensor(parameter, mesh, [layout], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def local(parameter: Tensor, layout: Placement) -> Tensor:
    """This rank's part of a parameter: a DTensor's, or the parameter itself (`export.exportable`).

    Args:
        parameter: Of a module; what a parametrization makes of it may lie in any way.
        layout: How it shall lie.

    Raises:
        RuntimeError: FSDP has sharded it, too, and has not gathered it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.device_mesh.ndim > 1:
        raise RuntimeError(
            f"a parameter of {list(parameter.shape)} is sharded by FSDP, too: its module is called outside "
            f"of the forward pass of the model that fully_shard has wrapped (as prompt tuning calls the "
            f"embedding). fully_shard that module by itself, or call the model"
        )
    if parameter.placements != (layout,):
        parameter = parameter.redistribute(placements=(layout,))
    return parameter.to_local()


def extent(linear: Any, dim: int) -> int:
    """An extent of the whole weight."""
    if isinstance(linear.weight, DTensor):
        return linear.weight.shape[dim]
    return (linear.out_features, linear.in_features)[dim]


def local_part(x: Tensor, mesh: DeviceMesh, layout: Placement, rows: Rows) -> tuple[Tensor, Length]:
    """This rank's part of x, and what is known of the whole length: all, if x is a DTensor."""
    if not isinstance(x, DTensor):
        return x, rows() if callable(rows) else rows
    if x.placements != (layout,):
        x = x.redistribute(mesh, (layout,))
    return x.to_local(), x.shape[layout.dim] if isinstance(layout, Shard) else None


def lying_as(old: DTensor, own: Tensor) -> DTensor:
    """A DTensor of this rank's part that lies as another one does."""
    return DTensor.from_local(
        own, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )


def as_output(
    out: Tensor, whole: torch.Size, mesh: DeviceMesh, layout: Placement, use_local_output: bool
) -> Tensor:
    """`out`, or a DTensor of shape `whole`; without the shape DTensor would take equal shards for granted."""
    if use_local_output:
        return out
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(out, mesh, (layout,), run_check=False, shape=whole, stride=stride)
