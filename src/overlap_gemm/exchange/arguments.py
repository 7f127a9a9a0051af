"""The run-time arguments of an op that exchanges tiles with peers."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, Int64, cute


class Exchange(NamedTuple):
    """Run-time arguments of an op that exchanges tiles.

    Attributes:
        peers: ``Int64[world]``: workspace base address of every rank in this rank's address space; this
            rank's at ``rank``. A peer that is not P2P-accessible has ``-1 - pe`` instead, from its NVSHMEM PE
            number (transport ``nvshmem``).
        rank: ``Int32``: this rank.
        world: ``Int32``: number of ranks.
        shard_rows: ``Int32``: rows of a full shard, see :mod:`overlap_gemm.spec.sharding`; columns if shards
            are cut along the columns (`ExchangeShape.is_by_columns`).
        slots_offset: ``Int64``: bytes from the base to the slot buffer of even epochs.
        buffer_bytes: ``Int64``: bytes from there to the slot buffer of odd epochs; fixed by the workspace.
        timeout_ns: ``Int64``: limit of every wait on a peer in ns, 0 for none.
        record: ``Int64``: address of the failure record.
        call_word: ``Int64``: address of this device's "in call" word, a ``uint32`` that is 0 between calls.
        call: ``Int32``: this launch's number, not 0; no two launches that could overlap have the same.
        signature: ``Int32``: digest of the facts that the ranks' calls must have in common, all bits of it;
            compared by `exchange.call.await_entry`.
    """

    peers: cute.Tensor
    rank: Int32
    world: Int32
    shard_rows: Int32
    slots_offset: Int64
    buffer_bytes: Int64
    timeout_ns: Int64
    record: Int64
    call_word: Int64
    call: Int32
    signature: Int32

    def of_call(self, call: int, signature: int) -> Exchange:
        """Returns the arguments for a launch's number and signature; in half the host time of `_replace`."""
        return Exchange(*self[:-2], call, signature)
