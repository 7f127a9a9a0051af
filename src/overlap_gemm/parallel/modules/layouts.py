"""Conversions between DTensors and this rank's parts: parameters, inputs and outputs of one linear."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ...api.functional import Length
from ...runtime.order import is_capturing

Rows: TypeAlias = Length | Callable[[], Length]
"""The `rows` of `overlap_gemm.all_gather_gemm`, or a function that returns them at each call."""


def default_rows() -> Length:
    """Returns the value for `rows` where the caller has set none.

    "exchange": ranks exchange their numbers of rows, so sequences of any length work. "equal" under
    torch.compile and in graph capture, where they cannot be exchanged: shards must be equal.
    """
    if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and is_capturing(torch.device("cuda"))):
        return "equal"
    return "exchange"


def distribute(
    module: nn.Module, mesh: DeviceMesh, layouts: dict[str, Placement], src_data_rank: int | None = 0
) -> None:
    """Converts a linear's parameters to DTensors.

    Args:
        module: `nn.Linear`.
        mesh: 1-D mesh of the ranks.
        layouts: Placement of each parameter, by name.
        src_data_rank: Rank whose values are taken; None: each rank's own values, without communication.
    """
    if not isinstance(module, nn.Linear):
        raise TypeError(f"the styles of overlap_gemm.parallel need an nn.Linear, got {type(module).__name__}")
    check_mesh(mesh)
    distribute_parameters(module, mesh, layouts, src_data_rank)


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises a ValueError unless a mesh has one dimension, in which ranks have their group's order.

    DTensor cuts by a rank's position in the mesh, collectives and ops by its rank in the group.
    """
    if mesh.ndim != 1:
        raise ValueError(f"the mesh must have one dimension, such as mesh['tp'], got {mesh}")
    order, group = mesh.mesh.tolist(), dist.get_process_group_ranks(mesh.get_group())
    if order != group:
        raise ValueError(f"the mesh must have the ranks in the order of its group, {group}, got {order}")


def distribute_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    layouts: Mapping[str, Placement] | None = None,
    src_data_rank: int | None = 0,
) -> None:
    """Converts the parameters directly in a module to DTensors; the default placement is replicated."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        layout, source = (layouts or {}).get(name, Replicate()), None if parameter.is_meta else src_data_rank
        sharded = distribute_tensor(parameter, mesh, [layout], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def local(parameter: Tensor, layout: Placement) -> Tensor:
    """Returns this rank's part of a parameter: of a DTensor, or the plain parameter itself (`exportable`).

    Args:
        parameter: Parameter of a module. The result of a parametrization may have any placement.
        layout: Placement of the result.

    Raises:
        RuntimeError: FSDP has sharded the parameter, too, and has not gathered it.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.device_mesh.ndim > 1:
        raise RuntimeError(
            f"a parameter of shape {list(parameter.shape)} is sharded by FSDP, too, and not gathered: its "
            f"module was called outside of the forward pass of the model passed to fully_shard (prompt "
            f"tuning calls the embedding so). Pass that module itself to fully_shard, or call the model"
        )
    if parameter.placements != (layout,):
        parameter = parameter.redistribute(placements=(layout,))
    return parameter.to_local()


def extent(linear: Any, dim: int) -> int:
    """Returns an extent of the full weight."""
    if isinstance(linear.weight, DTensor):
        return linear.weight.shape[dim]
    return (linear.out_features, linear.in_features)[dim]


def local_part(x: Tensor, mesh: DeviceMesh, layout: Placement, rows: Rows) -> tuple[Tensor, Length]:
    """Returns this rank's part of x, and the total number of rows if it is known (it is, of a DTensor)."""
    if not isinstance(x, DTensor):
        return x, rows() if callable(rows) else rows
    if x.placements != (layout,):
        x = x.redistribute(mesh, (layout,))
    return x.to_local(), x.shape[layout.dim] if isinstance(layout, Shard) else None


def with_layout_of(old: DTensor, part: Tensor) -> DTensor:
    """Returns a DTensor of this rank's part `part`, with the layout and shape of `old`."""
    return DTensor.from_local(
        part, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )


def as_output(
    out: Tensor, full_shape: torch.Size, mesh: DeviceMesh, layout: Placement, use_local_output: bool
) -> Tensor:
    """Returns `out`, or a DTensor of shape `full_shape` with it as this rank's part.

    The shape must be passed because DTensor would assume equal shards.
    """
    if use_local_output:
        return out
    stride = torch.empty(full_shape, device="meta").stride()
    return DTensor.from_local(out, mesh, (layout,), run_check=False, shape=full_shape, stride=stride)
