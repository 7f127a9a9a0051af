"""Transport ``ll``: ordinary stores into a peer's mapped memory, of words that are their own flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from overlap_gemm.device.ll import store_words
from overlap_gemm.device.memory import CHUNK_BYTES, LANES
from overlap_gemm.device.route import Route
from overlap_gemm.transports.within_reach import WithinReach


@dataclass(frozen=True)
class LL(WithinReach):
    """Data that arrives by itself (:mod:`overlap_gemm.device.ll`): one way, no flag after it.

    For few rows, where an exchange takes as long as its trips. The stores are the comm warp's own, so it is
    busy with them, where a bulk store takes one instruction.
    """

    words = True
    multicast = False

    @cute.jit
    def put(self, route: Route, offset: Any, stage: cute.Tensor, num_bytes: Any) -> None:
        """All lanes of a warp: store a stage's first bytes."""
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
    def store(self, peers: Any, peer: Any, offset: Any, values: cute.Tensor) -> None:
        """One thread stores a chunk of 16 bytes at ``offset`` in the workspace of ``peer``."""
        assert cute.size(values) * values.element_type.width // 8 == CHUNK_BYTES
        store_words(peers[peer] + offset, cute.recast_tensor(values, Uint32))
