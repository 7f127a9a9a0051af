"""Plans of the fused all-gather GEMM: gather buffers, and transfers of the local shard.

A shard is sent in one of three ways, chosen when the plan is made. Ranks may differ in the first two:

- Warps of the kernel store it (``push``), if it is smaller than `Machine.copy_bytes` or if configured.
- Copy engines copy it on a second stream, then its flag, in the order in which peers read shards
  (`config.orders.LocalShardFirst`). Nothing else runs there: a kernel would find no free SM.
- A relay kernel puts it to all peers (`exchange.relay`), if some peer is not P2P-accessible or if configured.
  The shard is first copied to the local gather buffer, since NVSHMEM puts from symmetric memory only.

`gather_calls` has the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ...config.gemm_config import GemmConfig
from ...config.orders import joins_shards
from ...config.visitors import Visitor
from ...exchange.geometry import NEXT_EPOCH_OFFSET, arrival_flags, shard_puts
from ...runtime.executor import CudaExecutor
from ...runtime.group import Group
from ...runtime.identity import call_signature
from ...runtime.memory.workspace import Workspace
from ...runtime.peers import Peers
from ...spec import ALL_GATHER_GEMM, TransportSpec, patterns_of
from ...spec.sharding import Shards, ceil_div, num_owners
from ...tuning.settings import settings
from ...tuning.space import choose_config, constants
from ...tuning.time_model import Facts
from ..scales.product_types import ProductTypes
from ..scales.scale_layouts import ScaleLayout
from ..scales.tma_operands import major
from .compiled import compiled_gate, compiled_gather, compiled_relay
from .launch_plan import Copies, LocalShard, Plan, Product, RelayKernel, SideStreamWork, Weight
from .plan_cache import (
    exchange_arguments,
    keep_plan,
    kind_of,
    peers_for,
    reserve_of,
    resident_clusters,
    two_lists,
)
from .transport_hosts import obtain_transport, requested_transport

Kind: TypeAlias = tuple[tuple[int, ...], str, torch.dtype]
"""Rows of a product's weight, or of each of several; their contiguous dimension; their dtype."""


class BufferLayout(NamedTuple):
    """Places in a gather buffer, in bytes; equal on all ranks, and part of a call's signature.

    Of P ranks, every one has a place in each buffer, of `c` rows of a full shard, also this rank and those
    without rows. `s` are the bytes of the scales of `c` rows, `s'` these rounded up to `SHARD_ALIGN`:

    | scales | shard | scales | next_scales | size |
    |---|---|---|---|---|
    | none | c row | 0 | 0 | P c row |
    | of rows, not put | c row | P c row | s | P (c row + s') |
    | of blocks; of rows, put by a relay | c row + s' | c row | c row + s' | P (c row + s') |

    Users: the fused all-gather GEMM, `by_shards` (rows without scales), and the fused all-to-all GEMM
    (`exchange_plans`): its buffer has a slot for each source rank, whose rows have K / P columns.

    Attributes:
        row: From a row to the next: K in memory; in fused kernels a multiple of 16.
        shard: From the rows of a full shard to those of the next.
        size: Size of the buffer.
        scales: From the start of the buffer to the scales of shard 0; 0 without scales.
        next_scales: From the scales of a shard to those of the next; 0 without scales.
    """

    row: int
    shard: int
    size: int
    scales: int = 0
    next_scales: int = 0

    @staticmethod
    def of(shards: Shards, depth: int, itemsize: int) -> BufferLayout:
        """Returns the layout of rows without scales.

        Args:
            shards: Division of the rows.
            depth: Elements of a row in memory, padding included.
            itemsize: Bytes of an element.
        """
        row = depth * itemsize
        return BufferLayout(row, shards.chunk * row, shards.parts * shards.chunk * row)

    @staticmethod
    def with_scales(shards: Shards, depth: int, of_scales: ScaleLayout, puts: bool) -> BufferLayout:
        """Returns the layout of rows of 8-bit elements with scales; `gather.all_gather` gives the reasons.

        Args:
            shards: Division of the rows.
            depth: Elements, and bytes, of a row in memory, padding included: a multiple of 16.
            of_scales: Layout of the scales.
            puts: Whether a relay puts a shard's rows and scales together.
        """
        row, after = of_scales.shard_bytes(shards.chunk, depth)
        rows = shards.chunk * row
        full, size = rows + after, shards.parts * (rows + after)
        if of_scales.is_in_shard or puts:
            return BufferLayout(row, full, size, rows, full)
        return BufferLayout(row, rows, size, shards.parts * rows, of_scales.num_bytes(shards.chunk, depth))


def plan_for(
    group: Group,
    types: ProductTypes,
    device: torch.device,
    depth: int,
    weights: Sequence[Weight],
    epilogue: tuple[Visitor, ...],
    shards: Shards,
    keep: bool,
    at_once: bool = False,
) -> Plan:
    """Returns the plan of a call. Collective at the first call of a signature, which compiles and allocates.

    The cache key is all arguments (of tensors: dtype, extents and layout) and the caller's `settings`.

    Args:
        group: Ranks that take part, more than one.
        types: Types of the product; each weight's own dtype replaces `types.weight`.
        device: Device of this rank's tensors.
        depth: K in memory, padding included.
        weights: Weights, or pairs of weights, for their rows, layouts and dtypes.
        epilogue: Epilogue that the kernel applies to the sums.
        shards: Division of the rows.
        keep: Whether the kernel stores the gathered x for the caller.
        at_once: Whether the weights, of one dtype and layout, are one product.

    Raises:
        DisagreementError, SymmetricMemoryError: On every rank, if one of them cannot make the plan.
        CaptureError: The plan does not exist, and a CUDA graph is being captured.
        ValueError: The settings select no kernel, or no cluster fits on the SMs that are not reserved.
        RuntimeError: Puts are needed or configured, and NVSHMEM cannot be linked.
    """
    peers, requested = peers_for(group, device), settings()
    kinds: tuple[Kind, ...] = tuple(
        ((2 * len(weight[0]),), "k", weight[0].dtype)
        if isinstance(weight, tuple)
        else ((len(weight),), major(weight, "n"), weight.dtype)
        for weight in weights
    )
    if at_once:
        kinds = ((tuple([n for (n,), *_ in kinds]), *kinds[0][1:]),)
    key = ALL_GATHER_GEMM.name, types, shards, depth, kinds, epilogue, keep, requested, group.signed
    plan: Plan | None = peers.plans.get(key)
    if plan is not None and plan.is_open:
        return plan
    how = epilogue, keep, reserve_of(peers)
    return keep_plan(peers, group, key, lambda: _make_plan(peers, types, shards, depth, kinds, *how))


def _make_plan(
    peers: Peers,
    types: ProductTypes,
    shards: Shards,
    depth: int,
    kinds: Sequence[Kind],
    epilogue: tuple[Visitor, ...],
    keep: bool,
    reserve: int,
) -> Plan:
    """Returns the plan of all_gather_gemm calls of one kind; collective, since it may allocate."""
    from ...gather.gathering import Gathering, ShardScales

    executor, group = peers.executor, peers.group
    chunk, requested = shards.chunk, settings().transport_of(ALL_GATHER_GEMM)
    local_rows, dtype, of_scales = shards.size(group.rank), types.x, types.scales

    def layout(puts: bool) -> BufferLayout:
        if of_scales is None:
            return BufferLayout.of(shards, depth, dtype.itemsize)
        return BufferLayout.with_scales(shards, depth, of_scales, puts)

    workspace, transport = obtain_transport(
        peers, requested_transport(requested), lambda host: host.shards_class(layout(True).size)
    )
    arch, puts = peers.agreed.arch, transport.puts
    of_buffer = layout(puts)
    row_bytes, full = of_buffer.row, of_buffer.shard
    nbytes, local_bytes = local_rows * row_bytes, 0
    if of_scales and local_rows:
        local_bytes = of_scales.num_bytes(of_scales.rows_sent(local_rows, chunk), depth)
    scales_at = of_buffer.scales + group.rank * of_buffer.next_scales
    local_shard = LocalShard(nbytes, local_bytes, scales_at - group.rank * full if of_scales else 0)
    scales_sent = ShardScales(0, local_bytes, full, *of_buffer[3:]) if of_scales else None
    push = is_pushed(peers, nbytes, requested) and not puts
    owners = num_owners(shards.total, chunk)

    def config_of(columns: tuple[int, ...], b_major: str, weight_dtype: torch.dtype) -> GemmConfig:
        (dtype, blocks), fields = kind_of(types._replace(weight=weight_dtype), epilogue)
        fields["weights"] = len(columns)
        extents = shards.total, sum(columns) * group.size, depth
        facts = Facts(ALL_GATHER_GEMM.name, *extents, dtype, group.size, chunk, blocks)
        return choose_config(facts, constants(arch), arch, peers.agreed.num_sms, b_major=b_major, **fields)

    def product(config: GemmConfig, columns: tuple[int, ...], joins: bool) -> Product:
        tile_m, tile_n = config.cluster_tile
        rows = ceil_div(shards.total, tile_m) if joins else owners * ceil_div(chunk, tile_m)
        resident = resident_clusters(executor, config.cluster_ctas, reserve, puts)
        gemm = compiled_gather(executor, config, push, keep, puts, joins=joins)
        return Product(config, gemm, min(resident, rows * sum(ceil_div(n, tile_n) for n in columns)))

    def compiled() -> tuple[tuple[Product, ...], Any, bool]:
        relay = compiled_relay(executor) if puts else None
        configs = [config_of(*kind) for kind in kinds]
        joins = push and all(joins_shards(config, shards.total, chunk) for config in configs)
        pairs = zip(configs, kinds, strict=True)
        return tuple(product(config, columns, joins) for config, (columns, *_) in pairs), relay, joins

    # The key excludes local columns: ranks may have different ones, and different kernels.
    kind = (
        "gather",
        dtype,
        types[2:],
        shards,
        depth,
        tuple([len(widths) for widths, *_ in kinds]),
        epilogue,
        keep,
        puts,
        settings().fields,
    )
    products, relay, joins = peers.prepare(kind, "compiling the kernels of an all-gather GEMM", compiled)

    size, memory = workspace.size, workspace.memory
    buffer = memory.local[size.zeroed :].view(dtype)
    strides = (row_bytes // dtype.itemsize, 1, full // dtype.itemsize)
    extents = (shards.total, depth, 1) if joins else (chunk, depth, owners)
    gathered = buffer.as_strided(extents, strides, buffer.storage_offset())
    exchange = exchange_arguments(workspace, transport, chunk, peers.agreed.timeout_ns, executor)
    exchange = exchange._replace(buffer_bytes=0)  # one buffer, whatever the epoch
    scales = of_scales and of_scales.gathered(buffer, owners, chunk, depth, full)
    gathering = Gathering(exchange, shards.total, row_bytes, 0, None, gathered, 1, 1, scales, scales_sent)
    gate = prepared_gate(peers, puts) if len(products) > 1 else None
    side_work: SideStreamWork | None = None
    if puts:
        put = full if of_scales and nbytes else nbytes
        lists = two_lists(shard_puts(group.rank, group.size, full, put))
        place = memory.local.data_ptr() + size.zeroed + group.rank * full
        side_work = RelayKernel(relay, ALL_GATHER_GEMM.name, lists, place, local_shard if nbytes else None)
    elif nbytes and not push:
        side_work = copies_of(workspace, full, local_shard)
    signature = signature_of(types, of_buffer, shards)
    (pattern,) = patterns_of(ALL_GATHER_GEMM.name)
    return Plan(
        executor, pattern, products, workspace, exchange,
        gathering=gathering, side_work=side_work, gate=gate, signature=signature,
    )  # fmt: skip


def is_pushed(peers: Peers, nbytes: int, requested: TransportSpec | None) -> bool:
    """Returns whether warps of the kernel send the operand; False: copy engines do. May differ between ranks.

    Args:
        peers: State of this rank in the group.
        nbytes: Bytes that are sent to a peer.
        requested: Configured transport; None: by size. Virtual ranks of a GPU always send by warps.
    """
    if peers.group.is_virtual and isinstance(peers.executor, CudaExecutor):
        return True  # virtual ranks share a GPU, which copies within itself by kernels
    if requested is not None:
        return not requested.by_host
    return nbytes < constants(peers.agreed.arch).copy_bytes


def prepared_gate(peers: Peers, puts: bool = False) -> Any:
    """Returns the compiled gate kernel (`compiled_gate`). Collective at the first call of a group."""
    return peers.prepare(
        ("gate", puts),
        "compiling the gate of all_gather_gemm",
        lambda: compiled_gate(peers.executor, puts),
    )


def signature_of(types: ProductTypes, layout: BufferLayout, shards: Shards) -> int:
    """Returns the signature of a call, which kernels compare with the peers': layout of the gather buffer.

    N and the sender (warps or copy engines) are not included: they may differ between ranks. Calls of
    `by_shards` have the same signature.

    Args:
        types: Types of the product; scales of different blocks can have equally many bytes.
        layout: Layout of the gather buffer.
        shards: Division of the rows.
    """
    facts = {"rows": shards.total, "shard": shards.chunk, "world": shards.parts, **layout._asdict()}
    return call_signature("gather", **facts, blocks=types.blocks, dtype=types.x)


def copies_of(workspace: Workspace, full: int, shard: LocalShard) -> Copies:
    """Returns the copies of the local shard and its flag to each peer.

    The peer that reads this shard first comes first: rank - 1, rank - 2, ... A shard without rows is not
    copied.

    Args:
        workspace: Workspace with the gather buffer.
        full: Bytes from the start of a shard to the start of the next.
        shard: Layout of the local shard.
    """
    group, bases = workspace.group, workspace.addresses
    offset, flag = workspace.size.zeroed + group.rank * full, arrival_flags(group.size)[0, group.rank]
    order = [(group.rank - i) % group.size for i in range(1, group.size)] if shard.row_bytes else []
    places = tuple((bases[peer] + offset, bases[peer] + flag) for peer in order)
    return Copies(places, workspace.memory.local.data_ptr() + NEXT_EPOCH_OFFSET, shard)
