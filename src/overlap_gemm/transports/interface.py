"""`Transport`: device interface for sending data to another rank and for waiting for it.

The roles of a kernel call these methods and do not depend on the transport. The implementations here are for
peers whose memory has an address in this process, and for data that is followed by a flag. A transport
overrides what differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from overlap_gemm.device.failure import Role
from overlap_gemm.device.flags import raise_flag, release_flag, wait_flag
from overlap_gemm.device.memory import LANES, load_run, order_async_writes
from overlap_gemm.device.remote import Ref
from overlap_gemm.device.traced import Address, Fragment, Predicate, Scalar


@dataclass(frozen=True)
class Transport(ABC):
    """Base of the transports.

    A tile is sent by `put`, bulk commit, full wait, `publish`; the ring of `drain` commits and waits. Its
    receiver waits (`await_partials`, `await_result`), then reads by `load` and `take`. Data is valid after
    `take`. Every wait has the limit of the call (`device.flags.WaitBound`). If it expires, the kernel writes
    a failure record and traps, and a later call raises `CommTimeoutError`.

    Arguments ``call`` are `exchange.call.Call`. A unit is the part of a sum that one warp sums and publishes
    at once.
    """

    # --- one tile, to one rank; each method is called by one thread, unless `drain` differs

    @abstractmethod
    def put(self, target: Ref, stage: Any, num_bytes: Scalar) -> None:
        """Starts the copy of a stage's first bytes to a tile's slot; the caller commits and waits.

        Called by one thread, or by all lanes in a transport whose `drain` does so. On return no data need
        have arrived.

        Args:
            target: Place in the slot, at its owner; a multiple of 16 bytes.
            stage: Contiguous shared-memory tensor.
            num_bytes: Number of the stage's first bytes, a multiple of 16.
        """

    def publish(self, slot: Ref, flag: Ref, num_bytes: Scalar, epoch: Scalar, fenced: bool = False) -> None:
        """Releases the tile's flag at its owner (system scope), where a receiver waits for it; one thread.

        The thread has executed a full ``wait_group`` for the tile's bulk stores.

        Args:
            slot: Slot of the tile at its owner.
            flag: Flag of the tile at its owner.
            num_bytes: Bytes of the slot to put to an owner without P2P access; 0 or less: the flag alone.
            epoch: Epoch of the call.
            fenced: Whether the thread has executed `device.flags.release_fence` after that wait; one fence
                may serve several flags.
        """
        if fenced:
            raise_flag(flag.address, epoch)
        else:
            self.signal(flag, epoch)

    def signal(self, flag: Ref, value: Any) -> None:
        """Releases ``value`` in a flag of a rank (system scope)."""
        release_flag(flag.address, value)

    @abstractmethod
    def store(self, target: Ref, values: Fragment) -> None:
        """Stores a chunk in the memory of a rank, if the rank is P2P-accessible; one thread.

        The thread that later releases a flag for the chunk must observe the store: it is the same thread, or
        a barrier is between the two.
        """

    # --- all tiles

    @cute.jit
    def drain(self, ring: Any, sender: Any) -> None:
        """Sends and publishes every tile of the ring by the first lane; all lanes of the comm warp."""
        if cute.arch.lane_idx() == 0:
            order_async_writes()
            ring.drain(ring.consumer_state(), sender.config.subtiles, sender)
        cute.arch.sync_warp()

    def send_and_store(self, send: Callable[[], None], store: Callable[[], None]) -> None:
        """Sends a subtile to its peer, and stores it in the local output by TMA; the lanes of `drain`."""
        send()
        store()

    def select_peer_table(self, peer_table: Any) -> Any:
        """Returns where a kernel keeps a copy of the ranks' addresses: ``peer_table``, or None for no copy.

        ``peer_table`` is shared memory. A copy avoids loads from L2: each acquire at system scope invalidates
        the L1 cache.
        """
        return peer_table

    # --- to every rank

    def num_recipients(self, world: Scalar, itself: bool) -> Any:
        """Returns the number of ranks that get a broadcast tile: ``world - 1``, or ``world`` if ``itself``.

        In the latter case this rank is the last.
        """
        return world - (not itself)

    def put_to_each(self, target: Ref, stage: Any, num_bytes: Scalar) -> None:
        """Starts the copy of a broadcast tile to one of its ranks; see `put`."""
        self.put(target, stage, num_bytes)

    def store_to_all(self, place: Ref, values: Fragment) -> None:
        """Stores a chunk in the same place of every other rank, the next rank's first."""
        store_in_turn(self, place, values, place.memory.world - 1)

    # --- units of a sum (`exchange.copies.Results`)

    def publish_unit(self, publish: Callable[[], None]) -> None:
        """Releases a unit's flags by ``publish``; all lanes, after `store_to_all` of the unit."""
        publish()

    def if_absent(self, exists: Predicate, act: Callable[[], None]) -> None:  # noqa: B027
        """Calls ``act`` if a unit is outside the output and its flag is awaited nevertheless; here never."""

    def pad(self, store: Callable[[], None]) -> None:  # noqa: B027
        """Calls ``store`` for a unit's places outside the output, if receivers await them; here never.

        The sender of the unit calls it.
        """

    # --- receiving

    @cute.jit
    def await_partials(self, call: Any, op: cutlass.Constexpr, tile: Int32) -> None:
        """Waits until the flags of all sources for ``tile`` are raised (acquire); all lanes of a warp.

        Each lane waits for other sources. After the warp barrier all lanes may read every slot of the tile.
        """
        for source in cutlass.range(cute.arch.lane_idx(), call.exchange.world, LANES, unroll=1):
            flag = tile * call.exchange.world + source
            site = call.site(op, Role.RECEIVE_PARTIAL, tile, source, flag)
            wait_flag(call.memory.local.at[call.flags[tile, source]].address, call.epoch, call.bound, site)
        cute.arch.sync_warp()

    @cute.jit
    def await_result(
        self,
        call: Any,
        op: cutlass.Constexpr,
        flag: Int32,
        tile: Int32,
        source: Int32,
        waits: cutlass.Constexpr = 1,
    ) -> None:
        """Waits for the flag that ``source`` raises for its result (acquire); all lanes of a warp.

        Args:
            call: Call.
            op: Code of the op, for the failure record.
            flag: Number of the flag, the first index of `Call.flags`.
            tile: Tile, for the failure record.
            source: Rank that raises the flag.
            waits: Factor of the wait limit (`WaitBound.times`).
        """
        if cute.arch.lane_idx() == 0:
            site = call.site(op, Role.RECEIVE_RESULT, tile, source, flag * call.exchange.world + source)
            raised = call.memory.local.at[call.flags[flag, source]]
            wait_flag(raised.address, call.epoch, call.bound.times(waits), site)
        cute.arch.sync_warp()

    @cute.jit
    def await_pieces(self, pieces: Scalar, wait: cutlass.Constexpr) -> None:
        """Waits for a shard by ``wait(piece)``; all lanes of a warp.

        Here a shard has one flag, that of piece 0. A transport that sends it in ``pieces`` waits for each.
        """
        if cute.arch.lane_idx() == 0:
            wait(0)

    def loads_in_flight(self, returns: bool) -> int:
        """Returns the number of 16-byte loads that a summing lane has in flight, 8; a load takes about 1 us.

        Args:
            returns: Whether sums are sent on to other ranks.
        """
        return 8

    def load(self, address: Address, values: Fragment) -> None:
        """Starts the load of a chunk of received data into registers; `take` completes it."""
        load_run(address, values)

    def arrival(self, call: Any, op: Any, role: Any, tile: Scalar, waits: int = 1) -> Any:
        """Returns the argument ``arrival`` of `take`: None, since flags have been awaited."""
        return None

    def take(  # noqa: B027
        self, arrival: Any, addresses: Callable[[], Sequence[Any]], values: Fragment, sources: Sequence[Any]
    ) -> None:
        """Completes the loads of chunks; here they are complete, since flags have been awaited.

        Args:
            arrival: Result of `arrival`.
            addresses: Function that returns the chunks' addresses.
            values: Loaded registers; valid on return.
            sources: Source rank of each chunk.
        """


@cute.jit
def store_in_turn(transport: cutlass.Constexpr, place: Ref, values: Fragment, number: Scalar) -> None:
    """Stores a chunk in the same place of ``number`` ranks, the next rank's first."""
    peer = Int32(place.memory.rank)
    for _ in cutlass.range(number, unroll=1):
        peer += 1
        if peer == place.memory.world:
            peer = Int32(0)
        transport.store(place.remote(peer), values)
