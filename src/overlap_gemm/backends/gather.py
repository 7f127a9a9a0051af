"""The fused all-gather GEMM on the host: buffers, who sends the shards, launches.

Where copy engines send (`Machine.copy_bytes`), a call queues them on a second stream, in the
order in which peers want them (`schedules.OwnShardFirst`), each shard followed by its flag; they take no SM,
so they run alongside the kernel that waits for them. Nothing else is queued there while it waits: a kernel
would starve.

Where some peer is beyond the reach of stores, or puts are asked for, a relay kernel puts the shard to all of
them (`kernels.relay`): from this rank's own buffer, since NVSHMEM puts from its own memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..device.failure import Op
from ..kernels.geometry import (
    COMING_OFFSET,
    CONTROL_BYTES,
    END,
    FLAG_BYTES,
    MAX_WORLD,
    SCALE_BYTES,
    SHARD_PIECES,
    ExchangeShape,
    Puts,
    shard_puts,
    slots_offset,
)
from ..runtime.executor import CudaExecutor, Executor
from ..runtime.group import Group
from ..runtime.identity import after_skipped, call_signature
from ..runtime.peers import Peers
from ..runtime.workspace import SizeClass, Workspace
from ..schedules import ceil_div, num_owners
from ..sharding import Shards
from ..spec import ALL_GATHER_GEMM
from ..tuning.model import Facts
from ..tuning.settings import settings
from ..tuning.space import choose_config, constants
from . import plans
from .compiled import compiled_gate, compiled_gather, compiled_relay
from .operands import ROW_ELEMENTS, aligned, aligned_vector, has_tma_strides, major
from .plans import (
    SMALLEST_BUFFER,
    both,
    exchange_arguments,
    keep_plan,
    kind_of,
    obtain_way,
    peers_for,
    power_of_two,
    resident_clusters,
)
from .scaling import as_words, rows_with_scales


@dataclass(frozen=True)
class Product:
    """One weight's part of a call.

    Attributes:
        gemm: the compiled kernel.
        num_clusters: its grid.
    """

    gemm: Any
    num_clusters: int


@dataclass(frozen=True)
class GatherPlan:
    """All that all-gather GEMMs of one kind have in common.

    Attributes:
        executor: where.
        products: a launch for each weight.
        workspace: the gather buffer.
        given: the kernels' `Gathering`, without what belongs to a call.
        nbytes: of the own shard.
        copies: see `places_at_peers`; none where the kernel's warps send, or a relay puts.
        relay: the compiled kernel that puts the own shard, if there is one.
        puts: what that is: two lists.
        place: where the own shard is put from.
        gate: the compiled kernel (`kernels.gate`) that ends a call of several products of which one could not
            be launched.
        signature: what the ranks' calls have in common (`runtime.identity`).
    """

    executor: Executor
    products: tuple[Product, ...]
    workspace: Workspace
    given: Any
    nbytes: int
    copies: tuple[tuple[int, int], ...]
    relay: Any = None
    puts: tuple[Puts, ...] = ()
    place: int = 0
    gate: Any = None
    signature: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it may still be launched: until its workspace is closed, or its emulator ends."""
        return self.executor.is_open and self.workspace.is_open

    def launch(
        self,
        own: Tensor,
        weights: Sequence[Tensor],
        outs: Sequence[Tensor],
        extras: Sequence[tuple[Tensor, ...] | None],
        kept: Tensor | None,
    ) -> None:
        """Starts a call of this rank, after every other fused launch of its device.

        Args:
            own: The own shard, `[max(rows, 1), K]`; K contiguous, after a row its scale if it has one.
            weights: `[N_i, K]`, see `operands.aligned`.
            outs: `[M, N_i]`, rows at multiples of 16 bytes.
            extras: What each product's visitors read, see `Plan.launch`.
            kept: `[M, K]`, contiguous, or None.

        Raises:
            CommTimeoutError, OverlappingCallsError, MismatchedCallsError: an earlier call here failed.
        """
        executor, order = self.executor, self.executor.order
        vectors = [vector for of_one in extras for vector in of_one or ()]
        with executor.active(own, *weights, *outs, *vectors, kept) as stream:
            self.workspace.raise_if_failed()
            with order.lock:
                self.workspace.captured |= order.follow(stream)
                signature = after_skipped(self.signature, self.workspace.group.progress.skipped)
                exchange = self.given.exchange.of_call(order.next_call(), signature)
                flat = None if kept is None else kept.view(-1)
                given = self.given._replace(exchange=exchange, own=own.data_ptr(), kept=flat)
                if not (self.copies or self.relay):
                    if failure := self._multiply(given, own, weights, outs, extras, stream):
                        raise failure
                    return
                with executor.fork() as second:
                    if self.relay and self.nbytes:
                        # In front of the product, which fills the SMs: within a GPU copies are kernels.
                        executor.copy(second, self.place, own.data_ptr(), self.nbytes)
                    failure = self._multiply(given, own, weights, outs, extras, stream)
                    send(executor, second, self.workspace, self.copies, own, self.nbytes)
                    if self.relay:
                        self.relay(int(Op.ALL_GATHER_GEMM), self.puts, exchange, second)
                if failure:
                    raise failure

    def _multiply(
        self,
        given: Any,
        own: Tensor,
        weights: Sequence[Tensor],
        outs: Sequence[Tensor],
        extras: Sequence[tuple[Tensor, ...] | None],
        stream: int,
    ) -> BaseException | None:
        """Launches the products; returns why not all of them. A call of which one was launched is ended."""
        last = len(self.products) - 1
        for i, (product, weight, out, read) in enumerate(
            zip(self.products, weights, outs, extras, strict=True)
        ):
            given = given._replace(is_first=int(i == 0), is_last=int(i == last))
            try:
                product.gemm(own, weight, out, read, given, product.num_clusters, stream)
            except BaseException as error:
                if i == 0:
                    raise
                self.gate(END, 0, given.exchange, stream)
                return error
            self.workspace.group.progress.launched += i == 0
        return None


def bind(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    shards: Shards,
    group: Group,
    keep: bool,
    out_dtype: torch.dtype | None = None,
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """See `Backend.bind`: what is left, where nothing need be padded, is the outputs and the launches."""
    rows, depth = shards.total, x.shape[1]
    columns = [len(weight) for weight in weights]

    def run(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *scales: Any
    ) -> tuple[Tensor, list[Tensor]]:
        return all_gather_gemm(x, weights, biases, shards, group, keep, scales, out_dtype)

    if out_dtype is not None:  # rows are put together with their scales
        return run
    whole = all(n and n % ROW_ELEMENTS == 0 for n in (*columns, depth))
    strided = x.is_contiguous() and all(has_tma_strides(weight) for weight in weights)
    if group.size == 1 or not (rows and len(x) and whole and strided):
        return run
    if any(bias.stride(0) != 1 for bias in biases):
        return run
    plan = plan_for(group, x, depth, weights, bool(biases), shards, keep)
    without: list[tuple[Tensor, ...] | None] = [None] * len(columns)

    def run_as_planned(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        addresses = x.data_ptr()
        for operand in (*weights, *biases):
            addresses |= operand.data_ptr()
        if addresses % 16 or not plan.is_open:
            return run(x, weights, biases)
        outs = [x.new_empty(rows, n) for n in columns]
        kept = x.new_empty(rows, depth) if keep else None
        plan.launch(x, weights, outs, [(bias,) for bias in biases] or without, kept)
        return x if kept is None else kept, outs

    return run_as_planned


def all_gather_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    shards: Shards,
    group: Group,
    keep: bool,
    scales: Sequence[Any] = (),
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """See `Backend.all_gather_gemm`; without ``keep`` what comes for the gathered x is x.

    ``keep`` costs a copy of M x K inside the kernel, beside the products; ``scales``, of x and of each weight
    (`scaling`), a copy of the own shard in front of it, which puts each row's scale after the row.
    """
    rows, depth, alone, dtype = shards.total, x.shape[1], group.size == 1, out_dtype or x.dtype
    if rows == 0:
        return x, [x.new_empty(0, weight.shape[0], dtype=dtype) for weight in weights]
    # A rank without columns takes part all the same: its peers wait for its word.
    used = [weight if len(weight) else weight.new_zeros(ROW_ELEMENTS, depth) for weight in weights]
    operands = [aligned(weight) for weight in used]
    outs = [x.new_empty(rows, padded(len(weight)), dtype=dtype) for weight in used]
    if scales and not alone:
        own = rows_with_scales(x, scales[0])
    else:
        own = aligned(x.contiguous()) if alone or len(x) else x.new_zeros(1, padded(depth))
    vectors: list[tuple[Tensor, ...]] = [()] * len(used)
    if scales:
        by_row = aligned_vector(scales[0], len(x)) if alone else as_words(own)
        columns = [
            aligned_vector(scale if len(scale) else scale.new_zeros(1), len(weight))
            for scale, weight in zip(scales[1], used, strict=True)
        ]
        vectors = [(by_row, _padded(column, padded(len(column)))) for column in columns]
    if biases:
        found = [_padded(bias, out.shape[1]) for bias, out in zip(biases, outs, strict=True)]
        vectors = [(*read, bias) for read, bias in zip(vectors, found, strict=True)]
    extras = [read or None for read in vectors]
    narrowed = [out[:, : len(weight)] for out, weight in zip(outs, used, strict=True)]
    kept = None
    if alone:
        for weight, out, read in zip(operands, narrowed, extras, strict=True):
            shape = ExchangeShape.even(rows, len(weight), 1)
            majors = "k", major(weight, "n")
            plain = plans.plan_for(group, x.device, x.dtype, shape, *majors, bool(biases), depth, out_dtype)
            plain.launch(own, weight, out, read)
    else:
        kept = own.new_empty(rows, own.stride(0)) if keep else None
        plan = plan_for(group, x, own.shape[1], operands, bool(biases), shards, keep, out_dtype)
        plan.launch(own, operands, narrowed, extras, kept)
    results = [_first_columns(out, len(weight), group) for out, weight in zip(outs, weights, strict=True)]
    return x if kept is None else _first_columns(kept, depth, group), results


def plan_for(
    group: Group,
    x: Tensor,
    depth: int,
    weights: Sequence[Tensor],
    bias: bool,
    shards: Shards,
    keep: bool,
    out_dtype: torch.dtype | None = None,
) -> GatherPlan:
    """The plan of a call; made, which compiles and allocates, at the first one of its kind.

    Args:
        group: the ranks.
        x: for its device and dtype.
        depth: K as it lies in memory.
        weights: for their shapes and layouts.
        bias: whether there is one.
        shards: of the rows.
        keep: whether all rows are kept.
        out_dtype: of the results, where operands have scales.

    Raises:
        DisagreementError, SymmetricMemoryError: on every rank, if one of them cannot.
        CaptureError: something had to be made during CUDA graph capture.
        ValueError: no kernel exists for the caller's settings, or no grid fits on the SMs left to it.
    """
    peers, asked = peers_for(group, x.device), settings()
    kinds = tuple((len(weight), major(weight, "n")) for weight in weights)
    key = (ALL_GATHER_GEMM.name, x.dtype, shards, depth, kinds, bias, keep, out_dtype, asked)
    plan: GatherPlan | None = peers.plans.get(key)
    if plan is not None and plan.is_open:
        return plan
    reserve = peers.reserve_sms if asked.reserve_sms is None else asked.reserve_sms
    return keep_plan(
        peers, key, lambda: _make_plan(peers, x.dtype, shards, depth, kinds, bias, keep, reserve, out_dtype)
    )


def _make_plan(
    peers: Peers,
    dtype: torch.dtype,
    shards: Shards,
    depth: int,
    kinds: Sequence[tuple[int, str]],
    bias: bool,
    keep: bool,
    reserve: int,
    out_dtype: torch.dtype | None = None,
) -> GatherPlan:
    from ..kernels.gathering import Gathering

    executor, group = peers.executor, peers.group
    row_bytes = depth * dtype.itemsize + (0 if out_dtype is None else SCALE_BYTES)
    chunk, asked = shards.chunk, settings().transport_of(ALL_GATHER_GEMM)
    name, fields = kind_of(dtype, out_dtype, bias)
    nbytes, full = shards.size(group.rank) * row_bytes, chunk * row_bytes
    workspace, transport = obtain_way(peers, lambda puts, _: size_class(group.size * full, puts), asked)
    puts = transport != "peer_bulk"
    arch = peers.agreed.arch
    push = asked == "peer_bulk" or (asked != "copy_engine" and nbytes < constants(arch).copy_bytes)
    # Virtual ranks share a GPU, which copies within itself by kernels.
    push |= group.is_virtual and isinstance(executor, CudaExecutor)
    push &= not puts
    owners = num_owners(shards.total, chunk)

    def product(columns: int, b_major: str) -> Product:
        facts = Facts(
            ALL_GATHER_GEMM.name, shards.total, columns * group.size, depth, name, group.size, chunk
        )
        config = choose_config(facts, constants(arch), arch, peers.agreed.num_sms, b_major=b_major, **fields)
        tile_m, tile_n = config.cluster_tile
        work = owners * ceil_div(chunk, tile_m) * ceil_div(columns, tile_n)
        resident = resident_clusters(executor, config.cluster_ctas, reserve, beside=puts)
        return Product(compiled_gather(executor, config, push, keep, puts), min(resident, work))

    def compiled() -> tuple[tuple[Product, ...], Any]:
        relay = compiled_relay(executor) if puts else None
        return tuple(product(columns, b_major) for columns, b_major in kinds), relay

    # Ranks have different columns, and then perhaps different kernels.
    kind = ("gather", dtype, out_dtype, shards, depth, len(kinds), bias, keep, puts, settings().fields)
    products, relay = peers.prepare(kind, "compiling the kernels of an all-gather GEMM", compiled)

    size, memory = workspace.size, workspace.memory
    buffer = memory.local[size.zeroed :].view(dtype)
    pitch = row_bytes // dtype.itemsize
    gathered = buffer.as_strided((chunk, depth, owners), (pitch, 1, chunk * pitch), buffer.storage_offset())
    exchange = exchange_arguments(workspace, chunk, peers.agreed.timeout_ns, executor, puts)
    exchange = exchange._replace(buffer_bytes=0)  # one buffer, whatever the epoch
    given = Gathering(exchange, shards.total, row_bytes, 0, None, gathered, 1, 1)
    gate = None
    if len(products) > 1:
        gate = peers.prepare(
            ("gate", puts), "compiling the gate of all_gather_gemm", lambda: compiled_gate(executor, puts)
        )
    signature = signature_of(dtype, row_bytes, shards)
    plan = GatherPlan(executor, products, workspace, given, nbytes, (), gate=gate, signature=signature)
    if puts:
        lists = both(shard_puts(group.rank, group.size, full, nbytes))
        place = memory.local.data_ptr() + size.zeroed + group.rank * full
        return replace(plan, relay=relay, puts=lists, place=place)
    if push or not nbytes:
        return plan
    return replace(plan, copies=places_at_peers(workspace, full))


def signature_of(dtype: torch.dtype, row_bytes: int, shards: Shards) -> int:
    """Of a call, also by `copies`: where shards lie in a gather buffer; how they travel is a rank's own."""
    facts = {"rows": shards.total, "shard": shards.chunk, "world": shards.parts, "row_bytes": row_bytes}
    return call_signature("gather", **facts, dtype=dtype)


def places_at_peers(workspace: Workspace, full: int) -> tuple[tuple[int, int], ...]:
    """Where the own shard goes, and where its flag, at each peer, in the order in which they want it.

    Args:
        workspace: the gather buffer.
        full: bytes of a full shard.
    """
    group, bases = workspace.group, workspace.memory.bases.tolist()
    offset, flag = workspace.size.zeroed + group.rank * full, CONTROL_BYTES + FLAG_BYTES * group.rank
    order = [(group.rank - i) % group.size for i in range(1, group.size)]
    return tuple((bases[peer] + offset, bases[peer] + flag) for peer in order)


def send(
    executor: Executor,
    second: int,
    workspace: Workspace,
    places: Sequence[tuple[int, int]],
    own: Tensor,
    nbytes: int,
) -> None:
    """Queues the own shard's copies to `places_at_peers`, each followed by its flag, on a second stream."""
    coming = workspace.memory.local.data_ptr() + COMING_OFFSET
    for shard, flag in places:
        executor.copy(second, shard, own.data_ptr(), nbytes)
        executor.copy(second, flag, coming, FLAG_BYTES)


def size_class(nbytes: int, puts: bool = False) -> SizeClass:
    """The smallest class of workspace that holds a gather buffer of so many bytes; see `plans.size_class`."""
    buffer, flags = power_of_two(max(nbytes, SMALLEST_BUFFER)), slots_offset(SHARD_PIECES * MAX_WORLD)
    return SizeClass(flags, buffer, 1, 0, "gather puts" if puts else "gather", COMING_OFFSET)


def _first_columns(matrix: Tensor, columns: int, group: Group) -> Tensor:
    """Those of a result, contiguous; but of a virtual rank, whose kernels have not run yet, a view."""
    first = matrix[:, :columns]
    return first if group.is_virtual else first.contiguous()


def padded(extent: int) -> int:
    """Elements of a row, with what makes it whole 16 bytes of a 16-bit type; at least one 16."""
    return max(ceil_div(extent, ROW_ELEMENTS), 1) * ROW_ELEMENTS


def _padded(vector: Tensor, size: int) -> Tensor:
    """`vector` with zeros after, as many as the epilogue reads."""
    if len(vector) == size:
        return aligned_vector(vector, size)
    padded = vector.new_zeros(size)
    padded[: len(vector)] = vector
    return padded
