"""Exchange of heads for tokens without a product, for q, k and v that are already projected."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..api.functional import Length
from ..api.registration import listed
from ..dispatch import shard_ops
from ..dispatch.head_shards import Heads, HeadShards, heads_of_each
from ..dispatch.lowering import total_extent
from ..runtime.group import GroupLike, group_name, group_rank, group_size
from ..spec.sharding import Shards


def scatter_heads(
    x: Tensor | Sequence[Tensor],
    *,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    heads: Heads = None,
    rows: Length = None,
    group: GroupLike = None,
) -> Any:
    """Exchanges this rank's tokens of all heads for all tokens of this rank's heads.

    It is one all-to-all, not overlapped; its gradient is `gather_heads`. Where the projection is at hand,
    `overlap_gemm.gemm_all_to_all` does both at once.

    Args:
        x: Tensor with this rank's tokens along `sequence_dim` and all heads along `heads_dim`, by default
            `[B, S / P, H, D]`; or a list (q, k, v), which is exchanged at once. A DTensor must be sharded
            along `sequence_dim`, over a 1-D mesh.
        sequence_dim: Dimension of the tokens.
        heads_dim: Dimension of the heads.
        heads: Number of heads, or of groups of heads, that are not cut, as in `gemm_all_to_all`; of a list
            one number for each, or one for all. Fewer than P are replicated, except those of DTensors.
            Default: the heads of x.
        rows: S, as `rows` of `overlap_gemm.all_gather_gemm`; a DTensor has it.
        group: Ranks over which tokens are sharded, as in `overlap_gemm.all_gather_gemm`; a DTensor has them.

    Returns:
        Tensor with all tokens and this rank's heads, by default `[B, S, H / P, D]`, or a list of such
        tensors. Of a DTensor: a DTensor sharded along `heads_dim`.

    Raises:
        ValueError: Heads cannot be divided so, tokens are not sharded as by `torch.chunk`, or a DTensor has
            another placement.
        TypeError: Only some tensors of a list are DTensors.
    """
    name = "scatter_heads"
    tensors = listed(x)
    mesh = _mesh_of(name, tensors, sequence_dim, group)
    if mesh is not None:
        rows, group = tensors[0].shape[sequence_dim], mesh
    ranks = group_name(group)
    numbers = [
        one.shape[heads_dim] if number is None else number
        for one, number in zip(tensors, heads_of_each(name, heads, tensors), strict=True)
    ]
    shards = [
        HeadShards(name, one.shape[heads_dim], number, group_size(ranks))
        for one, number in zip(tensors, numbers, strict=True)
    ]
    if len({(one.dtype, one.device, one.shape[sequence_dim]) for one in tensors}) > 1:
        raise ValueError(
            f"{name}: tensors of a list must share dtype, device and number of tokens, got "
            f"{[f'{one.dtype} {list(one.shape)}' for one in tensors]}"
        )
    for of in shards if mesh is not None else ():
        _check_placed(of)
    parts = [one.to_local() if mesh is not None else one for one in tensors]
    parts = [one.movedim((sequence_dim, heads_dim), (0, 1)) for one in parts]  # [S / P, H, ...]
    facts = ("op", name), ("heads", str(numbers))
    total = total_extent(name, "rows", rows, len(parts[0]), parts[0], ranks, facts)
    by_rank = [
        of.expanded(one, 1).unflatten(1, (of.world, -1)).flatten(2)
        for of, one in zip(shards, parts, strict=True)
    ]
    widths = [one.shape[2] for one in by_rank]
    columns = torch.cat(by_rank, 2).flatten(1)
    chunk = Shards.even(total, group_size(ranks)).chunk
    received = shard_ops.shard_columns(columns, total, chunk, ranks)
    outs = []
    for of, one, part in zip(shards, parts, received.split(widths, 1), strict=True):
        out = part.unflatten(1, (-1, *one.shape[2:]))[:, : of.shards.size(group_rank(ranks))]
        outs.append(out.movedim((0, 1), (sequence_dim, heads_dim)))
    if mesh is not None:
        outs = [_placed(out, mesh, heads_dim, one.shape) for out, one in zip(outs, tensors, strict=True)]
    return outs if isinstance(x, (list, tuple)) else outs[0]


def gather_heads(
    x: Tensor,
    *,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    num_heads: int | None = None,
    heads: int | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Exchanges all tokens of this rank's heads for this rank's tokens of all heads: undoes `scatter_heads`.

    It is one all-to-all, not overlapped; its gradient is `scatter_heads`. Where a projection follows,
    `overlap_gemm.all_to_all_gemm` does both at once.

    Args:
        x: Tensor with all tokens along `sequence_dim` and this rank's heads along `heads_dim`, by default
            `[B, S, H / P, D]`. A DTensor must be sharded along `heads_dim`, over a 1-D mesh.
        sequence_dim: Dimension of the tokens.
        heads_dim: Dimension of the heads.
        num_heads: H. Default: P times the heads of x; a DTensor has it.
        heads: Number of heads, or of groups of heads, that are not cut, as in `scatter_heads`; P or more.
            Default: H.
        group: Ranks, as in `scatter_heads`.

    Returns:
        Tensor with this rank's tokens, as `torch.chunk` divides them, and all heads, by default
        `[B, S / P, H, D]`. Of a DTensor: a DTensor sharded along `sequence_dim`.

    Raises:
        ValueError: x does not have this rank's heads, or a DTensor has another placement.
    """
    name = "gather_heads"
    mesh = _mesh_of(name, [x], heads_dim, group)
    if isinstance(x, DTensor):
        num_heads, group = x.shape[heads_dim], mesh
    ranks = group_name(group)
    world, part = group_size(ranks), x.to_local() if isinstance(x, DTensor) else x
    num_heads = part.shape[heads_dim] * world if num_heads is None else num_heads
    of = HeadShards(name, num_heads, num_heads if heads is None else heads, world)
    _check_divided(of)
    if mesh is not None:
        _check_placed(of)
    size = of.shards.size(group_rank(ranks))
    if part.shape[heads_dim] != size:
        raise ValueError(
            f"{name}: x must have this rank's heads along dimension {heads_dim}, {size} of {num_heads} in "
            f"{of.heads} groups on {world} ranks, got {list(part.shape)}"
        )
    by_tokens = part.movedim((sequence_dim, heads_dim), (0, 1))  # [S, H / P, ...]
    rest = by_tokens.shape[2:]
    padded = F.pad(by_tokens, (0, 0) * len(rest) + (0, of.shards.chunk - size)).flatten(1)
    chunk = Shards.even(len(padded), world).chunk
    received = shard_ops.shard_rows(padded, padded.shape[1] * world, chunk, ranks)
    out = received.unflatten(1, (of.shards.chunk * world, *rest))[:, :num_heads]
    out = out.movedim((0, 1), (sequence_dim, heads_dim))
    return out if mesh is None else _placed(out, mesh, sequence_dim, x.shape)


def _mesh_of(name: str, tensors: Sequence[Tensor], sharded: int, group: GroupLike) -> DeviceMesh | None:
    """Returns the mesh of DTensors that are sharded along dimension `sharded`; None for plain tensors."""
    meshes = [one.device_mesh for one in tensors if isinstance(one, DTensor)]
    if not meshes:
        return None
    if len(meshes) < len(tensors) or any(mesh != meshes[0] for mesh in meshes):
        raise TypeError(f"{name}: tensors of a list must all be DTensors of one mesh, or none")
    if group is not None and group_name(group) != group_name(meshes[0]):
        raise ValueError(f"{name}: the group of a DTensor is its mesh's, so group must be None")
    if meshes[0].ndim != 1:
        raise ValueError(f"{name}: the mesh of a DTensor must have one dimension, got {meshes[0]}")
    for one in tensors:
        wanted = (Shard(sharded % one.ndim),)
        if one.placements != wanted:  # type: ignore[attr-defined]
            raise ValueError(
                f"{name}: a DTensor must have placements {wanted}, got {one.placements}: "  # type: ignore[attr-defined]
                f"redistribute it first"
            )
    return meshes[0]


def _check_divided(of: HeadShards) -> None:
    """Raises ValueError for heads that are replicated."""
    if of.replicas > 1:
        raise ValueError(f"{of.op}: heads={of.heads} must be the number of ranks, {of.world}, or more")


def _check_placed(of: HeadShards) -> None:
    """Raises ValueError for heads that no `Shard` of a DTensor describes."""
    _check_divided(of)
    if of.shards != Shards.even(of.columns, of.world):
        raise ValueError(
            f"{of.op}: {of.columns} heads in {of.heads} groups on {of.world} ranks are not cut as by "
            f"torch.chunk, which the placement of a DTensor requires: pass local tensors"
        )


def _placed(part: Tensor, mesh: DeviceMesh, dim: int, shape: torch.Size) -> DTensor:
    """Returns a DTensor of a full shape, sharded along a dimension, with this rank's part."""
    stride = torch.empty(shape, device="meta").stride()
    placements = (Shard(dim % len(shape)),)
    return DTensor.from_local(
        part.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
    )
