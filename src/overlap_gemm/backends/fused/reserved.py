"""Allocation of workspaces before the first fused call, large enough for the largest call to come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ...config.scale_blocks import OperandTypes
from ...exchange.geometry import ExchangeShape
from ...runtime.group import Group
from ...runtime.memory.workspace import SizeClass, obtain
from ...runtime.peers import Agreed
from ...spec import OPS, PATTERNS, TRANSPORTS, PatternSpec
from ...spec.sharding import ceil_div, shard_rows
from ...tuning.settings import settings
from ...tuning.space import constants, pattern_of, possible
from ...tuning.time_model import Facts
from ..scales.product_types import ProductTypes
from ..scales.tma_operands import padded
from .plan_cache import kind_of, peers_for
from .transport_hosts import requested_transport

DEPTHS = (1 << 10, 1 << 13, 1 << 15, 1 << 17)
"""Sample values of K, to find the rows up to which the model may choose a one-shot all-reduce."""


def needed_classes(
    group: Group,
    device: torch.device,
    types: ProductTypes,
    ops: Sequence[str],
    rows: int,
    width: int,
) -> dict[str, SizeClass]:
    """Returns the size class of each kind of workspace, for all configurations of calls up to a size.

    Ops that exchange tiles share one workspace, kernels for few rows (LL packets) have a second, ops that
    send x a third. A group of one needs none. Collective at the first fused call of a group. One-shot
    all-reduces of more rows than the model allows are not included: only `configured(algorithm=...)` requests
    them.

    Args:
        group: Ranks that take part.
        device: Device of this rank's tensors.
        types: Types of the products; scales of rows are included, too.
        ops: Names of the ops; at least one.
        rows: Largest M over all ranks.
        width: Largest N of ops that exchange tiles, and largest K of ops that send x, over all ranks.
    """
    if group.size == 1:
        return {}
    peers, by_row = peers_for(group, device), types._replace(blocks=None)
    calls = dict.fromkeys((by_row, types))
    requested, machine = settings(), constants(peers.agreed.arch)
    by_tiles, by_shards = (
        TRANSPORTS.get(name or "") for name in (requested.tile_transport, requested.shard_transport)
    )
    needed: dict[str, SizeClass] = {}
    for each in calls:
        kind, fields = kind_of(each)
        largest = Facts(ops[0], rows, width, None, kind.dtype, group.size, blocks=kind.blocks)
        for shape in _shapes(ops, largest, peers.agreed):
            for config in possible(peers.agreed.arch, kind, (*fields.items(), *requested.fields)):
                few = config.is_swap_ab and "mma" not in dict(requested.fields)
                most = replace(shape, rows=min(shape.rows, machine.few_rows)) if few else shape
                size = requested_transport(by_tiles, config).tiles_class(config, most)
                had = needed.get(size.kind, size)
                zeroed, buffer = max(had.zeroed, size.zeroed), max(had.buffer, size.buffer)
                needed[size.kind] = replace(size, zeroed=zeroed, buffer=buffer)
    if sending := [OPS[op] for op in ops if OPS[op].operand_is_sent]:
        columns = width if any(op.gathers_operand for op in sending) else ceil_div(width, group.size)
        chunk, depth = shard_rows(rows, group.size), padded(columns, types.x.itemsize)
        shard = chunk * depth * types.x.itemsize
        if layouts := [each.scales for each in calls if each.scales]:
            of_both = [layout.shard_bytes(chunk, depth) for layout in layouts]
            shard = max(chunk * of_row + after for of_row, after in of_both)
        needed["gather"] = requested_transport(by_shards).shards_class(group.size * shard)
    return needed


def allocate(group: Group, device: torch.device, needed: Mapping[str, SizeClass]) -> int:
    """Allocates workspaces; later calls that fit into them allocate no symmetric memory. Collective.

    The workspaces belong to the group until `close_workspaces`.

    Args:
        group: Ranks that take part.
        device: Device of this rank's tensors.
        needed: Size classes from `needed_classes`, the same on all ranks.

    Returns:
        Bytes of the workspaces on this rank.

    Raises:
        DisagreementError, SymmetricMemoryError: On every rank, if one of them cannot allocate.
    """
    if not needed:
        return 0
    peers = peers_for(group, device)
    return sum(obtain(peers, size).memory.local.numel() for size in needed.values())


def _shapes(ops: Sequence[str], largest: Facts, agreed: Agreed) -> Iterator[ExchangeShape]:
    """Yields the largest shape of each pattern that exchanges tiles, for calls of `ops` up to `largest`.

    Args:
        ops: Names of the ops.
        largest: M, N, number of ranks, types and blocks of the largest call.
        agreed: Values that are equal on all ranks, for the model.
    """
    rows, columns, world = largest.m, largest.n, largest.world
    unit = OperandTypes(largest.dtype, largest.blocks).column_unit
    assert columns is not None
    for name, pattern in PATTERNS.items():
        if pattern.op in ops and not pattern.spec.operand_is_sent:
            most = rows if pattern.cut else _uncut_rows(pattern, largest, agreed)
            if most:
                most = most if pattern.spec.weight is not None else shard_rows(most, world)
                yield ExchangeShape.even(most, columns, world, name, unit)
    for op in {OPS[op].unsharded for op in ops} - {
        None,
        *ops,
    }:  # few rows: `tuning.space.lower_small_rs_to_ar`
        assert op is not None
        yield from _shapes([op], replace(largest, m=min(rows, constants(agreed.arch).ar_rows)), agreed)


def _uncut_rows(pattern: PatternSpec, largest: Facts, agreed: Agreed) -> int:
    """Returns the most rows for which the model may choose a pattern with slots for all rows, or 0.

    The model is evaluated at powers of two below `largest.m` and at `largest.m` itself. The bound is twice
    the largest of these M that it accepts, at most `largest.m`.
    """
    rows, machine = largest.m, constants(agreed.arch)

    def is_taken(m: int, depth: int | None) -> bool:
        facts = replace(largest, op=pattern.op, m=m, k=depth)
        return pattern_of(facts, machine, agreed.arch, agreed.num_sms) == pattern.name

    fewer = [rows, *(1 << bit for bit in range((rows - 1).bit_length()))]
    taken = [m for m in fewer if any(is_taken(m, depth) for depth in (None, *DEPTHS))]
    return min(rows, 2 * max(taken, default=0))
