"""Transport ``nvshmem``: stores to P2P-accessible peers, NVSHMEM puts to the others.

A tile for a peer without P2P access is collected in this rank's workspace (stores, full wait). Then it is put
from there, together with its signal. A tile for one owner has a place in the staging buffer. A tile for every
rank is put from this rank's own slot, which has the same place at every rank.

There are two of both places, for even and odd epochs, so no quiet is needed. This rank writes a tile of call
``e + 2`` after its call ``e + 1``. That call waited until every peer had entered it. No rank ends call ``e``
before all puts to it in that call have arrived. So all puts of call ``e`` have read their source.

Puts are issued by the publishing lane (`Nvshmem`), or by a relay kernel (`Staged`). The first is for sm_100
only: out-of-line NVSHMEM calls make ptxas drop ``setmaxnreg`` and serialise wgmma in the entire kernel. The
workspace must be NVSHMEM memory, and a kernel that puts initialised with NVSHMEM's ``library_init``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from overlap_gemm.device.flags import EPOCH_BITS, EPOCH_MASK, raise_flag, release_flag
from overlap_gemm.device.memory import LANES, bulk_store, global_pointer, store_run
from overlap_gemm.device.route import Route
from overlap_gemm.device.traced import Address, Fragment, Predicate, Scalar
from overlap_gemm.transports.interface import Transport, store_in_turn

SIGNAL_SET = 9
"""``NVSHMEM_SIGNAL_SET``; additions may leave the NVLink path even to a near peer (NVSHMEM issue 7)."""


STAGED_UNIT = 16
"""Unit in bytes of the size of a staged tile, which its local flag has above the epoch."""


@dataclass(frozen=True)
class _Puts(Transport):
    """Base of transports that put to peers without P2P access, from this rank's workspace."""

    @cute.jit
    def put(self, route: Route, offset: Int64, stage: cute.Tensor, num_bytes: Int32) -> None:
        """Starts one bulk store, into the owner's slot or into staging; the caller commits and waits."""
        peer = route.peers[route.owner]
        address = peer + route.slot
        if peer < 0:
            address = route.staging
        bulk_store(stage, address + offset, num_bytes)

    @abstractmethod
    def publish(self, route: Route, num_bytes: Scalar, epoch: Scalar, fenced: bool = False) -> None:
        """Releases the tile's flag at its owner; see `Transport.publish`."""

    @abstractmethod
    def signal(self, peers: Any, rank: Scalar, peer: Scalar, offset: Address, value: Any) -> None:
        """Releases ``value`` in a flag of ``peer``; see `Transport.signal`."""

    @cute.jit
    def store(self, peers: cute.Tensor, peer: Int32, offset: Int64, values: cute.Tensor) -> None:
        """Stores at ``offset`` in the workspace of ``peer`` if it is P2P-accessible."""
        if peers[peer] >= 0:
            store_run(peers[peer] + offset, values)

    def num_recipients(self, world: Scalar, itself: bool) -> Any:
        """Returns all ranks, this one always included: tiles are put from its slot to the others."""
        return world

    @cute.jit
    def put_to_each(self, route: Route, offset: Int64, stage: cute.Tensor, num_bytes: Int32) -> None:
        """Starts moving a tile to a P2P-accessible rank; others get it from the local slot when complete."""
        if route.peers[route.owner] >= 0:
            self.put(route, offset, stage, num_bytes)

    def store_to_all(self, exchange: Any, offset: Address, values: Fragment) -> None:
        """Stores in every workspace, at last in this rank's, from which the chunk may be put."""
        store_in_turn(self, exchange, offset, values, exchange.world)

    @cute.jit
    def if_absent(self, exists: Predicate, act: cutlass.Constexpr) -> None:
        """Calls ``act`` for a unit that does not exist: the relay and its receivers wait for every flag."""
        if not exists:
            act()

    @cute.jit
    def await_pieces(self, pieces: Int32, wait: cutlass.Constexpr) -> None:
        """Waits for each piece's flag; all lanes."""
        for piece in cutlass.range(cute.arch.lane_idx(), pieces, LANES, unroll=1):
            wait(piece)

    def loads_in_flight(self, returns: bool) -> int:
        """Returns 4 if sums return: puts are the limit, and with 8 loads the kernels spill on sm_90a."""
        return 4 if returns else super().loads_in_flight(returns)


@dataclass(frozen=True)
class Staged(_Puts):
    """The GEMM's part if it must not call NVSHMEM: a relay kernel puts staged data.

    P2P-accessible peers are written to as by ``PeerBulk``. For the others a tile ends in this rank's
    workspace and its local flag; the relay kernel (``exchange/relay.py``) waits for that flag and puts.
    """

    @cute.jit
    def publish(
        self, route: Route, num_bytes: Int32, epoch: Uint64, fenced: cutlass.Constexpr = False
    ) -> None:
        """Releases the tile's flag at its owner; without P2P access, the local one that the relay awaits.

        The local flag has the number of bytes to put above the epoch (`STAGED_UNIT`).
        """
        peer = route.peers[route.owner]
        address = peer + route.flag
        if peer < 0:
            address = route.staged
        units = Uint64(cutlass.max(num_bytes, 0) // STAGED_UNIT)
        _tell(address, (epoch & EPOCH_MASK) | (units << EPOCH_BITS), fenced)

    @cute.jit
    def signal(self, peers: cute.Tensor, rank: Int32, peer: Int32, offset: Int64, value: Uint64) -> None:
        """Releases ``value`` in the flag at ``offset`` of ``peer``'s workspace, or where the relay waits."""
        base = peers[peer]
        if base < 0:
            base = peers[rank]
        release_flag(base + offset, value)


@dataclass(frozen=True)
class Nvshmem(_Puts):
    """Transport chosen per peer by ``peers[peer]``: an address is written to, ``-1 - pe`` is put to.

    A put is in thread scope: one lane publishes, and to a peer without P2P access a put is one descriptor.
    It is also the put of the relay kernel, there by a full warp.
    """

    def __post_init__(self) -> None:
        """Loads the device bindings before a kernel is traced, so that the DSL links their library."""
        import nvshmem.core.device.cute  # noqa: F401

    @cute.jit
    def publish(
        self, route: Route, num_bytes: Int32, epoch: Uint64, fenced: cutlass.Constexpr = False
    ) -> None:
        """Releases the tile's flag; without P2P access, puts the staged tile and its flag."""
        import nvshmem.core.device.cute as nv

        peer = route.peers[route.owner]
        if peer >= 0:
            _tell(peer + route.flag, epoch, fenced)
        elif num_bytes <= 0:
            self.signal(route.peers, route.rank, route.owner, route.flag, epoch)
        else:
            _put_staged(nv.put_signal_nbi, route, num_bytes, epoch)

    @cute.jit
    def relay(self, route: Route, num_bytes: Int64, epoch: Uint64) -> None:
        """Puts staged data and its flag; the flag alone if nothing is staged; all threads of a warp."""
        import nvshmem.core.device.cute as nv

        if num_bytes > 0:
            _put_staged(nv.put_signal_nbi_warp, route, num_bytes, epoch)
        elif cute.arch.lane_idx() == 0:
            self.signal(route.peers, route.rank, route.owner, route.flag, epoch)

    @cute.jit
    def staged_bytes(self, staged: Int64) -> Int64:
        """Returns the bytes to put for the flag at ``staged``; after the wait for it."""
        flag = cute.arch.load(
            global_pointer(Uint64, staged, Uint64.width // 8), Uint64, sem="relaxed", scope="sys"
        )
        return Int64(Uint64(flag) >> EPOCH_BITS) * STAGED_UNIT

    @cute.jit
    def signal(self, peers: cute.Tensor, rank: Int32, peer: Int32, offset: Int64, value: Uint64) -> None:
        """Releases ``value`` in the flag at ``offset`` in the workspace of ``peer``, or signals it."""
        import nvshmem.core.device.cute as nv

        base = peers[peer]
        if base >= 0:
            release_flag(base + offset, value)
        else:
            # A signal alone orders nothing; after this fence it releases what this thread has observed.
            cute.arch.fence_acq_rel_sys()
            nv.signal_op(_word(peers[rank] + offset), Uint64(value), SIGNAL_SET, Int32(-1 - base))


@cute.jit
def _tell(address: Int64, word: Scalar, fenced: cutlass.Constexpr) -> None:
    """Raises a flag for what this thread has seen, unless a fence before it already releases that."""
    if cutlass.const_expr(fenced):
        raise_flag(address, word)
    else:
        release_flag(address, word)


def _put_staged(put: Any, route: Route, num_bytes: Scalar, epoch: Scalar) -> None:
    """Puts the staged part of a tile to its owner, and its flag, by one of the bindings' ``put_signal``."""
    local_base, peer = route.peers[route.rank], route.peers[route.owner]
    words = _words(local_base + route.slot, num_bytes), _words(route.staging, num_bytes)
    put(*words, _word(local_base + route.flag), Uint64(epoch), SIGNAL_SET, Int32(-1 - peer))


def _words(address: Address, num_bytes: Scalar) -> Any:
    """Returns ``num_bytes`` of symmetric memory as 32-bit words, in the bindings' natural alignment."""
    return cute.make_tensor(global_pointer(Uint32, address, 4), cute.make_layout(num_bytes // 4))


def _word(address: Address) -> Any:
    return cute.make_tensor(global_pointer(Uint64, address, 8), cute.make_layout(1))
