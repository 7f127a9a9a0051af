"""Transport ``nvshmem``: stores to P2P-accessible peers, NVSHMEM puts to the others.

Protocol of a tile for a peer without P2P access: the sender stores it in its own workspace and waits for
completion, then puts data and flag by one ``put_signal``. A tile for one owner is put from the staging
buffer. A tile for every rank is put from this rank's slot, which has the same offset on every rank.

No quiet is needed before the source of a put is overwritten. Calls use two buffers alternately, by parity of
the epoch, so the source of call ``e`` is overwritten in call ``e + 2``. Before, in call ``e + 1``, this rank
has waited for the entry of every peer. A peer enters call ``e + 1`` after it has received all data of call
``e``. So every put of call ``e`` has read its source.

On sm_100 the publishing lane of the GEMM puts (`Nvshmem`). On sm_90 the GEMM stages data (`Staged`) and a
relay kernel puts it: one CTA of 9 warps on a second stream, for whose SM the GEMM leaves one cluster. An
out-of-line NVSHMEM call in a GEMM makes ptxas drop ``setmaxnreg`` and serialise wgmma in the entire kernel.
The workspace is NVSHMEM memory. A kernel that puts must be initialised by NVSHMEM's ``library_init``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64, cute

from overlap_gemm.device.flags import EPOCH_BITS, EPOCH_MASK, raise_flag, release_flag
from overlap_gemm.device.memory import LANES, bulk_store, global_pointer, store_run
from overlap_gemm.device.remote import Ref, reachable_address
from overlap_gemm.device.traced import Address, Fragment, Predicate, Scalar
from overlap_gemm.transports.interface import Transport, store_in_turn

SIGNAL_SET = 9
"""``NVSHMEM_SIGNAL_SET``: stores the signal's value. An addition may leave NVLink even for a P2P-accessible
peer (NVSHMEM issue 7)."""


STAGED_UNIT = 16
"""Unit of the size of a staged tile: 16 bytes. The local flag has the size above the epoch's 48 bits."""


@dataclass(frozen=True)
class _Puts(Transport):
    """Base of the transports that put from this rank's workspace to peers without P2P access."""

    def put(self, target: Ref, stage: cute.Tensor, num_bytes: Int32) -> None:
        """Starts one bulk store, to the owner's slot or to local staging; the thread commits and waits."""
        bulk_store(stage, reachable_address(target), num_bytes)

    @abstractmethod
    def publish(self, slot: Ref, flag: Ref, num_bytes: Scalar, epoch: Scalar, fenced: bool = False) -> None:
        """Releases the tile's flag at its owner, with the staged data if any; see `Transport.publish`."""

    @abstractmethod
    def signal(self, flag: Ref, value: Any) -> None:
        """Releases ``value`` in a flag of a rank; see `Transport.signal`."""

    @cute.jit
    def store(self, target: Ref, values: cute.Tensor) -> None:
        """Stores a chunk in the memory of a rank, if the rank is P2P-accessible."""
        if target.has_p2p:
            store_run(target.address, values)

    def num_recipients(self, world: Scalar, itself: bool) -> Any:
        """Returns ``world``: this rank gets each broadcast tile too, because puts read it from its slot."""
        return world

    @cute.jit
    def put_to_each(self, target: Ref, stage: cute.Tensor, num_bytes: Int32) -> None:
        """Starts the copy of a tile to a P2P-accessible rank. To others it is put from the local slot."""
        if target.has_p2p:
            bulk_store(stage, target.address, num_bytes)

    def store_to_all(self, place: Ref, values: Fragment) -> None:
        """Stores a chunk in every P2P-accessible workspace, this rank's last; the others get it by a put."""
        store_in_turn(self, place, values, place.memory.world)

    @cute.jit
    def if_absent(self, exists: Predicate, act: cutlass.Constexpr) -> None:
        """Calls ``act`` for a unit outside the output: the relay and the receivers wait for every flag."""
        if not exists:
            act()

    @cute.jit
    def await_pieces(self, pieces: Int32, wait: cutlass.Constexpr) -> None:
        """Waits for the flag of each piece by ``wait(piece)``; all lanes of a warp, each for other pieces."""
        for piece in cutlass.range(cute.arch.lane_idx(), pieces, LANES, unroll=1):
            wait(piece)

    def loads_in_flight(self, returns: bool) -> int:
        """Returns 4 if sums return: puts are the limit, and with 8 loads the kernels spill on sm_90a."""
        return 4 if returns else super().loads_in_flight(returns)


@dataclass(frozen=True)
class Staged(_Puts):
    """Part of the GEMM kernel when a relay kernel (``exchange/relay.py``) puts.

    Data for P2P-accessible peers is stored as by ``PeerBulk``. Other data is stored in this rank's workspace,
    and its local flag is released. The relay waits for the flag (acquire), and puts data and flag to the
    owner.
    """

    def publish(self, slot: Ref, flag: Ref, num_bytes: Int32, epoch: Uint64, fenced: bool = False) -> None:
        """Releases the tile's flag at its owner, or, without P2P access, the local flag for the relay.

        The local flag has the number of bytes to put above the epoch, in units of `STAGED_UNIT`.
        """
        units = Uint64(cutlass.max(num_bytes, 0) // STAGED_UNIT)
        _store_flag(reachable_address(flag), (epoch & EPOCH_MASK) | (units << EPOCH_BITS), fenced)

    def signal(self, flag: Ref, value: Uint64) -> None:
        """Releases ``value`` in a flag of a rank, or in the staged flag for the relay."""
        release_flag(reachable_address(flag), value)


@dataclass(frozen=True)
class Nvshmem(_Puts):
    """Transport of a GEMM whose publishing lane puts (`publish`), and of the relay kernel (`relay`).

    Data is stored in the memory of P2P-accessible ranks, and put to the others.
    One lane puts in thread scope, since a remote put is one descriptor. The relay puts by a full warp.
    """

    def __post_init__(self) -> None:
        """Imports the device bindings before a kernel is traced, so that the DSL links their library."""
        import nvshmem.core.device.cute  # noqa: F401

    @cute.jit
    def publish(
        self, slot: Ref, flag: Ref, num_bytes: Int32, epoch: Uint64, fenced: cutlass.Constexpr = False
    ) -> None:
        """Releases the tile's flag, or, without P2P access, puts the staged tile with its flag; one lane."""
        import nvshmem.core.device.cute as nv

        if flag.has_p2p:
            _store_flag(flag.address, epoch, fenced)
        elif num_bytes <= 0:
            self.signal(flag, epoch)
        else:
            _put_staged(nv.put_signal_nbi, slot, flag, num_bytes, epoch)

    @cute.jit
    def relay(self, slot: Ref, flag: Ref, num_bytes: Int64, epoch: Uint64) -> None:
        """Puts staged data with its flag, or the flag alone if ``num_bytes`` is not positive; a full warp."""
        import nvshmem.core.device.cute as nv

        if num_bytes > 0:
            _put_staged(nv.put_signal_nbi_warp, slot, flag, num_bytes, epoch)
        elif cute.arch.lane_idx() == 0:
            self.signal(flag, epoch)

    @cute.jit
    def staged_bytes(self, staged: Ref) -> Int64:
        """Returns the number of bytes to put, from the local flag at ``staged``, which has been awaited."""
        flag = cute.arch.load(
            global_pointer(Uint64, staged.address, Uint64.width // 8), Uint64, sem="relaxed", scope="sys"
        )
        return Int64(Uint64(flag) >> EPOCH_BITS) * STAGED_UNIT

    @cute.jit
    def signal(self, flag: Ref, value: Uint64) -> None:
        """Releases ``value`` in a flag of a rank: a store or a signal."""
        import nvshmem.core.device.cute as nv

        if flag.has_p2p:
            release_flag(flag.address, value)
        else:
            # A signal alone orders nothing; after this fence it releases what this thread has observed.
            cute.arch.fence_acq_rel_sys()
            nv.signal_op(_word(flag.symmetric_address), Uint64(value), SIGNAL_SET, flag.pe)


@cute.jit
def _store_flag(address: Int64, word: Scalar, fenced: cutlass.Constexpr) -> None:
    """Stores a flag: relaxed if ``fenced`` (the thread has executed a release fence), else by a release."""
    if cutlass.const_expr(fenced):
        raise_flag(address, word)
    else:
        release_flag(address, word)


def _put_staged(put: Any, slot: Ref, flag: Ref, num_bytes: Scalar, epoch: Scalar) -> None:
    """Puts a tile's staged bytes with its flag to its owner, by ``put``, a ``put_signal`` of the bindings."""
    words = _words(slot.symmetric_address, num_bytes), _words(slot.staging_address, num_bytes)
    put(*words, _word(flag.symmetric_address), Uint64(epoch), SIGNAL_SET, slot.pe)


def _words(address: Address, num_bytes: Scalar) -> Any:
    """Returns ``num_bytes`` of symmetric memory at ``address`` as 32-bit words."""
    return cute.make_tensor(global_pointer(Uint32, address, 4), cute.make_layout(num_bytes // 4))


def _word(address: Address) -> Any:
    return cute.make_tensor(global_pointer(Uint64, address, 8), cute.make_layout(1))
