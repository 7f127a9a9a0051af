"""Transport ``ll``: LL packets (:mod:`overlap_gemm.device.ll_words`) by ordinary stores to peers' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from overlap_gemm.device.ll_words import load_words, store_words, take_words
from overlap_gemm.device.memory import CHUNK_BYTES, LANES
from overlap_gemm.device.remote import Ref
from overlap_gemm.device.traced import Address, Fragment, Scalar
from overlap_gemm.transports.interface import Transport


class Arrival(NamedTuple):
    """Arguments of a wait for packets.

    Attributes:
        epoch: Epoch of the call, for the failure record.
        bound: Limit of the wait.
        site: Site of a wait for rank 0, for the failure record.
    """

    epoch: Scalar
    bound: Any
    site: Any


@dataclass(frozen=True)
class LL(Transport):
    """Transport by LL packets: data is its own flag, so a tile takes one trip.

    For few rows, where the trips take most of an exchange's time. All lanes of the comm warp store the
    packets, which keeps them busy; a bulk store is one instruction. Values have 16 bits; a packet is as large
    as its data.

    A 32-bit word has arrived when it is not `EMPTY` (all ones). The reader stores `EMPTY` again. Two NaNs of
    all ones are replaced by other NaNs. The caller orders the reuse of a slot (`exchange.call`).
    """

    @cute.jit
    def put(self, target: Ref, stage: cute.Tensor, num_bytes: Scalar) -> None:
        """Stores a stage's first bytes as packets in the tile's slot; all lanes of a warp, without a wait."""
        chunk = CHUNK_BYTES * 8 // stage.element_type.width
        source = cute.zipped_divide(stage, (chunk,))
        address = target.address
        for i in cutlass.range_constexpr(cute.ceil_div(cute.size(source, mode=[1]), LANES)):
            at = Int32(i * LANES) + cute.arch.lane_idx()
            if at * CHUNK_BYTES < num_bytes:
                values = cute.make_rmem_tensor(chunk, stage.element_type)
                cute.autovec_copy(source[(None, at)], values)
                store_words(address + at * CHUNK_BYTES, cute.recast_tensor(values, Uint32))

    @cute.jit
    def store(self, target: Ref, values: cute.Tensor) -> None:
        """Stores a chunk of 16 bytes as packets in the memory of a rank; one thread."""
        assert cute.size(values) * values.element_type.width // 8 == CHUNK_BYTES
        store_words(target.address, cute.recast_tensor(values, Uint32))

    def drain(self, ring: Any, sender: Any) -> None:
        """Sends every tile of the ring by all lanes of the comm warp; there are no flags to publish."""
        ring.drain_by_warp(ring.consumer_state(), sender.config.subtiles, sender)

    @cute.jit
    def send_and_store(self, send: cutlass.Constexpr, store: cutlass.Constexpr) -> None:
        """Sends a subtile by all lanes. The first lane stores it by TMA, and waits until that is complete."""
        if cute.arch.lane_idx() == 0:
            store()
            cute.arch.cp_async_bulk_commit_group()
        send()
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def select_peer_table(self, peer_table: Any) -> None:
        """Returns None, for no copy: no thread acquires, so the addresses stay in the L1 cache."""

    def publish_unit(self, publish: Callable[[], None]) -> None:
        """Does nothing: packets are their own flags."""

    def pad(self, store: Callable[[], None]) -> None:
        """Calls ``store``: a receiver awaits all packets of a unit, those outside the output included."""
        store()

    def await_partials(self, call: Any, op: Any, tile: Scalar) -> None:
        """Does nothing: `take` waits for the packets."""

    def await_result(
        self, call: Any, op: Any, flag: Scalar, tile: Scalar, source: Scalar, waits: int = 1
    ) -> None:
        """Does nothing: `take` waits for the packets."""

    def load(self, address: Address, values: Fragment) -> None:
        """Starts the load of a chunk, which may not have arrived."""
        load_words(address, cute.recast_tensor(values, Uint32))

    def arrival(self, call: Any, op: Any, role: Any, tile: Scalar, waits: int = 1) -> Arrival:
        """Returns the arguments of a lane's wait for packets of ``tile``."""
        site = call.site(op, role, tile, 0, tile * call.exchange.world)
        return Arrival(call.epoch, call.bound.times(waits), site)

    def take(
        self,
        arrival: Arrival,
        addresses: Callable[[], Sequence[Any]],
        values: cute.Tensor,
        sources: Sequence[Any],
    ) -> None:
        """Waits until the chunks that `load` has loaded have arrived; stores `EMPTY` at ``addresses``."""
        words = cute.recast_tensor(values, Uint32)
        take_words(tuple(addresses()), words, tuple(sources), *arrival)
