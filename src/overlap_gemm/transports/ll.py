"""Transport ``ll``: ordinary stores of LL packets, which contain their flag, into a peer's mapped memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from overlap_gemm.device.ll_words import load_words, store_words, take_words
from overlap_gemm.device.memory import CHUNK_BYTES, LANES
from overlap_gemm.device.route import Route
from overlap_gemm.device.traced import Address, Fragment, Scalar
from overlap_gemm.transports.interface import Transport


class Arrival(NamedTuple):
    """Arguments of a wait for packets, for its failure record.

    Attributes:
        epoch: Epoch of the call.
        bound: Limit of the wait.
        site: Place of the wait for rank 0.
    """

    epoch: Scalar
    bound: Any
    site: Any


@dataclass(frozen=True)
class LL(Transport):
    """Data that is its own flag (:mod:`overlap_gemm.device.ll_words`): one trip, no flag after it.

    For few rows, where an exchange takes as long as its trips. The comm warp stores the packets itself, and
    is busy with them; a bulk store takes one instruction.
    """

    @cute.jit
    def put(self, route: Route, offset: Address, stage: cute.Tensor, num_bytes: Scalar) -> None:
        """Stores a stage's first bytes; all lanes of a warp."""
        chunk = CHUNK_BYTES * 8 // stage.element_type.width
        source = cute.zipped_divide(stage, (chunk,))
        address = route.peers[route.owner] + route.slot + offset
        for i in cutlass.range_constexpr(cute.ceil_div(cute.size(source, mode=[1]), LANES)):
            at = Int32(i * LANES) + cute.arch.lane_idx()
            if at * CHUNK_BYTES < num_bytes:
                values = cute.make_rmem_tensor(chunk, stage.element_type)
                cute.autovec_copy(source[(None, at)], values)
                store_words(address + at * CHUNK_BYTES, cute.recast_tensor(values, Uint32))

    @cute.jit
    def store(self, peers: Any, peer: Scalar, offset: Address, values: cute.Tensor) -> None:
        """Stores a chunk of 16 bytes at ``offset`` in the workspace of ``peer``; one thread."""
        assert cute.size(values) * values.element_type.width // 8 == CHUNK_BYTES
        store_words(peers[peer] + offset, cute.recast_tensor(values, Uint32))

    def drain(self, ring: Any, sender: Any) -> None:
        """Sends every tile of the ring, all lanes; nothing is published."""
        ring.drain_by_warp(ring.consumer_state(), sender.config.subtiles, sender)

    @cute.jit
    def send_and_store(self, send: cutlass.Constexpr, store: cutlass.Constexpr) -> None:
        """Sends a subtile, all lanes; the first one stores it, and waits until the stage has been read."""
        if cute.arch.lane_idx() == 0:
            store()
            cute.arch.cp_async_bulk_commit_group()
        send()
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def looks_up_in(self, peer_table: Any) -> None:
        """Returns None: no thread acquires, so the table stays in the L1 cache."""

    def publish_unit(self, publish: Callable[[], None]) -> None:
        """Does nothing: packets contain their flag."""

    def pad(self, store: Callable[[], None]) -> None:
        """Stores places outside the output, too: a unit is awaited with all its packets."""
        store()

    def await_partials(self, call: Any, op: Any, tile: Scalar) -> None:
        """Does nothing: partials are awaited when they are taken."""

    def await_result(
        self, call: Any, op: Any, flag: Scalar, tile: Scalar, source: Scalar, waits: int = 1
    ) -> None:
        """Does nothing: results are awaited when they are taken."""

    def load(self, address: Address, values: Fragment) -> None:
        """Loads a chunk, whether or not it has arrived."""
        load_words(address, cute.recast_tensor(values, Uint32))

    def arrival(self, call: Any, op: Any, role: Any, tile: Scalar, waits: int = 1) -> Arrival:
        """Returns the arguments of a lane's wait for ``tile``."""
        site = call.site(op, role, tile, 0, tile * call.exchange.world)
        return Arrival(call.epoch, call.bound.times(waits), site)

    def take(
        self,
        arrival: Arrival,
        addresses: Callable[[], Sequence[Any]],
        values: cute.Tensor,
        sources: Sequence[Any],
    ) -> None:
        """Waits until the chunks that `load` has loaded have arrived; then resets their places."""
        words = cute.recast_tensor(values, Uint32)
        take_words(tuple(addresses()), words, tuple(sources), *arrival)
