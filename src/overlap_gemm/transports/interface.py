"""`Transport`: how one rank's data is sent to another one, and how that one waits for it.

The roles of a kernel call these methods and do not depend on the transport. The methods here are for a peer
whose memory has an address in this process and whose data is followed by a flag; transports override what is
different.
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
from overlap_gemm.device.route import Route
from overlap_gemm.device.traced import Address, Fragment, Predicate, Scalar


@dataclass(frozen=True)
class Transport(ABC):
    """A transport to peers. Arguments named ``call`` are a `exchange.call.Call`; all offsets are in bytes."""

    # --- one tile, to one rank; each method is called by one thread, unless `drain` differs

    @abstractmethod
    def put(self, route: Route, offset: Address, stage: Any, num_bytes: Scalar) -> None:
        """Starts moving a contiguous stage's first bytes to the tile's slot; the caller commits and waits.

        Args:
            route: Route of the tile to its owner.
            offset: Bytes from the tile's slot, a multiple of 16.
            stage: Contiguous shared-memory tensor.
            num_bytes: Number of the stage's first bytes, a multiple of 16.
        """

    def publish(self, route: Route, num_bytes: Scalar, epoch: Scalar, fenced: bool = False) -> None:
        """Releases the tile's flag at its owner, at system scope.

        The calling thread has executed a full ``wait_group`` over the tile's stores.

        Args:
            route: Route of the tile.
            num_bytes: Bytes of its slot to put to an owner without P2P access; 0 or less: none.
            epoch: Epoch of the call.
            fenced: Whether a `device.flags.release_fence`, which may serve several flags, follows that wait.
        """
        if fenced:
            raise_flag(route.peers[route.owner] + route.flag, epoch)
        else:
            self.signal(route.peers, route.rank, route.owner, route.flag, epoch)

    def signal(self, peers: Any, rank: Scalar, peer: Scalar, offset: Address, value: Any) -> None:
        """Releases ``value`` in the flag at ``offset`` in the workspace of ``peer``."""
        release_flag(peers[peer] + offset, value)

    @abstractmethod
    def store(self, peers: Any, peer: Scalar, offset: Address, values: Fragment) -> None:
        """Stores a chunk's values at ``offset`` in the workspace of ``peer``, if it has an address.

        The thread that releases a flag for them has observed the store: it is the same thread, or it is after
        a barrier.
        """

    # --- all tiles

    @cute.jit
    def drain(self, ring: Any, sender: Any) -> None:
        """Sends and publishes every tile of the ring, by the first lane; all lanes of the comm warp."""
        if cute.arch.lane_idx() == 0:
            order_async_writes()
            ring.drain(ring.consumer_state(), sender.config.subtiles, sender)
        cute.arch.sync_warp()

    def send_and_store(self, send: Callable[[], None], store: Callable[[], None]) -> None:
        """Sends a subtile, and stores it by TMA in this rank's output; the lanes by which `drain` sends."""
        send()
        store()

    def looks_up_in(self, peer_table: Any) -> Any:
        """Returns the shared memory to which a kernel copies the table of peers, or None.

        Every acquire at system scope empties the L1 cache, which would otherwise keep the table.
        """
        return peer_table

    # --- to every rank

    def num_recipients(self, world: Scalar, itself: bool) -> Any:
        """Returns the number of ranks to which a broadcast tile is sent; this rank, if included, is last."""
        return world - (not itself)

    def put_to_each(self, route: Route, offset: Address, stage: Any, num_bytes: Scalar) -> None:
        """Starts moving, as `put`, a tile that is sent to every rank; ``route`` has one of them."""
        self.put(route, offset, stage, num_bytes)

    def store_to_all(self, exchange: Any, offset: Address, values: Fragment) -> None:
        """Stores a chunk's values at ``offset`` in every other workspace, the next rank's first."""
        store_in_turn(self, exchange, offset, values, exchange.world - 1)

    # --- units of a sum (`exchange.copies.Results`)

    def publish_unit(self, publish: Callable[[], None]) -> None:
        """Releases a unit's flags by ``publish``; all lanes, after its `store_to_all`."""
        publish()

    def if_absent(self, exists: Predicate, act: Callable[[], None]) -> None:  # noqa: B027
        """Calls ``act`` for a unit that does not exist, if such units are signalled and awaited, too."""

    def pad(self, store: Callable[[], None]) -> None:  # noqa: B027
        """Calls ``store`` for places of a unit outside the output, if these are filled, too."""

    # --- receiving

    @cute.jit
    def await_partials(self, call: Any, op: cutlass.Constexpr, tile: Int32) -> None:
        """Waits for a flag of each source; all lanes. Then the warp may read every slot of the tile."""
        for source in cutlass.range(cute.arch.lane_idx(), call.exchange.world, LANES, unroll=1):
            flag = tile * call.exchange.world + source
            site = call.site(op, Role.RECEIVE_PARTIAL, tile, source, flag)
            wait_flag(call.flag(call.base, tile, source), call.epoch, call.bound, site)
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
        """Waits for flag number ``flag`` of ``source``; all lanes. A failure record names ``tile``.

        ``waits``: Number of wait limits, see `WaitBound.times`.
        """
        if cute.arch.lane_idx() == 0:
            site = call.site(op, Role.RECEIVE_RESULT, tile, source, flag * call.exchange.world + source)
            wait_flag(call.flag(call.base, flag, source), call.epoch, call.bound.times(waits), site)
        cute.arch.sync_warp()

    @cute.jit
    def await_pieces(self, pieces: Scalar, wait: cutlass.Constexpr) -> None:
        """Waits for the flags of a shard by ``wait``, here for the flag of piece 0; all lanes.

        A transport that sends a shard in ``pieces``, each with a flag, waits for all of them.
        """
        if cute.arch.lane_idx() == 0:
            wait(0)

    def loads_in_flight(self, returns: bool) -> int:
        """Returns the number of 16-byte loads that a summing lane has in flight; a load takes about 1 us.

        ``returns``: Whether sums are sent on to other ranks.
        """
        return 8

    def load(self, address: Address, values: Fragment) -> None:
        """Starts to load a chunk of received data into registers; see `take`."""
        load_run(address, values)

    def arrival(self, call: Any, op: Any, role: Any, tile: Scalar, waits: int = 1) -> Any:
        """Returns the arguments of `take`: here none, since flags have been awaited."""
        return None

    def take(  # noqa: B027
        self, arrival: Any, addresses: Callable[[], Sequence[Any]], values: Fragment, sources: Sequence[Any]
    ) -> None:
        """Completes the loads of chunks before their use; here they are complete.

        Args:
            arrival: Result of `arrival`.
            addresses: Function that returns the chunks' addresses.
            values: Loaded values; complete after this.
            sources: Source rank of each chunk.
        """


@cute.jit
def store_in_turn(
    transport: cutlass.Constexpr, exchange: Any, offset: Address, values: Fragment, number: Scalar
) -> None:
    """Stores a chunk at ``number`` ranks, the next one first."""
    peer = Int32(exchange.rank)
    for _ in cutlass.range(number, unroll=1):
        peer += 1
        if peer == exchange.world:
            peer = Int32(0)
        transport.store(exchange.peers, peer, offset, values)
