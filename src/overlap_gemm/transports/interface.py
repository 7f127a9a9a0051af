"""What a transport does: how data of one rank reaches another one, and how that one waits for it.

The roles of a kernel call these methods and never ask which transport it is. Here they are as for a peer
whose memory has an address in this process and whose data is followed by a flag; the files of the transports
override what is different there.
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
    """A way to peers. Arguments named ``call`` are a `exchange.call.Call`; all offsets are in bytes."""

    # --- one tile, to one rank; each method is called by one thread, unless `drain` says otherwise

    @abstractmethod
    def put(self, route: Route, offset: Address, stage: Any, num_bytes: Scalar) -> None:
        """Starts moving a contiguous stage's first bytes to the tile's slot; the caller commits and waits.

        Args:
            route: the tile's way to its owner.
            offset: bytes from the tile's slot, a multiple of 16.
            stage: contiguous shared-memory tensor.
            num_bytes: of the stage's first, a multiple of 16.
        """

    def publish(self, route: Route, num_bytes: Scalar, epoch: Scalar, fenced: bool = False) -> None:
        """Releases the tile's flag at its owner, at system scope.

        The calling thread has executed a full ``wait_group`` over the tile's stores.

        Args:
            route: the tile's way.
            num_bytes: of its slot, what there is to put to an owner beyond reach; 0 or less: nothing.
            epoch: the call's.
            fenced: a `device.flags.release_fence` comes after that wait, which may serve several flags.
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

        Whoever releases a flag for them has observed the store: it is the same thread, or a barrier after.
        """

    # --- all tiles

    @cute.jit
    def drain(self, ring: Any, sender: Any) -> None:
        """All lanes of the comm warp: send and publish every tile of the ring; here the first lane alone."""
        if cute.arch.lane_idx() == 0:
            order_async_writes()
            ring.drain(ring.consumer_state(), sender.config.subtiles, sender)
        cute.arch.sync_warp()

    def send_and_store(self, send: Callable[[], None], store: Callable[[], None]) -> None:
        """Sends a subtile, and stores it by TMA in this rank's output; by whom `drain` lets send."""
        send()
        store()

    def looks_up_in(self, near: Any) -> Any:
        """The room in shared memory to which a kernel copies the peers' table, or None.

        Every acquire at system scope empties the L1 cache, where the table else stays.
        """
        return near

    # --- to everybody

    def num_recipients(self, world: Scalar, itself: bool) -> Any:
        """Ranks to which a tile goes that all need; this rank is the last one, if it is among them."""
        return world - (not itself)

    def put_to_each(self, route: Route, offset: Address, stage: Any, num_bytes: Scalar) -> None:
        """As `put`, of a tile that goes to every rank; ``route`` has one of them."""
        self.put(route, offset, stage, num_bytes)

    def store_to_all(self, exchange: Any, offset: Address, values: Fragment) -> None:
        """Stores a chunk's values at ``offset`` in every other workspace, the next rank's first."""
        store_in_turn(self, exchange, offset, values, exchange.world - 1)

    # --- units of a sum (`exchange.copies.Results`)

    def publish_unit(self, publish: Callable[[], None]) -> None:
        """All lanes, after a unit's `store_to_all`: ``publish`` releases its flags."""
        publish()

    def if_absent(self, exists: Predicate, act: Callable[[], None]) -> None:  # noqa: B027
        """Whether a unit that does not exist is told of, and waited for, too: ``act`` does so."""

    def pad(self, store: Callable[[], None]) -> None:  # noqa: B027
        """Whether places of a unit outside the output are filled, too: ``store`` does so."""

    # --- receiving

    @cute.jit
    def await_partials(self, call: Any, op: cutlass.Constexpr, tile: Int32) -> None:
        """All lanes: wait for a flag of each source; then the warp may read every slot of the tile."""
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
        """All lanes: wait for flag number ``flag`` of ``source``; a failure record says ``tile``.

        ``waits``: see `WaitBound.times`.
        """
        if cute.arch.lane_idx() == 0:
            site = call.site(op, Role.RECEIVE_RESULT, tile, source, flag * call.exchange.world + source)
            wait_flag(call.flag(call.base, flag, source), call.epoch, call.bound.times(waits), site)
        cute.arch.sync_warp()

    @cute.jit
    def await_pieces(self, pieces: Scalar, wait: cutlass.Constexpr) -> None:
        """All lanes: ``wait`` for the flags of a shard, which ``pieces`` puts may make up: here one."""
        if cute.arch.lane_idx() == 0:
            wait(0)

    def loads_in_flight(self, returns: bool) -> int:
        """Loads of 16 bytes that a lane that sums has under way: each takes about a microsecond.

        ``returns``: whether sums go on to other ranks.
        """
        return 8

    def load(self, address: Address, values: Fragment) -> None:
        """Starts to load a chunk of what has come, into registers; see `take`."""
        load_run(address, values)

    def arrival(self, call: Any, op: Any, role: Any, tile: Scalar, waits: int = 1) -> Any:
        """What `take` needs: here nothing, since flags have been waited for."""
        return None

    def take(  # noqa: B027
        self, arrival: Any, addresses: Callable[[], Sequence[Any]], values: Fragment, sources: Sequence[Any]
    ) -> None:
        """Between the load of chunks and their use.

        Args:
            arrival: see there.
            addresses: where they lie.
            values: what was loaded; complete after this.
            sources: whose each is.
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
