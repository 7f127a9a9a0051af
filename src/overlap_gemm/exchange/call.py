"""Beginning and end of a call that communicates, and the rule for reuse of a workspace's buffers.

**Epochs.** Calls on a workspace are numbered by an epoch, which the kernel reads from device memory and adds
one to. So a CUDA graph replays correctly. There are two buffers: a call uses that of its epoch's parity. A
flag holds an epoch, has one writer, and is never reset; it is raised if its epoch is ``>=`` the expected one.
A rank's calls on a workspace are ordered on one stream. So a flag of a later epoch implies that all earlier
calls of its writer have ended.

**The rule.** No rank writes a buffer in call ``e + 2`` before every rank has finished reading it in call
``e``. It depends on no shape, so it holds for any sequence of ops and shapes:

1. `signal_entry`: at the start of call ``e + 1`` each rank stores its *entry signal* in every peer's
   workspace (release, system scope). Its call ``e`` has ended by then, with all reads.
2. `await_peers`: before the end of its call ``e + 1`` each rank waits for the signals of all peers
   (acquire, system scope). So its call ``e + 2`` begins after every rank's call ``e`` has ended.

It is not enough to wait for the ranks that own tiles of the call, whose data proves their entry. With M =
768, 1, 768 on three ranks, two ranks own nothing in the second call; one could overtake the other.

**Proxies.** Bulk stores of call ``e + 2`` (asynchronous proxy) may overwrite what ordinary loads of call
``e`` have read (generic proxy). The order is: loads, end of kernel ``e``, `signal_entry`, `await_peers` of
the peer, end of its kernel ``e + 1``, start of its kernel ``e + 2``. Then the thread that starts bulk stores
executes `order_async_writes`, as the memory model requires between two proxies (PTX ISA, "proxies").

**Puts.** A rank ends a call only after it has received all puts to it. So each put has read its source.

**LL packets** (:mod:`overlap_gemm.device.ll_words`). The reader's reset to `EMPTY` is part of its reading, so
the same rule orders it before the stores of call ``e + 2``. A workspace for LL packets has nothing else in
its slots.

**Identity.** Ranks that make different calls still have equal epochs. So the entry signal has the low half
of the epoch and above it a signature: a digest of what the ranks' calls must have in common
(:mod:`overlap_gemm.runtime.identity`). The waiting lane compares both. If the epoch
arrives with another signature, it traps at once (`Role.CALL_IDENTITY`), before the call ends: no rank returns
a result of two different calls. There are two words per peer, one for each parity of the epoch: a peer may
enter ``e + 1`` while this rank still waits for its entry into ``e``. By the rule, a peer enters ``e + 2``
only after this rank's call ``e`` has ended. So the awaited word holds epoch ``e``, or one at
most two older: 32 bits are enough. (A later epoch cannot arrive if all ranks make the same calls. It traps,
too, as `Role.CALL_ENTERED`.)

**One call at a time.** Fused launches of a device must not overlap. Each CTA registers the launch's number in
the device's *in call* word (`enter`); the grid's last CTA clears it (`finish`). If two launches are resident
at once, one traps (`Role.IN_CALL`). Two launches that each fill the device run one after the other. If their
order differs between ranks, the identities differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.failure import FailureSite, Role
from overlap_gemm.device.flags import WaitBound, fail, wait_flag, wait_identity
from overlap_gemm.device.memory import global_pointer
from overlap_gemm.device.remote import Ref, SymmetricWorkspace, copy_table
from overlap_gemm.device.traced import Address, Scalar
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.geometry import (
    CLAIM_OFFSET,
    EPOCH_OFFSET,
    NEXT_EPOCH_OFFSET,
    READ,
    SLOT_BUFFERS,
    TICKET_OFFSET,
    Region,
    arrival_flags,
    entry_signals,
    staged_flags,
    tile_slots,
)
from overlap_gemm.kernel.shared_words import count
from overlap_gemm.kernel.work import num_ctas


class Call(NamedTuple):
    """Run-time values of a call, for all roles.

    Attributes:
        exchange: Arguments of the launch.
        base: ``Int64``: address of this rank's workspace; for `memory` alone.
        last: ``Int64``: address of the epoch of the last finished call.
        buffer: ``Int64``: byte offset of the buffer of this epoch's parity, the same in every workspace.
        bound: Limit of waits on peers.
    """

    exchange: Exchange
    base: Address
    last: Any
    buffer: Any
    bound: WaitBound

    @staticmethod
    def begin(exchange: Exchange, epoch_offset: int = EPOCH_OFFSET, peer_table: Any = None) -> Call:
        """Returns the values of the call that begins; every thread, before a barrier of its CTA.

        Each thread reads the epoch. The barrier comes before the CTA's ticket, and `finish` of the grid's
        last CTA comes after all tickets. So the epoch does not change before it is read. ``peer_table``
        (`smem_peer_table`), if passed, gets a copy of the ranks' addresses. The copy is complete after the
        barrier; the roles then use it.
        """
        local = SymmetricWorkspace.of(exchange.peers, exchange.rank, exchange.world).local
        if peer_table is not None:
            copy_table(exchange.peers, peer_table)
            exchange = exchange._replace(peers=peer_table)
        last = local.at[epoch_offset].address
        buffer = exchange.slots_offset + Int64(_next_epoch(last) & 1) * exchange.buffer_bytes
        bound = WaitBound(exchange.timeout_ns, exchange.record, local.at[CLAIM_OFFSET].address)
        return Call(exchange, local.address, last, buffer, bound)

    @property
    def memory(self) -> SymmetricWorkspace:
        """Returns the workspaces of all ranks."""
        exchange = self.exchange
        return SymmetricWorkspace(exchange.peers, exchange.rank, exchange.world, self.base)

    @property
    def flags(self) -> Region:
        """Returns the arrival flags: ``[tile][source]``."""
        return arrival_flags(self.exchange.world)

    @property
    def staged_flags(self) -> Region:
        """Returns the local flags of staged tiles: ``[tile][owner]``."""
        return staged_flags(self.exchange.slots_offset, self.exchange.world)

    def slots(self, config: GemmConfig, tiles: Scalar) -> Region:
        """Returns the slots of the call, ``[source][tile]``, of ``tiles`` CTA tiles for each source."""
        return tile_slots(config, self.buffer, tiles)

    def staged_tiles(self, config: GemmConfig, tiles: Scalar) -> Region:
        """Returns the local slots of staged tiles: ``[owner][tile]``."""
        return tile_slots(config, self.buffer + SLOT_BUFFERS * self.exchange.buffer_bytes, tiles)

    @property
    def epoch(self) -> Any:
        """Returns the call's epoch, ``Uint64``, by a new load: summing roles have no registers to keep it.

        The word changes only in `finish` of the grid's last CTA, after all reads.
        """
        return _next_epoch(self.last)

    @property
    def identity(self) -> Any:
        """Returns this rank's entry signal, ``Uint64``: signature in the high half, low half of the epoch."""
        return (Uint64(Uint32(self.exchange.signature)) << 32) | Uint64(Uint32(self.epoch))

    def entered(self, source: Scalar) -> Any:
        """Returns the byte offset of the entry signal of ``source`` for this epoch's parity."""
        return entry_signals(Int64(self.epoch & 1))[source]

    def site(self, op: int, role: Role, tile: Scalar, source: Scalar, index: Scalar) -> FailureSite:
        """Returns the site of a wait, for its failure record."""
        return FailureSite(self.exchange.rank, int(op), int(role), tile, source, index)


def _next_epoch(last: Any) -> Any:
    """Returns the epoch at the address ``last`` plus one."""
    return Uint64(cute.arch.load(global_pointer(Uint64, last, 8), Uint64)) + 1


@cute.jit
def enter(call: Call, op: cutlass.Constexpr) -> None:
    """Registers the launch in the device's in-call word; one thread of each CTA, before it accesses a peer.

    Traps if another launch is registered.
    """
    number = Uint32(call.exchange.call)
    word = global_pointer(Uint32, call.exchange.call_word, 4)
    running = Uint32(cute.arch.atomic_cas(word, cmp=Uint32(0), val=number, sem="relaxed", scope="gpu"))
    if running != 0 and running != number:
        site = call.site(op, Role.IN_CALL, 0, call.exchange.rank, 0)
        fail(call.bound, site, Uint64(number), Uint64(running))


@cute.jit
def begin_warp(call: Call, op: cutlass.Constexpr, transport: cutlass.Constexpr, signals_entry: Any) -> None:
    """Registers the launch, and signals the entry if ``signals_entry``; all lanes of a CTA's comm warp.

    The warp does this before all else. One warp of the grid has ``signals_entry``.
    """
    if cute.arch.lane_idx() == 0:
        enter(call, op)
    cute.arch.sync_warp()
    if signals_entry:
        signal_entry(call, transport)


@cute.jit
def signal_entry(call: Call, transport: cutlass.Constexpr) -> None:
    """Releases this rank's entry signal in every peer's workspace; all lanes of one warp of the grid.

    `await_entry` of a peer acquires it. It releases all accesses of this rank's earlier calls.
    """
    exchange, identity = call.exchange, call.identity
    signal = call.memory.local.at[call.entered(exchange.rank)]
    for peer in cutlass.range(cute.arch.lane_idx(), exchange.world, 32, unroll=1):
        if peer != exchange.rank:
            transport.signal(signal.remote(peer), identity)


@cute.jit
def await_entry(call: Call, op: cutlass.Constexpr, peer: Scalar) -> None:
    """Waits for the entry signal of ``peer`` (acquire, system scope); one lane.

    Traps if the signal has another signature, or on timeout.
    """
    site = call.site(op, Role.CALL_ENTERED, 0, peer, peer)
    wait_identity(call.memory.local.at[call.entered(peer)].address, call.identity, call.bound, site)


@cute.jit
def await_peers(call: Call, op: cutlass.Constexpr) -> None:
    """Waits until every peer has entered this call; all lanes of one warp of the grid, before the call ends.

    This makes the buffer of the next call free to write; see the module.
    """
    exchange = call.exchange
    for peer in cutlass.range(cute.arch.lane_idx(), exchange.world, 32, unroll=1):
        if peer != exchange.rank:
            await_entry(call, op, peer)


@cute.jit
def signal_read(call: Call, transport: cutlass.Constexpr) -> None:
    """Releases a flag at every peer: this rank has read all gathered shards; all lanes of one warp.

    `await_readers` of a peer acquires it.
    """
    exchange = call.exchange
    for peer in cutlass.range(cute.arch.lane_idx(), exchange.world, 32, unroll=1):
        if peer != exchange.rank:
            transport.signal(call.memory.remote(peer).at[READ[exchange.rank]], call.epoch)


@cute.jit
def await_readers(call: Call, op: cutlass.Constexpr) -> None:
    """Waits until every peer has read all shards (acquires `signal_read`); all lanes of one warp."""
    exchange = call.exchange
    for peer in cutlass.range(cute.arch.lane_idx(), exchange.world, 32, unroll=1):
        if peer != exchange.rank:
            site = call.site(op, Role.CALL_READ, 0, peer, peer)
            wait_flag(call.memory.local.at[READ[peer]].address, call.epoch, call.bound, site)


@cute.jit
def count_grid(word: Ref, warps: cutlass.Constexpr) -> Int32:
    """Counts a warp at a local control word; returns 1 to the grid's last warp, 0 to others.

    All lanes of ``warps`` warps of each CTA call it; the last warp resets the word. The counter acquires and
    releases at device scope, between two warp barriers. So all lanes of the last warp are ordered after
    everything that all lanes of the other warps did before they counted. (A shuffle alone orders no memory.)
    """
    is_last = Int32(0)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        counter = global_pointer(Uint32, word.address, 4)
        taken = cute.arch.atomic_add(counter, Uint32(1), sem="acq_rel", scope="gpu")
        if Int32(taken) == num_ctas() * warps - 1:
            cute.arch.store(counter, Uint32(0))
            is_last = Int32(1)
    is_last = Int32(cute.arch.shuffle_sync(is_last, 0))
    cute.arch.sync_warp()
    return is_last


@cute.jit
def end_warp(call: Call, counters: Any, warps: cutlass.Constexpr) -> None:
    """Ends a warp's roles; all lanes of each of the CTA's ``warps`` warps that access the workspace.

    The last warp of the CTA calls `finish`. The counter acquires and releases at CTA scope, so all reads of
    control words by the other warps come before it.
    """
    cute.arch.sync_warp()
    if count(counters.ended, "acq_rel") == warps - 1:
        finish(call)


@cute.jit
def finish(call: Call) -> None:
    """Counts the CTA by a ticket; all lanes of one warp, after the last role of the CTA.

    The ticket acquires and releases at device scope. So the stores of the grid's last CTA come after all
    accesses of all CTAs. It resets the ticket, stores this epoch at `EPOCH_OFFSET` and the next one at
    `NEXT_EPOCH_OFFSET` (for copy engines), and clears the in-call word.
    """
    local = call.memory.local
    ticket = global_pointer(Uint32, local.at[TICKET_OFFSET].address, 4)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(ticket, Uint32(1), sem="acq_rel", scope="gpu")
        if Int32(taken) == num_ctas() - 1:
            cute.arch.store(ticket, Uint32(0))
            epoch = call.epoch
            cute.arch.store(global_pointer(Uint64, call.last, 8), epoch)
            following = global_pointer(Uint64, local.at[NEXT_EPOCH_OFFSET].address, 8)
            cute.arch.store(following, epoch + 1)
            word = global_pointer(Uint32, call.exchange.call_word, 4)
            cute.arch.store(word, Uint32(0), sem="relaxed", scope="gpu")
