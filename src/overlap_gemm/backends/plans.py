"""Plans: all that fused calls of one kind have in common, made at the first of them and kept with the group.

A configuration (`tuning.space`) and a transport make a kernel (`kernels.build`), the compile cache keeps it,
a workspace (`runtime.workspace`) is what it exchanges tiles through, and an executor (`runtime.executor`)
runs it on a CUDA device or in the emulator. Nothing here knows one op from another but by its
`ExchangeShape`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..device.failure import Op
from ..kernels.config import GemmConfig
from ..kernels.geometry import (
    SLOT_BUFFERS,
    STAGING_BUFFERS,
    ExchangeShape,
    Puts,
    slots_offset,
    tile_puts,
)
from ..kernels.visitors import Bias, RowColumnScale, Visitor
from ..runtime.executor import Executor
from ..runtime.group import Group
from ..runtime.identity import after_skipped, call_signature
from ..runtime.peers import Peers, peers_of
from ..runtime.workspace import SizeClass, Workspace, obtain, why_no_multicast, why_no_put_memory
from ..spec import PATTERNS, TRANSPORTS
from ..tuning.settings import settings
from ..tuning.space import constants, default_config, with_pattern
from .compiled import compiled_kernel, compiled_relay, transport_for
from .scaling import FLOAT8

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

SMALLEST_BUFFER = 1 << 20
SMALLEST_FLAGS = 1 << 12
"""Size classes begin with this slot buffer (bytes) and these flags; each further class has twice as much."""

WIRE = ("in_dtype", "slot_dtype", "out_dtype", "cta_tile", "cluster", "epi_tile", "raster_group")
"""What of a configuration says where a tile's elements are on the wire."""

MOST_PLANS = 4096
"""Plans kept for a group; one is made again in a fraction of a millisecond."""


class Reusable(Protocol):
    """What a group keeps."""

    @property
    def is_open(self) -> bool:
        """Whether it may still be used."""


P = TypeVar("P", bound=Reusable)


@dataclass(frozen=True)
class Plan:
    """All that calls of one op and kind have in common: a call is a plan and its tensors.

    In a group of one it is a plain GEMM's.

    Attributes:
        executor: where.
        config: which kernel; its majors, dtypes and epilogue are those of the tensors.
        shape: global sizes, the same on all ranks.
        gemm: the compiled kernel.
        num_clusters: its grid.
        workspace: what tiles are exchanged through; None in a group of one.
        exchange: where that is and what bounds waits, as the kernel takes it.
        relay: the compiled kernel that puts what is staged, if there is one.
        puts: what that is: two lists.
        signature: what the ranks' calls have in common (`runtime.identity`).
    """

    executor: Executor
    config: GemmConfig
    shape: ExchangeShape
    gemm: Any
    num_clusters: int
    workspace: Workspace | None = None
    exchange: Any = None
    relay: Any = None
    puts: tuple[Puts, ...] = ()
    signature: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it may still be launched: until its workspace is closed, or its emulator ends."""
        return self.executor.is_open and (self.workspace is None or self.workspace.is_open)

    def launch(self, a: Tensor, b: Tensor, out: Tensor, extras: tuple[Tensor, ...] | None) -> None:
        """Starts a call of this rank, after every other fused launch of its device.

        Args:
            a: `[M, K]`, see `operands.aligned`.
            b: The rows of the weight that this rank multiplies, likewise.
            out: The op's result, of one row at least.
            extras: What the epilogue's visitors read (`kernels.build`), see `operands.aligned_vector`; None
                where they read nothing.

        Raises:
            CommTimeoutError, OverlappingCallsError, MismatchedCallsError: an earlier call here failed.
        """
        workspace, executor, order = self.workspace, self.executor, self.executor.order
        with executor.active(a, b, out, *(extras or ())) as stream:
            if workspace is None:  # waits for nobody, so it may run alongside whatever it likes
                self.gemm(a, b, out, extras, None, self.num_clusters, stream)
                return
            workspace.raise_if_failed()
            with order.lock:
                workspace.captured |= order.follow(stream)
                progress = workspace.group.progress
                signature = after_skipped(self.signature, progress.skipped)
                exchange = self.exchange.of_call(order.next_call(), signature)
                if self.relay is None:
                    self.gemm(a, b, out, extras, exchange, self.num_clusters, stream)
                    progress.launched += 1
                    return
                with executor.fork() as second:
                    self.gemm(a, b, out, extras, exchange, self.num_clusters, stream)
                    progress.launched += 1
                    self.relay(int(Op[self.shape.spec.op.upper()]), self.puts, exchange, second)


def peers_for(group: Group, device: torch.device) -> Peers:
    """This rank's side of a group; the ranks agree at the first call for it, which is collective."""
    return peers_of(group, device, lambda arch: constants(arch).digest)


def plan_for(
    group: Group,
    device: torch.device,
    dtype: torch.dtype,
    shape: ExchangeShape,
    a_major: str,
    b_major: str,
    bias: bool,
    depth: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Plan:
    """The plan of a call; made, which compiles and allocates, at the first one of its kind.

    Holds while `Plan.is_open` and the caller's `settings` are the same.

    Args:
        group: the ranks.
        device: where this one's tensors are.
        dtype: of them.
        shape: of the call; an all-reduce gets its pattern here, one-shot or two-shot.
        a_major: see `operands.major`.
        b_major: see `operands.major`.
        bias: whether there is one.
        depth: K over all ranks, where they have agreed on it.
        out_dtype: of slots, result and bias, where the operands have scales.

    Raises:
        DisagreementError, SymmetricMemoryError: on every rank, if one of them cannot.
        CaptureError: something had to be made during CUDA graph capture.
        ValueError: no kernel exists for the caller's settings, or no grid fits on the SMs left to it.
        RuntimeError: puts are needed or asked for, and there are none.
    """
    peers, asked = peers_for(group, device), settings()
    key = (dtype, shape, a_major, b_major, bias, depth, out_dtype, asked)
    plan: Plan | None = peers.plans.get(key)
    if plan is not None:
        return plan
    agreed, (kind, operands) = peers.agreed, kind_of(dtype, out_dtype, bias)
    operands |= {"a_major": a_major, "b_major": b_major}
    shape = with_pattern(agreed.arch, kind, shape, agreed.num_sms, depth)
    config = default_config(agreed.arch, kind, shape, agreed.num_sms, depth, **operands)
    reserve = peers.reserve_sms if asked.reserve_sms is None else asked.reserve_sms
    return keep_plan(peers, key, lambda: _make_plan(peers, config, shape, reserve))


def kind_of(dtype: torch.dtype, out_dtype: torch.dtype | None, bias: bool) -> tuple[str, dict[str, Any]]:
    """What kernels call the operands' type, and the fields of a configuration that follow from all types.

    Args:
        dtype: of the operands.
        out_dtype: of slots, result and bias, where the operands have scales.
        bias: whether there is one.
    """
    epilogue: tuple[Visitor, ...] = () if out_dtype is None else (RowColumnScale(),)
    if bias:
        epilogue += (Bias(DTYPES[out_dtype or dtype]),)
    if out_dtype is None:
        return DTYPES[dtype], {"epilogue": epilogue}
    kind = DTYPES[out_dtype]
    return FLOAT8[dtype], {"epilogue": epilogue, "out_dtype": kind, "slot_dtype": kind}


def keep_plan(peers: Peers, key: Hashable, make: Callable[[], P]) -> P:
    """The plan that the group has for a key; makes it if there is none."""
    with peers.lock:
        plan: P | None = peers.plans.get(key)
        if plan is None or not plan.is_open:
            if len(peers.plans) >= MOST_PLANS:
                peers.plans.clear()
            plan = peers.plans[key] = make()
        return plan


def sends_ll(config: GemmConfig, asked: str | None) -> bool:
    """Whether a call's data is its own flag (`device.ll`): with few rows, unless other ways are asked for.

    Raises:
        ValueError: it is asked for, and values have not 16 bits.
    """
    if asked == "ll" and "f32" in (config.slot_dtype, config.out_dtype):
        raise ValueError(
            f"transport='ll' sends values of 16 bits; got slot_dtype={config.slot_dtype!r}, "
            f"out_dtype={config.out_dtype!r}"
        )
    return asked == "ll" or (asked is None and config.sends_ll)


def sums_in_switch(group: Group, config: GemmConfig, pattern: str, asked: str | None) -> bool:
    """Whether the switch sums a call's partials (`transports.nvls`): where it is asked to.

    Raises:
        ValueError: it is no two-shot all-reduce of values of 16 bits.
        RuntimeError: the group's workspaces have no multicast address.
    """
    if asked is None or not TRANSPORTS[asked].sums:
        return False
    if not PATTERNS[pattern].returns:
        raise ValueError(f"transport='nvls' is two-shot: owners' sums go to all; not algorithm={pattern!r}")
    if "f32" in (config.slot_dtype, config.out_dtype):
        raise ValueError(
            f"transport='nvls' sums values of 16 bits; got slot_dtype={config.slot_dtype!r}, "
            f"out_dtype={config.out_dtype!r}"
        )
    if reason := why_no_multicast(group):
        raise RuntimeError(f"transport='nvls': {reason}")
    return True


def _make_plan(peers: Peers, config: GemmConfig, shape: ExchangeShape, reserve: int) -> Plan:
    executor, group = peers.executor, peers.group
    work = shape.num_clusters(config)
    if group.size == 1:
        resident = resident_clusters(executor, config.cluster_ctas, reserve)
        gemm = compiled_kernel(executor, config, "local", shape.pattern)
        return Plan(executor, config, shape, gemm, min(resident, work))
    asked = settings().transport_of(shape.spec.spec)
    if switch := sums_in_switch(group, config, shape.pattern, asked):
        workspace, transport = obtain(peers, size_class(config, shape)), "nvls"
    else:
        words = sends_ll(config, asked)
        workspace, transport = obtain_way(peers, partial(size_class, config, shape), asked, words)
    staged = transport == "staged"

    def compiled() -> tuple[int, Any, Any]:
        resident = resident_clusters(executor, config.cluster_ctas, reserve, beside=staged)
        gemm = compiled_kernel(executor, config, transport, shape.pattern)
        return resident, gemm, compiled_relay(executor) if staged else None

    # All ranks have this configuration, but for how each one's operands lie, and whether it has columns.
    kind = (replace(config, a_major="k", b_major="k", epilogue=()), transport, shape.pattern)
    resident, gemm, relay = peers.prepare(kind, f"compiling {config.name} for {shape.spec.op}", compiled)
    plan = Plan(
        executor,
        config,
        shape,
        gemm,
        min(resident, work),
        workspace,
        exchange_arguments(workspace, shape.shard, peers.agreed.timeout_ns, executor, is_put(asked), switch),
        signature=signature_of(config, shape, transport),
    )
    if not staged:
        return plan
    puts = tile_puts(config, shape, group.rank, workspace.size.zeroed, workspace.size.buffer)
    return replace(plan, relay=relay, puts=both(puts))


def signature_of(config: GemmConfig, shape: ExchangeShape, transport: str) -> int:
    """Of a call: sizes, and all by which a receiver finds an element of a tile that another rank sent.

    Not the operands' majors, K or whether there is a bias: these are a rank's own.
    """
    facts = vars(shape) | {name: getattr(config, name) for name in WIRE}
    return call_signature(shape.spec.op, **facts, transport=transport)


def both(lists: Sequence[Puts]) -> tuple[Puts, ...]:
    """The two lists that a relay takes; what is missing is empty."""
    return (*lists, Puts())[:2]


def is_put(asked: str | None) -> bool:
    """Whether the caller wants puts, whoever is within reach."""
    return asked == "nvshmem"


def obtain_way(
    peers: Peers, class_of: Callable[[bool, bool], SizeClass], asked: str | None, words: bool = False
) -> tuple[Workspace, str]:
    """A call's workspace, and how what it sends travels: see `transport_for`.

    Args:
        peers: the rank's side of the group.
        class_of: the call's size class, from whether puts are asked for and whether data is its own flag.
        asked: the transport that the caller asks for.
        words: whether it should be; it is not where some peer is beyond reach.

    Raises:
        RuntimeError: puts are needed or asked for, and there are none.
        SymmetricMemoryError, CaptureError: see `runtime.workspace.obtain`.
    """
    arch, puts, why_puts = peers.agreed.arch, is_put(asked), None
    if puts:
        why_puts = asked = "puts are asked for (transport='nvshmem')"

        def check() -> None:
            if reason := why_no_put_memory(peers.group):
                raise RuntimeError(f"transport='nvshmem': {reason}")
            transport_for(arch, asked)

        peers.prepare("puts", "asking for puts", check)  # before anything is allocated
    workspace = obtain(peers, class_of(puts, words))
    if words and not workspace.reaches_all:
        words, workspace = False, obtain(peers, class_of(puts, False))
    if not workspace.reaches_all:
        why_puts = "some ranks do not reach each other's memory by loads and stores"
    if why_puts is None:
        return workspace, transport_for(arch, None, words)
    reason = why_puts
    return workspace, peers.prepare(reason, "sending by puts", lambda: transport_for(arch, reason, words))


def resident_clusters(executor: Executor, size: int, reserve: int, beside: bool = False) -> int:
    """Clusters of a persistent grid, all of which must be resident at once, since they wait for each other.

    Args:
        executor: where.
        size: CTAs of a cluster.
        reserve: SMs to leave to others.
        beside: whether one cluster's place is left to the relay kernel.

    Raises:
        ValueError: not one cluster fits.
    """
    fit = min(executor.max_clusters(size), max(executor.num_sms - reserve, 0) // size) - beside
    if fit < 1:
        relay = " beside the relay kernel" if beside else ""
        raise ValueError(
            f"no room{relay} for a cluster of {size} CTAs on {executor.num_sms} SMs less "
            f"reserve_sms={reserve}: the device holds {executor.max_clusters(size)} such clusters"
        )
    return fit


def size_class(
    config: GemmConfig, shape: ExchangeShape, puts: bool = False, words: bool = False
) -> SizeClass:
    """The smallest class of workspace that holds a call's flags, slots and staged tiles.

    With ``puts`` to all peers, tiles are staged whoever is within reach; such calls have their own workspace.
    So have those whose data is its own flag (``words``): nobody else may write where they wait.
    """
    flags = power_of_two(max(shape.num_flags(config), SMALLEST_FLAGS))
    buffer = power_of_two(max(shape.buffer_bytes(config), SMALLEST_BUFFER))
    if puts:
        return SizeClass(slots_offset(flags), buffer, SLOT_BUFFERS + STAGING_BUFFERS, 0, "puts")
    if words:
        from ..device.ll import EMPTY_BYTE

        return SizeClass(slots_offset(flags), buffer, SLOT_BUFFERS, 0, "words", filled=EMPTY_BYTE)
    return SizeClass(slots_offset(flags), buffer, SLOT_BUFFERS, STAGING_BUFFERS)


def power_of_two(number: int) -> int:
    """The least one that is not less."""
    return 1 << (number - 1).bit_length()


def exchange_arguments(
    workspace: Workspace,
    shard: int,
    timeout_ns: int,
    executor: Executor,
    puts: bool = False,
    switch: bool = False,
) -> Any:
    """The kernel's `Exchange` for a workspace: where the peers' blocks are, and what bounds its waits.

    With ``puts`` every peer counts as beyond reach; with ``switch`` the multicast address is after them.
    """
    from ..kernels.exchange import Exchange

    size, memory = workspace.size, workspace.memory
    peers = memory.by_put if puts else memory.bases
    if switch:
        peers = torch.cat([memory.bases, memory.bases.new_tensor([memory.multicast])])
    return Exchange(
        peers,
        workspace.group.rank,
        workspace.group.size,
        shard,
        size.zeroed,
        size.buffer,
        timeout_ns,
        workspace.record.data_ptr(),
        executor.order.word.data_ptr(),
        0,  # each launch has its own number,
        0,  # and each call its signature
    )
