"""A call of an op that exchanges tiles: its beginning and end, and the rule for reuse of buffers.

Every call of a workspace has an epoch, one above the last one's, in device memory (so a CUDA graph replays
correctly). Buffers are double: a call uses those of its epoch's parity. Flags are monotonic epochs, one
writer each, never reset, compared by ``>=``. A rank's calls on a workspace run one after the other. So a flag
with a later epoch implies that its writer's earlier calls are complete.

**A call has an identity.** Epochs match even if the ranks make different calls. So the *entered* word with
which a rank signals a call has the epoch and, above it, a signature. It is a digest of the facts that the
ranks' calls must have in common (:mod:`overlap_gemm.runtime.identity`). The warp that awaits a peer's entry
compares it with its own. A rank whose peer makes another call traps (`Role.CALL_IDENTITY`) before its own
call ends: no rank gets a result of two different calls. There is a word for each parity of the epoch. A peer
may enter the next call before this one's word is read, but not the one after that, by the rule below. For the
same reason half a word is wide enough for an epoch that is 0 or 2 ahead of the previous one.

**The rule.** No rank writes a buffer in call ``e + 2`` before it knows that every rank has finished reading
it in call ``e``. It holds for any sequence of ops and shapes on a workspace, because it depends on no shape:

1. `announce`: at the start of call ``e + 1`` every rank raises its *entered* word to ``e + 1`` in every
   peer's workspace. Its own call ``e`` has ended by then (one stream order), all its reads with it.
2. `await_peers`: before its call ``e + 1`` ends, every rank waits until every peer has entered ``e + 1``. So
   a rank's call ``e + 2`` begins after the end of every rank's call ``e``.

(To wait for a call's owners alone, whose data proves their entry, is not enough. With M = 768, 1, 768 rows on
three ranks, a rank that owns none in the second call ran ahead of another such rank.)

Why the asynchronous writes of ``e + 2`` are after the ordinary reads of ``e``:

1. The reads are complete before that kernel ends.
2. Its end happens before `announce`, a release at system scope, which `await_peers` acquires.
3. The end of that kernel happens before every thread of call ``e + 2``.
4. The thread that starts bulk stores fences the asynchronous proxy first (`order_async_writes`). The memory
   model requires that between accesses of two proxies to the same address (PTX ISA, "proxies";
   `fence.proxy.async`).

Puts: peers have received call ``e``'s before they end it, so every put has read its source.

LL packets (:mod:`overlap_gemm.device.ll_words`) obey the same rule: a reader's reset of the packets is a part
of its reading. It is complete before that rank signals its next call, so before any rank's call ``e + 2``
stores there. Such calls have separate workspaces, in which nothing else is stored.

**One call at a time.** The fused launches of a device run one after the other. Each CTA registers the
launch's number in the device's *in call* word (`enter`), and the last one clears it: two launches that
are resident at once end in an error (`Role.IN_CALL`). Two that fill the device never are. They run one after
the other, in an order that may differ between ranks, which identities detect.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from overlap_gemm.device.failure import FailureSite, Role
from overlap_gemm.device.flags import WaitBound, fail, wait_flag, wait_identity
from overlap_gemm.device.memory import global_pointer
from overlap_gemm.device.traced import Address, Scalar
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.geometry import (
    CLAIM_OFFSET,
    COMING_OFFSET,
    CONTROL_BYTES,
    ENTERED_OFFSET,
    EPOCH_OFFSET,
    FLAG_BYTES,
    MAX_WORLD,
    READ_OFFSET,
    TICKET_OFFSET,
)
from overlap_gemm.kernel.shared_words import count
from overlap_gemm.kernel.work import num_ctas


class Call(NamedTuple):
    """Run-time values that every role of one call shares.

    Attributes:
        exchange: Arguments of the launch.
        base: Address of this rank's workspace.
        last: ``Int64``: address of the last finished call's epoch.
        buffer: Byte offset of this epoch's buffer, in every workspace.
        bound: Limit of waits on peers.
    """

    exchange: Exchange
    base: Address
    last: Any
    buffer: Any
    bound: WaitBound

    @staticmethod
    def begin(exchange: Exchange, epoch_offset: int = EPOCH_OFFSET, peer_table: Any = None) -> Call:
        """Reads the epoch; every thread, before a barrier of its CTA, so before any ticket.

        With ``peer_table`` (`smem_peer_table`), roles read peers' addresses from a copy in shared memory. The
        copy is complete after that barrier.
        """
        base = exchange.peers[exchange.rank]
        if peer_table is not None:
            copy_table(exchange.peers, peer_table)
            exchange = exchange._replace(peers=peer_table)
        epoch = _next_epoch(base + epoch_offset)
        return Call(
            exchange,
            base,
            base + epoch_offset,
            exchange.slots_offset + Int64(epoch & 1) * exchange.buffer_bytes,
            WaitBound(exchange.timeout_ns, exchange.record, base + CLAIM_OFFSET),
        )

    def flag(self, base: Address, tile: Scalar, source: Scalar) -> Any:
        """Returns the address (or, with ``base`` 0, offset) of the flag that ``source`` raises for a tile."""
        return base + (CONTROL_BYTES + FLAG_BYTES * Int64(tile * self.exchange.world + source))

    @property
    def epoch(self) -> Any:
        """Returns this call's epoch, ``Uint64``, read again: roles that sum lack registers to keep it.

        It changes with the last CTA's ticket, which comes after all reads.
        """
        return _next_epoch(self.last)

    @property
    def identity(self) -> Any:
        """Returns this rank's *entered* word: the epoch's low half, the signature above it."""
        return (Uint64(Uint32(self.exchange.signature)) << 32) | Uint64(Uint32(self.epoch))

    def entered(self, source: Scalar) -> Any:
        """Returns the byte offset of the *entered* word of ``source`` for epochs of this parity."""
        parity = Int64(self.epoch & 1) * (MAX_WORLD * FLAG_BYTES)
        return ENTERED_OFFSET + parity + FLAG_BYTES * Int64(source)

    def has_read(self, source: Scalar) -> Any:
        """Returns the byte offset of the flag that ``source`` raises when it has read its gathered shards."""
        return READ_OFFSET + FLAG_BYTES * Int64(source)

    def site(self, op: int, role: Role, tile: Scalar, source: Scalar, index: Scalar) -> FailureSite:
        """Returns the place of a wait for a failure record."""
        return FailureSite(self.exchange.rank, int(op), int(role), tile, source, index)


@cute.jit
def copy_table(peers: cute.Tensor, peer_table: cute.Tensor) -> None:
    """Copies the table of addresses into shared memory; all threads of a CTA.

    Every acquire at system scope empties the L1 cache. A lookup in global memory would need a trip to L2
    before each store to a peer.
    """
    thread, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    for i in cutlass.range(thread, cute.size(peers), threads, unroll=1):
        peer_table[i] = peers[i]


def _next_epoch(last: Any) -> Any:
    """Returns the epoch after the one at this address."""
    return Uint64(cute.arch.load(global_pointer(Uint64, last, 8), Uint64)) + 1


@cute.jit
def enter(call: Call, op: cutlass.Constexpr) -> None:
    """Registers the launch; one thread of each CTA, before it accesses a peer. Traps if another one runs."""
    number = Uint32(call.exchange.call)
    word = global_pointer(Uint32, call.exchange.call_word, 4)
    running = Uint32(cute.arch.atomic_cas(word, cmp=Uint32(0), val=number, sem="relaxed", scope="gpu"))
    if running != 0 and running != number:
        site = call.site(op, Role.IN_CALL, 0, call.exchange.rank, 0)
        fail(call.bound, site, Uint64(number), Uint64(running))


@cute.jit
def begin_warp(call: Call, op: cutlass.Constexpr, transport: cutlass.Constexpr, announces: Any) -> None:
    """Registers the launch, before all else; all lanes of a CTA's comm warp. One ``announces`` the call."""
    if cute.arch.lane_idx() == 0:
        enter(call, op)
    cute.arch.sync_warp()
    if announces:
        announce(call, transport)


@cute.jit
def announce(call: Call, transport: cutlass.Constexpr) -> None:
    """Signals to every peer that this rank has entered this call; all lanes of one warp of the grid."""
    exchange, identity = call.exchange, call.identity
    offset = call.entered(exchange.rank)
    for peer in cutlass.range(cute.arch.lane_idx(), exchange.world, 32, unroll=1):
        if peer != exchange.rank:
            transport.signal(exchange.peers, exchange.rank, peer, offset, identity)


@cute.jit
def await_entry(call: Call, op: cutlass.Constexpr, peer: Scalar) -> None:
    """Waits until ``peer`` has entered this call; one lane. Traps if the peer is in another call."""
    site = call.site(op, Role.CALL_ENTERED, 0, peer, peer)
    wait_identity(call.base + call.entered(peer), call.identity, call.bound, site)


@cute.jit
def await_peers(call: Call, op: cutlass.Constexpr) -> None:
    """Waits until every peer has entered the call (`announce`); all lanes of one warp, at the grid's end."""
    exchange = call.exchange
    for peer in cutlass.range(cute.arch.lane_idx(), exchange.world, 32, unroll=1):
        if peer != exchange.rank:
            await_entry(call, op, peer)


@cute.jit
def announce_read(call: Call, transport: cutlass.Constexpr) -> None:
    """Signals to every peer that this rank has read all gathered shards; all lanes of one warp."""
    exchange = call.exchange
    for peer in cutlass.range(cute.arch.lane_idx(), exchange.world, 32, unroll=1):
        if peer != exchange.rank:
            transport.signal(exchange.peers, exchange.rank, peer, call.has_read(exchange.rank), call.epoch)


@cute.jit
def await_readers(call: Call, op: cutlass.Constexpr) -> None:
    """Waits until every peer has read (`announce_read`); all lanes of one warp, at the grid's end."""
    exchange = call.exchange
    for peer in cutlass.range(cute.arch.lane_idx(), exchange.world, 32, unroll=1):
        if peer != exchange.rank:
            site = call.site(op, Role.CALL_READ, 0, peer, peer)
            wait_flag(call.base + call.has_read(peer), call.epoch, call.bound, site)


@cute.jit
def count_grid(call: Call, offset: Int32, warps: cutlass.Constexpr) -> Int32:
    """Counts a warp at a control word; all lanes. Returns 1 for the grid's last of ``warps`` a CTA, else 0.

    The last warp resets the word. All its lanes are ordered after everything that all lanes of the others did
    before they counted: a shuffle orders no memory, a warp's barrier does.
    """
    is_last = Int32(0)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        word = global_pointer(Uint32, call.base + offset, 4)
        taken = cute.arch.atomic_add(word, Uint32(1), sem="acq_rel", scope="gpu")
        if Int32(taken) == num_ctas() * warps - 1:
            cute.arch.store(word, Uint32(0))
            is_last = Int32(1)
    is_last = Int32(cute.arch.shuffle_sync(is_last, 0))
    cute.arch.sync_warp()
    return is_last


@cute.jit
def end_warp(call: Call, tally: Any, warps: cutlass.Constexpr) -> None:
    """Ends a warp's roles; all lanes. The last of the CTA's ``warps`` warps counts for the CTA.

    It is ordered after everything that the other warps have seen: others may read what `finish` stores until
    then.
    """
    cute.arch.sync_warp()
    if count(tally.ended, "acq_rel") == warps - 1:
        finish(call)


@cute.jit
def finish(call: Call) -> None:
    """Counts a CTA; all lanes of one warp, after its last role. The grid's last CTA stores the epoch."""
    ticket = global_pointer(Uint32, call.base + TICKET_OFFSET, 4)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(ticket, Uint32(1), sem="acq_rel", scope="gpu")
        if Int32(taken) == num_ctas() - 1:
            cute.arch.store(ticket, Uint32(0))
            epoch = call.epoch
            cute.arch.store(global_pointer(Uint64, call.last, 8), epoch)
            cute.arch.store(global_pointer(Uint64, call.base + COMING_OFFSET, 8), epoch + 1)
            word = global_pointer(Uint32, call.exchange.call_word, 4)
            cute.arch.store(word, Uint32(0), sem="relaxed", scope="gpu")
