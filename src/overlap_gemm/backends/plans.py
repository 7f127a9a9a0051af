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
    Pattern,
    Puts,
    slots_offset,
    tile_puts,
)
from ..runtime.executor import Executor
from ..runtime.group import Group
from ..runtime.peers import Peers, peers_of
from ..runtime.workspace import SizeClass, Workspace, obtain, why_no_multicast, why_no_put_memory
from ..tuning.settings import Transport, settings
from ..tuning.space import OPS, constants, default_config, settle
from .compiled import compiled_kernel, compiled_relay, transport_for

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

SMALLEST_BUFFER = 1 << 20
SMALLEST_FLAGS = 1 << 12
"""Size classes begin with this slot buffer (bytes) and these flags; each further class has twice as much."""

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
        config: which kernel; its majors, dtypes and bias are those of the tensors.
        shape: global sizes, the same on all ranks.
        gemm: the compiled kernel.
        num_clusters: its grid.
        workspace: what tiles are exchanged through; None in a group of one.
        exchange: where that is and what bounds waits, as the kernel takes it.
        relay: the compiled kernel that puts what is staged, if there is one.
        puts: what that is: two lists.
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

    @property
    def is_open(self) -> bool:
        """Whether it may still be launched: until its workspace is closed, or its emulator ends."""
        return self.executor.is_open and (self.workspace is None or self.workspace.is_open)

    def launch(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """Starts a call of this rank, behind every other fused launch of its device.

        Args:
            a: `[M, K]`, see `operands.aligned`.
            b: The rows of the weight that this rank multiplies, likewise.
            out: The op's result, of one row at least.
            bias: One element per row of `b`, or None, see `operands.aligned_bias`.

        Raises:
            CommTimeoutError, OverlappingCallsError: an earlier call on this workspace failed.
        """
        workspace, executor, order = self.workspace, self.executor, self.executor.order
        with executor.active(a, b, out, bias) as stream:
            if workspace is None:  # waits for nobody, so it may run beside whatever it likes
                self.gemm(a, b, out, bias, None, self.num_clusters, stream)
                return
            workspace.raise_if_failed()
            with order.lock:
                workspace.captured |= order.follow(stream)
                exchange = self.exchange.numbered(order.next_call())
                if self.relay is None:
                    self.gemm(a, b, out, bias, exchange, self.num_clusters, stream)
                    return
                with executor.fork() as second:
                    self.gemm(a, b, out, bias, exchange, self.num_clusters, stream)
                    self.relay(int(Op[OPS[self.shape.pattern].upper()]), self.puts, exchange, second)


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
) -> Plan:
    """The plan of a call; made, which compiles and allocates, at the first one of its kind.

    Holds while `Plan.is_open` and the caller's `settings` are the same.

    Args:
        group: the ranks.
        device: where this one's tensors are.
        dtype: of them.
        shape: of the call; an all-reduce's is settled here, one-shot or two-shot.
        a_major: see `operands.major`.
        b_major: see `operands.major`.
        bias: whether there is one.
        depth: K over all ranks, where they have agreed on it.

    Raises:
        DisagreementError, SymmetricMemoryError: on every rank, if one of them cannot.
        CaptureError: something had to be made during CUDA graph capture.
        ValueError: no kernel exists for the caller's settings, or no grid fits on the SMs left to it.
        RuntimeError: puts are needed or asked for, and there are none.
    """
    peers, asked = peers_for(group, device), settings()
    key = (dtype, shape, a_major, b_major, bias, depth, asked)
    plan: Plan | None = peers.plans.get(key)
    if plan is not None:
        return plan
    operands = {"a_major": a_major, "b_major": b_major, "bias": bias}
    agreed = peers.agreed
    shape = settle(agreed.arch, DTYPES[dtype], shape, agreed.num_sms, depth)
    config = default_config(agreed.arch, DTYPES[dtype], shape, agreed.num_sms, depth, **operands)
    reserve = peers.reserve_sms if asked.reserve_sms is None else asked.reserve_sms
    return keep_plan(peers, key, lambda: _make_plan(peers, config, shape, reserve))


def keep_plan(peers: Peers, key: Hashable, make: Callable[[], P]) -> P:
    """The plan that the group has for a key; makes it if there is none."""
    with peers.lock:
        plan: P | None = peers.plans.get(key)
        if plan is None or not plan.is_open:
            if len(peers.plans) >= MOST_PLANS:
                peers.plans.clear()
            plan = peers.plans[key] = make()
        return plan


def sends_words(config: GemmConfig, asked: Transport | None) -> bool:
    """Whether a call's data is its own flag (`device.words`): with few rows, unless other ways are asked for.

    Raises:
        ValueError: it is asked for, and values have not 16 bits.
    """
    if asked == "peer_words" and "f32" in (config.slot_dtype, config.out_dtype):
        raise ValueError(
            f"transport='peer_words' sends values of 16 bits; got slot_dtype={config.slot_dtype!r}, "
            f"out_dtype={config.out_dtype!r}"
        )
    return asked == "peer_words" or (asked in (None, "copy_engine") and config.sends_words)


def asks_for_switch(op: str) -> bool:
    """Whether the switch is asked to sum a call's partials and to copy the sums (`transports.nvls`).

    Raises:
        ValueError: it is no all-reduce.
    """
    if settings().transport != "nvls":
        return False
    if op != "gemm_all_reduce":
        raise ValueError(
            f"transport='nvls' is for gemm_all_reduce, the op for which it can save bytes; not for {op}"
        )
    return True


def sums_in_switch(group: Group, config: GemmConfig, pattern: Pattern) -> bool:
    """Whether the switch sums a call's partials: where it is asked to.

    Raises:
        ValueError: it is no two-shot all-reduce of values of 16 bits.
        RuntimeError: the group's workspaces have no multicast address.
    """
    if not asks_for_switch(OPS[pattern]):
        return False
    if pattern != "two_shot":
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
    if switch := sums_in_switch(group, config, shape.pattern):
        workspace, transport = obtain(peers, size_class(config, shape)), "nvls"
    else:
        words = sends_words(config, settings().transport)
        workspace, transport = obtain_way(peers, partial(size_class, config, shape), words)
    staged = transport == "staged"
    resident = resident_clusters(executor, config.cluster_ctas, reserve, beside=staged)
    plan = Plan(
        executor,
        config,
        shape,
        compiled_kernel(executor, config, transport, shape.pattern),
        min(resident, work),
        workspace,
        exchange_arguments(
            workspace, shape.shard, peers.agreed.timeout_ns, executor, asked_for_puts(), switch
        ),
    )
    if not staged:
        return plan
    puts = tile_puts(config, shape, group.rank, workspace.size.zeroed, workspace.size.buffer)
    return replace(plan, relay=compiled_relay(executor), puts=both(puts))


def both(lists: Sequence[Puts]) -> tuple[Puts, ...]:
    """The two lists that a relay takes; what is missing is empty."""
    return (*lists, Puts())[:2]


def asked_for_puts() -> bool:
    """Whether the caller wants them, whoever is within reach."""
    return settings().transport == "nvshmem"


def obtain_way(
    peers: Peers, class_of: Callable[[bool, bool], SizeClass], words: bool = False
) -> tuple[Workspace, str]:
    """A call's workspace, and how what it sends travels: see `transport_for`.

    Args:
        peers: the rank's side of the group.
        class_of: the call's size class, from whether puts are asked for and whether data is its own flag.
        words: whether it should be; it is not where some peer is beyond reach.

    Raises:
        RuntimeError: puts are needed or asked for, and there are none.
        SymmetricMemoryError, CaptureError: see `runtime.workspace.obtain`.
    """
    arch, puts, why_puts = peers.agreed.arch, asked_for_puts(), None
    if puts:
        if reason := why_no_put_memory(peers.group):
            raise RuntimeError(f"transport='nvshmem': {reason}")
        why_puts = "puts are asked for (transport='nvshmem')"
        transport_for(arch, why_puts)  # refused before anything is allocated
    workspace = obtain(peers, class_of(puts, words))
    if words and not workspace.reaches_all:
        words, workspace = False, obtain(peers, class_of(puts, False))
    if not workspace.reaches_all:
        why_puts = "some ranks do not reach each other's memory by loads and stores"
    return workspace, transport_for(arch, why_puts, words)


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
        from ..device.words import EMPTY_BYTE

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

    With ``puts`` every peer counts as beyond reach; with ``switch`` the multicast address is behind them.
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
        0,  # each launch has its own number
    )
