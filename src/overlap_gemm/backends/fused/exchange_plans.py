"""Plans and calls of the fused all-to-all GEMM, which exchanges columns of x for rows before the product.

Of x `[M, K]`, each rank passes K / P columns of all M rows. It multiplies its shard of the rows with full
weights. The kernel is :mod:`overlap_gemm.gather.input_exchange`. Workspaces and the second stream are those
of the all-gather GEMM (`gather_plans`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...config.gemm_config import TILE_K_BYTES
from ...config.visitors import Visitor
from ...exchange.geometry import FLAG_BYTES, NEXT_EPOCH_OFFSET, ExchangeShape, arrival_flags, chunk_rows
from ...runtime.executor import Executor
from ...runtime.group import Group
from ...runtime.identity import call_signature
from ...runtime.memory.workspace import Workspace
from ...runtime.peers import Peers
from ...spec import ALL_TO_ALL_GEMM, patterns_of
from ...spec.sharding import Shards, ceil_div
from ...tuning.settings import late_weights, settings, within
from ...tuning.space import choose_config, constants
from ...tuning.time_model import Facts
from ..base import Problem
from ..epilogues import read_by_kernel
from ..op_call import CallOperands
from ..scales.product_types import ProductTypes
from ..scales.scale_layouts import BlockLayout
from ..scales.tma_operands import ROW_ELEMENTS, aligned, has_tma_strides, major, padded
from . import plan_cache as plans
from .compiled import compiled_gather
from .gather_calls import any_misaligned, first_columns, padded_vector, planned
from .gather_plans import BufferLayout, is_pushed, prepared_gate
from .launch_plan import Plan, Product, SideStreamWork
from .plan_cache import (
    bias_visitor,
    exchange_arguments,
    keep_plan,
    kind_of,
    peers_for,
    reserve_of,
    resident_clusters,
)
from .transport_hosts import obtain_transport, requested_transport


def why_not(problem: Problem) -> str | None:
    """Returns the reason K or the promises allow no all-to-all of x in a kernel; None if they do.

    K / P must be a multiple of 8, with scales of 128 (a k tile). With P > 1 no `invariant=` is supported.
    """
    world, promises = problem.world_size, problem.promises
    unit, why = ROW_ELEMENTS, "TMA rows are whole 16 bytes"
    if problem.is_scaled and world > 1:
        unit, why = TILE_K_BYTES, "a rank's columns are whole k tiles of 8-bit operands"
    if any(width % (world * unit) for width in (problem.width, *problem.parts)):
        depth = "+".join(map(str, problem.parts)) or problem.width
        return f"K={depth} in {world} parts must be a multiple of {unit} a rank: {why}"
    if promises.leaves and world > 1:
        return (
            f"kernels sum K from a rank's own columns on, so bits depend on the rank that has a row, and "
            f"that rank depends on M (invariant={promises.invariant!r})"
        )
    return None


@dataclass(frozen=True)
class RowCopies:
    """Transfer of each peer's rows by copy engines, in chunks of rows, each followed by its flag.

    Attributes:
        places: (number of the matrix along K, offset in it, address of the destination, bytes, address of the
            flag or 0) of each copy, in order; a chunk's flag follows its rows of the last matrix.
        next_epoch: Local address of the next flag's value (`geometry.NEXT_EPOCH_OFFSET`), which is copied.
        scales: (offset in the scales of x, address of the destination, bytes) for each peer, sent first.
    """

    places: tuple[tuple[int, int, int, int, int], ...]
    next_epoch: int
    scales: tuple[tuple[int, int, int], ...] = ()

    def stage(self, executor: Executor, second: int, local: tuple[int, ...]) -> None:
        """Does nothing: the copies read x of the caller."""

    def send(self, executor: Executor, second: int, local: tuple[int, ...], exchange: Any) -> None:
        """Queues for each chunk the copy of its rows, then of its flag; see `SideStreamWork.send`."""
        for offset, target, nbytes in self.scales:
            executor.copy(second, target, local[-1] + offset, nbytes)
        for part, offset, target, nbytes, flag in self.places:
            executor.copy(second, target, local[part] + offset, nbytes)
            if flag:
                executor.copy(second, flag, self.next_epoch, FLAG_BYTES)


def copies_of(
    workspace: Workspace, shards: Shards, layouts: Sequence[BufferLayout], chunk: int, scale_bytes: int
) -> RowCopies:
    """Returns the copies to all peers: the first chunk of each peer, then the second, and so on.

    The peer that reads this rank's data first comes first: rank - 1, rank - 2, ...

    Args:
        workspace: Workspace with the gather buffer, which has a slot for each source rank.
        shards: Division of the rows.
        layouts: Layout of each matrix's region of the gather buffer, whose shards are the sources' slots.
        chunk: Rows that share a flag.
        scale_bytes: Bytes of the scales of a full shard of the rows; 0 without scales.
    """
    group, bases = workspace.group, workspace.addresses
    begins = [workspace.size.zeroed + region for region in regions_of(layouts)]
    scales_at = begins[0] + layouts[0].scales + group.rank * layouts[0].next_scales
    order, places = [(group.rank - i) % group.size for i in range(1, group.size)], []
    for number in range(ceil_div(shards.chunk, chunk)):
        for peer in order:
            begin, end = shards.range(peer)
            first, last = begin + number * chunk, min(begin + (number + 1) * chunk, end)
            for part, (layout, region) in enumerate(zip(layouts, begins, strict=True)):
                if first >= last:
                    break
                row, flag = layout.row, 0
                target = bases[peer] + region + group.rank * layout.shard + number * chunk * row
                if part == len(layouts) - 1:
                    flag = bases[peer] + arrival_flags(group.size)[number, group.rank]
                places.append((part, first * row, target, (last - first) * row, flag))
    scales = [(peer * scale_bytes, bases[peer] + scales_at, scale_bytes) for peer in order if scale_bytes]
    return RowCopies(tuple(places), workspace.memory.local.data_ptr() + NEXT_EPOCH_OFFSET, tuple(scales))


def regions_of(layouts: Sequence[BufferLayout]) -> list[int]:
    """Returns the bytes from the start of the gather buffer to the region of each matrix along K."""
    return [sum(layout.size for layout in layouts[:i]) for i in range(len(layouts))]


def signature_of(
    types: ProductTypes,
    row_bytes: tuple[int, ...],
    shards: Shards,
    chunk: int,
) -> int:
    """Returns the signature of a call, which kernels compare with the peers': layout of the gather buffer.

    N and the sender (warps or copy engines) are not included.

    Args:
        types: Types of the product.
        row_bytes: Bytes of a row of K / P columns, of each matrix along K.
        shards: Division of the rows.
        chunk: Rows that share a flag.
    """
    facts: dict[str, Any] = {"rows": shards.total, "shard": shards.chunk, "world": shards.parts}
    facts |= {"blocks": types.blocks} if types.blocks else {}
    return call_signature(ALL_TO_ALL_GEMM.name, **facts, row_bytes=row_bytes, chunk_rows=chunk, dtype=types.x)


def plan_for(
    group: Group,
    types: ProductTypes,
    x: Tensor | tuple[Tensor, ...],
    weights: Sequence[Tensor],
    epilogue: tuple[Visitor, ...],
    shards: Shards,
    keep: bool,
) -> Plan:
    """Returns the plan of a call. Collective at the first call of a signature, which compiles and allocates.

    The cache key is all arguments (of tensors: dtype, extents and layout) and the caller's `settings`.

    Args:
        group: Ranks that take part, more than one; each of them has rows.
        types: Types of the product; each weight's own dtype replaces `types.weight`.
        x: Local columns `[M, K / P]`, contiguous; a tuple for a list along K (`parts_of_k`).
        weights: Weights, for their rows, layouts and dtypes; with a tuple x the first part of one weight.
        epilogue: Epilogue that the kernel applies to the sums.
        shards: Division of the rows.
        keep: Whether the kernel stores the exchanged x for the caller.

    Raises:
        DisagreementError, SymmetricMemoryError: On every rank, if one of them cannot make the plan.
        CaptureError: The plan does not exist, and a CUDA graph is being captured.
        ValueError: The settings select no kernel, or no cluster fits on the SMs that are not reserved.
        RuntimeError: On every rank: some ranks have no P2P access to each other, or puts are configured.
    """
    parts = x if isinstance(x, tuple) else (x,)
    depths = tuple(one.shape[1] for one in parts)
    peers, requested = peers_for(group, parts[0].device), settings()
    kinds = tuple((len(weight), major(weight, "n"), weight.dtype) for weight in weights)
    key = ALL_TO_ALL_GEMM.name, types, shards, depths, kinds, epilogue, keep, requested, group.signed
    plan: Plan | None = peers.plans.get(key)
    if plan is not None and plan.is_open:
        return plan
    how = epilogue, keep, reserve_of(peers)
    return keep_plan(peers, group, key, lambda: _make_plan(peers, types, shards, depths, kinds, *how))


def _make_plan(
    peers: Peers,
    types: ProductTypes,
    shards: Shards,
    depths: tuple[int, ...],
    kinds: Sequence[tuple[int, str, torch.dtype]],
    epilogue: tuple[Visitor, ...],
    keep: bool,
    reserve: int,
) -> Plan:
    """Returns the plan of all_to_all_gemm calls of one kind; collective, since it may allocate."""
    from ...gather.gathering import Gathering, PartOfK, ShardScales

    executor, group, arch = peers.executor, peers.group, peers.agreed.arch
    requested = settings().transport_of(ALL_TO_ALL_GEMM)
    dtype, scale_bytes, sent, depth, of_scales = types.x, 0, None, sum(depths), types.scales
    if of_scales is None:
        layouts = [BufferLayout.of(shards, depth, dtype.itemsize) for depth in depths]
    else:
        layouts = [BufferLayout.with_scales(shards, depth, of_scales, puts=False)]
        scale_bytes = of_scales.num_bytes(shards.chunk, depth)
        sent = ShardScales(0, scale_bytes, layouts[0].shard, *layouts[0][3:])  # type: ignore[arg-type]
    row_bytes = [layout.row for layout in layouts]
    full, size = sum(layout.shard for layout in layouts), sum(layout.size for layout in layouts)
    workspace, transport = obtain_transport(
        peers, requested_transport(requested), lambda host: host.shards_class(size)
    )
    if transport.puts:  # so it is on all ranks
        raise RuntimeError(
            f"{ALL_TO_ALL_GEMM.name}: backend='fused' needs peer access between all ranks of group "
            f"{group.name!r}; NVSHMEM puts entire shards only"
        )
    push = is_pushed(peers, full, requested)
    (pattern,) = patterns_of(ALL_TO_ALL_GEMM.name)
    rows = shards.size(group.rank)

    def product(columns: int, b_major: str, weight_dtype: torch.dtype) -> Product:
        (dtype, blocks), fields = kind_of(types._replace(weight=weight_dtype), epilogue)
        fields |= {"weights": len(depths)}
        extents = shards.total, columns, depth * group.size
        facts = Facts(ALL_TO_ALL_GEMM.name, *extents, dtype, group.size, shards.chunk, blocks)
        config = choose_config(facts, constants(arch), arch, peers.agreed.num_sms, b_major=b_major, **fields)
        tile_m, tile_n = config.cluster_tile
        resident = resident_clusters(executor, config.cluster_ctas, reserve)
        gemm = compiled_gather(executor, config, push, keep, False, ALL_TO_ALL_GEMM)
        return Product(config, gemm, min(resident, ceil_div(rows, tile_m) * ceil_div(columns, tile_n)))

    widths = tuple(columns for columns, *_ in kinds)
    kind = (
        ALL_TO_ALL_GEMM.name, dtype, shards, depths, widths, epilogue, keep, types[2:], settings().fields,
    )  # fmt: skip
    products = peers.prepare(
        kind,
        "compiling the kernels of an all-to-all GEMM",
        lambda: tuple(product(*each) for each in kinds),
    )
    buffer = workspace.memory.local[workspace.size.zeroed :].view(dtype)
    regions, gathered = regions_of(layouts), []
    for part, layout, region in zip(depths, layouts, regions, strict=True):
        extents, strides = (shards.chunk, part, group.size), (part, 1, layout.shard // dtype.itemsize)
        begin = buffer.storage_offset() + region // dtype.itemsize
        gathered.append(buffer.as_strided(extents, strides, begin))
    of_later = zip(row_bytes[1:], gathered[1:], regions[1:], strict=True)
    later = tuple([PartOfK(row, 0, None, view, region) for row, view, region in of_later])  # type: ignore[arg-type]
    exchange = exchange_arguments(workspace, transport, shards.chunk, peers.agreed.timeout_ns, executor)
    exchange = exchange._replace(buffer_bytes=0)  # one buffer, whatever the epoch
    chunk = chunk_rows(shards.chunk, sum(row_bytes), constants(arch).copy_bytes)
    scales = of_scales and of_scales.gathered(buffer, group.size, shards.chunk, depth, full)
    words = exchange, shards.total, row_bytes[0], 0, None, gathered[0], 1, 1, scales, sent
    gathering = Gathering(*words, chunk_rows=chunk, later=later or None)
    gate = prepared_gate(peers) if len(products) > 1 else None
    side_work: SideStreamWork | None = None
    if not push:
        side_work = copies_of(workspace, shards, layouts, chunk, scale_bytes)
    return Plan(
        executor, pattern, products, workspace, exchange,
        gathering=gathering, side_work=side_work, gate=gate,
        signature=signature_of(types, tuple(row_bytes), shards, chunk),
    )  # fmt: skip


def bind(
    problem: Problem, operands: CallOperands, shards: Shards, group: Group
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Returns the bound function of an all-to-all GEMM (`Backend.bind`).

    Collective at the first call of a signature. The function launches the plan directly if no operand needs a
    copy.
    """
    (x, weights, *_), biases = operands, operands.bias or ()
    types, keep, applying = problem.types, problem.keep, problem.applying
    visitor = None if applying is None else applying.visitor

    def run(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
        return all_to_all_gemm(types, operands, shards, group, keep, visitor)

    run = within(settings(), run)  # later calls use the settings of this one
    columns, (_, depth) = [len(weight) for weight in weights], x.shape
    is_direct = x.is_contiguous() and all(has_tma_strides(weight) for weight in weights)
    is_direct &= all(n and n % ROW_ELEMENTS == 0 for n in columns)
    is_direct &= all(bias.stride(0) == 1 for bias in biases)
    if group.size == 1 or not (shards.total and is_direct):
        return run
    dtype, rows, full = types.result, shards.size(group.rank), depth * group.size if keep else None
    visitors = bias_visitor(bool(biases), dtype) + (() if visitor is None else (visitor,))
    plan = plan_for(group, types, x, weights, visitors, shards, keep)
    if visitor is None and not types.blocks:
        return planned(plan, run, rows, columns, full)

    def run_as_planned(operands: CallOperands) -> tuple[Tensor, list[Tensor]]:
        x, weights, biases, *_ = operands
        if any_misaligned(x, *weights, *(biases or ())) or not plan.is_open:
            return run(operands)
        extras = _extras(types, operands, shards, group, visitor)
        outs = [x.new_empty(rows, n, dtype=dtype) for n in columns]
        kept = None if full is None else x.new_empty(rows, full)
        plan.launch(x, weights, outs, extras, kept)
        return x if kept is None else kept, outs

    return run_as_planned


def all_to_all_gemm(
    types: ProductTypes,
    operands: CallOperands,
    shards: Shards,
    group: Group,
    keep: bool,
    visitor: Visitor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Runs an all-to-all GEMM on tensors of any strides, alignment and N. Collective.

    Args:
        types: Types of the product.
        operands: Local columns of all rows `[M, K / P]`, and full weights and biases, the same on all ranks.
            Scales are of blocks; those of x are sent with its rows.
        shards: Division of the rows; each rank has some.
        group: Ranks that take part, each of which must call.
        keep: Whether to return the exchanged x, which the kernel copies.
        visitor: Epilogue that the kernel applies after the bias, or None.

    Returns:
        The exchanged x `[shards.size(rank), K]` (without `keep`, and in a group of one, x itself), and the
        products `[shards.size(rank), N_i]`.
    """
    (x, weights, *_), biases = operands, operands.bias or ()
    rows, depth, dtype = shards.size(group.rank), x.shape[1], types.result
    if shards.total == 0:
        exchanged = x.new_empty(0, depth * group.size) if keep else x
        return exchanged, [x.new_empty(0, len(weight), dtype=dtype) for weight in weights]
    local = aligned(x.contiguous())
    depth_read = local.shape[1] * group.size
    used = [with_elements(weight, depth_read) for weight in weights]
    loaded = [aligned(weight) for weight in used]
    outs = [x.new_empty(rows, padded(len(weight)), dtype=dtype) for weight in used]
    narrowed = [out[:, : len(weight)] for out, weight in zip(outs, used, strict=True)]
    filled = [bias if len(bias) else bias.new_zeros(1) for bias in biases]
    of_biases = [padded_vector(bias, padded(len(bias))) for bias in filled]
    extras = _extras(types, operands._replace(x=local, bias=of_biases), shards, group, visitor)
    visitors, kept = bias_visitor(bool(biases), dtype) + (() if visitor is None else (visitor,)), None
    with late_weights():
        if group.size == 1:
            for weight, out, read in zip(loaded, narrowed, extras, strict=True):
                shape, majors = ExchangeShape.even(rows, len(weight), 1), ("k", major(weight, "n"))
                of_weight = types._replace(weight=weight.dtype)
                plain = plans.plan_for(group, x.device, of_weight, shape, *majors, visitors, depth)
                plain.launch(local, (weight,), (out,), (read,))
        else:
            kept = x.new_empty(rows, depth_read) if keep else None
            plan = plan_for(group, types, local, loaded, visitors, shards, keep)
            plan.launch(local, loaded, narrowed, extras, kept)
    results = [first_columns(out, len(weight), group) for out, weight in zip(outs, weights, strict=True)]
    return x if kept is None else kept[:, : depth * group.size], results


def with_elements(weight: Tensor, depth: int) -> Tensor:
    """Returns a weight, or `depth` columns of zeros, of at least one row, if it has no elements.

    Args:
        weight: Full weight `[N, K]`.
        depth: K that the kernel reads: P times the columns of x in memory.
    """
    return weight if weight.numel() else weight.new_zeros(max(len(weight), 1), depth)


def _extras(
    types: ProductTypes, operands: CallOperands, shards: Shards, group: Group, visitor: Visitor | None
) -> list[tuple[Tensor, ...] | None]:
    """Returns the operands of each product's epilogue, scales of blocks first; None if there are none.

    Scales of A are as they are sent. The kernel's sums, and scales of B, begin with this rank's part of K.
    The arguments are those of `all_to_all_gemm`; biases are as the kernel loads them.
    """
    x, weights, biases, of_x, of_weights, inputs = operands
    extras: list[tuple[Tensor, ...]] = [()] * len(weights)
    if (layout := types.scales) is not None:
        if group.size == 1:
            of_a = layout.of_a(of_x, x.shape)
        else:
            assert isinstance(layout, BlockLayout), types
            of_a = layout.by_shard(of_x, shards, x.shape[1])
            of_weights = [layout.in_order(scale, group.rank, group.size) for scale in of_weights]
        each = zip(of_weights, weights, strict=True)
        extras = [(of_a, layout.of_b(scale, weight.shape)) for scale, weight in each]
    if biases:
        extras = [(*read, bias) for read, bias in zip(extras, biases, strict=True)]
    if visitor is not None:
        sizes = [(shards.size(group.rank), max(len(weight), 1)) for weight in weights]
        pairs = zip(extras, sizes, strict=True)
        extras = [(*read, *read_by_kernel(visitor, inputs, *size)) for read, size in pairs]
    return [read or None for read in extras]
