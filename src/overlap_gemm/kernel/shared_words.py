"""Words of a CTA's shared memory other than stages and barriers: addresses of ranks, counters of warps."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from overlap_gemm.config.rules import MAX_WORLD
from overlap_gemm.device.traced import Scalar


def smem_peer_table(smem: Any) -> cute.Tensor:
    """Allocates shared memory for the ranks' addresses: an ``Int64`` tensor."""
    return smem.allocate_tensor(Int64, cute.make_layout(MAX_WORLD + 1), byte_alignment=8)


class CtaCounters(NamedTuple):
    """Counters of a CTA in shared memory, zeroed by one thread before the CTA's first barrier.

    Attributes:
        taken: Number of units taken by the CTA's warps.
        ended: Number of ended roles that access the workspace (`KernelOp.end`).
    """

    taken: Any
    ended: Any

    @staticmethod
    def at(place: Any) -> CtaCounters:
        """Returns the counters in a word of 8 bytes at ``place``."""
        words = cute.recast_ptr(place, dtype=Int32)
        return CtaCounters(words, words + 1)

    def clear(self) -> None:
        """Zeroes the counters; one thread, before the CTA's barrier."""
        cute.arch.store(self.taken, Int32(0))
        cute.arch.store(self.ended, Int32(0))


@cute.jit
def count(word: Scalar, sem: cutlass.Constexpr = "relaxed") -> Int32:
    """Adds one to a counter, by the warp's first lane; returns the previous value to all lanes.

    ``sem`` is the order of the addition at CTA scope: relaxed to deal units, ``acq_rel`` to count ends.
    """
    value = Int32(0)
    if cute.arch.lane_idx() == 0:
        value = Int32(cute.arch.atomic_add(word, Int32(1), sem=sem, scope="cta"))
    return Int32(cute.arch.shuffle_sync(value, 0))
