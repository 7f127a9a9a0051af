"""Transport ``ll_bulk``: bulk stores of words that are their own flag.

As ``ll`` (:mod:`overlap_gemm.transports.ll`), but that one lane sends a subtile by one bulk store, as
``peer_bulk`` does, and no flag follows: no release waits for the link's queue, and sums begin with the first
words.

No word of a stage is `EMPTY`: stages hold sums that were rounded from fp32, and that rounding makes one NaN,
0x7fff (PTX ISA, ``cvt``), of 16 bits.

**Not covered by the memory model**: PTX has no rule for ordinary loads of what an asynchronous store is
writing, and the emulator reports them as races. It is assumed that a word of 32 bits arrives as a whole,
which is what the reader needs (`device.ll`): each word is waited for by itself. So it is for trials, by name;
one GPU has answered, whose ranks are virtual: no word was torn (tests/gpu/test_ll_bulk.py).

What reading finds to be in order: polling loads are ``ld.relaxed.sys``, which no L1 answers, as `ll`'s that
have run on four GPUs; places are emptied by ordinary stores, and the lane that starts a later call's bulk
stores fences the asynchronous proxy after the rule of :mod:`overlap_gemm.kernels.call`; the comm lane waits
for no peer, and for all its stores before it ends; what is sent of a ragged tile are whole units, which are
taken as such; each wait for a word is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from overlap_gemm.device.memory import bulk_store
from overlap_gemm.device.route import Route
from overlap_gemm.device.traced import Address, Scalar
from overlap_gemm.transports.base import Transport
from overlap_gemm.transports.ll import LL


@dataclass(frozen=True)
class LLBulk(LL):
    """Sends as `PeerBulk`, is received as `LL`; the sums that return in a two-shot are `LL`'s stores."""

    def put(self, route: Route, offset: Address, stage: Any, num_bytes: Scalar) -> None:
        """Starts one bulk store of a stage's first bytes; the calling thread commits and waits."""
        bulk_store(stage, route.peers[route.owner] + route.slot + offset, num_bytes)

    def publish(self, route: Route, num_bytes: Scalar, epoch: Scalar, fenced: bool = False) -> None:
        """Nothing to tell."""

    def drain(self, ring: Any, sender: Any) -> None:
        """The first lane sends."""
        Transport.drain(self, ring, sender)

    def send_and_store(self, send: Callable[[], None], store: Callable[[], None]) -> None:
        """Both by one lane."""
        Transport.send_and_store(self, send, store)

    def loads_in_flight(self, returns: bool) -> int:
        """Words of large tiles are polled by warps with few registers: with more under way they spill."""
        return 4 if returns else super().loads_in_flight(returns)

    def copies_in_flight(self, chunks: int) -> int:
        """Likewise."""
        return min(4, chunks)
