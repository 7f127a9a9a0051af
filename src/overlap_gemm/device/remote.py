"""Memory of the ranks, as references; addresses of other ranks are formed in this module alone.

All ranks have workspaces of one layout (:mod:`overlap_gemm.exchange.geometry`). So a byte offset from the
workspace's base denotes the same place on every rank: NVSHMEM's *symmetric address*. A reference has such an
offset and a rank, as Pallas' remote references do::

    slots = call.slots(config, tiles)  # region of slots: [source][tile]
    slot = call.memory.remote(owner).at[slots[rank, tile]]  # at the owner
    transport.put(slot.at[offset], stage, num_bytes)
    transport.signal(call.memory.remote(owner).at[call.flags[tile, rank]], epoch)

A reference does not determine how its rank is reached: the transport does. The address is formed where it is
used, since few roles have registers to keep it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from overlap_gemm.device.traced import Address, Predicate, Scalar


class SymmetricWorkspace(NamedTuple):
    """Workspaces of all ranks, as this rank reaches them.

    Attributes:
        peers: ``Int64[world]``: base address of every rank's workspace in this rank's address space;
            ``-1 - pe``, with the NVSHMEM PE number, for a rank without P2P access.
        rank: This rank.
        world: Number of ranks.
        base: ``Int64``: base address of this rank's workspace.
    """

    peers: Any
    rank: Scalar
    world: Scalar
    base: Address

    @staticmethod
    def of(peers: Any, rank: Scalar, world: Scalar) -> SymmetricWorkspace:
        """Returns the workspaces at ``peers``, with the base of this rank's loaded from there."""
        return SymmetricWorkspace(peers, rank, world, peers[rank])

    @property
    def local(self) -> Ref:
        """Returns a reference to the start of this rank's workspace."""
        return Ref(self, None, 0, 0)

    def remote(self, rank: Scalar) -> Ref:
        """Returns a reference to the start of the workspace of ``rank``, which may be this rank."""
        return Ref(self, rank, 0, 0)


class Ref(NamedTuple):
    """Reference to a place in the workspace of one rank.

    Attributes:
        memory: Workspaces of all ranks.
        rank: Rank whose memory it is; None: this rank's, by `SymmetricWorkspace.base`.
        offset: Byte offset from the workspace's base.
        staging: Byte offset, in this rank's workspace, of the data to be put there if the rank has no P2P
            access. As a rule it equals ``offset``.
        local_address: Address of this rank's place in a `stepwise` reference, else None.
    """

    memory: SymmetricWorkspace
    rank: Scalar
    offset: Address
    staging: Address
    local_address: Any = None

    @property
    def at(self) -> At:
        """Returns an object whose subscript is a byte offset from this reference: ``ref.at[offset]``."""
        return At(self)

    def remote(self, rank: Scalar) -> Ref:
        """Returns a reference to the same place of another rank."""
        return self._replace(rank=rank, local_address=None)

    @property
    def stepwise(self) -> Ref:
        """Returns this local reference, to whose address subscripts are added one by one.

        For references of loops: with the subscripts' sum a compiler keeps more registers, and a gather of
        three matrices along N spilled.
        """
        return self._replace(local_address=self.address)

    def staged(self, local: Ref) -> Ref:
        """Returns this reference, with its data staged at ``local`` for a rank without P2P access."""
        return self._replace(staging=local.offset)

    @property
    def address(self) -> Any:
        """Returns the address, ``Int64``, of a P2P-accessible rank's memory."""
        if self.local_address is not None:
            return self.local_address
        base = self.memory.base if self.rank is None else self.memory.peers[self.rank]
        return base + self.offset

    @property
    def has_p2p(self) -> Predicate:
        """Returns whether the rank is P2P-accessible."""
        return self.memory.peers[self.rank] >= 0

    @property
    def pe(self) -> Any:
        """Returns the NVSHMEM PE number, ``Int32``, of a rank without P2P access."""
        return Int32(-1 - self.memory.peers[self.rank])

    @property
    def symmetric_address(self) -> Any:
        """Returns the address of the same place in this rank's workspace, by which NVSHMEM denotes it."""
        return self.memory.base + self.offset

    @property
    def staging_address(self) -> Any:
        """Returns the local address of the data for a rank without P2P access."""
        return self.memory.base + self.staging


@dataclass(frozen=True)
class At:
    """Subscript of a reference."""

    ref: Ref

    def __getitem__(self, offset: Address) -> Ref:
        """Returns the reference ``offset`` bytes further on."""
        ref = self.ref
        local = None if ref.local_address is None else ref.local_address + offset
        return Ref(ref.memory, ref.rank, ref.offset + offset, ref.staging + offset, local)


@cute.jit
def reachable_address(ref: Ref) -> Any:
    """Returns the address of a P2P-accessible rank's memory, or that of the staged data for another rank."""
    address = ref.address
    if not ref.has_p2p:
        address = ref.staging_address
    return address


@cute.jit
def copy_table(peers: cute.Tensor, peer_table: cute.Tensor) -> None:
    """Copies the ranks' addresses to shared memory; all threads of a CTA, before its barrier.

    Each acquire at system scope invalidates the L1 cache. From global memory, each store to a peer would
    first need a load from L2.
    """
    thread, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    for i in cutlass.range(thread, cute.size(peers), threads, unroll=1):
        peer_table[i] = peers[i]
