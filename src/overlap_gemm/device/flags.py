"""Flags between ranks: release, and a bounded wait that acquires.

A flag is a word of 64 bits, as NVSHMEM's signals are. All accesses have its full width, since the memory
model guarantees nothing if accesses of two widths race ("mixed-size data races"). Its low `EPOCH_BITS` are a
monotonic epoch, never reset; the writer may use the other bits. A flag counts as raised if its epoch is 0 to
2**47 - 1 ahead of the expected one: 20 years of calls of 5 us. With 32 bits a flag that is not raised for
2**31 calls, a few hours of them, would count as raised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int64, Uint32, Uint64, cute

from overlap_gemm.device.failure import FailureSite
from overlap_gemm.device.memory import global_pointer
from overlap_gemm.device.traced import Address, Scalar


class WaitBound(NamedTuple):
    """Limit of every wait on a peer, and the destination of its failure record.

    Attributes:
        timeout_ns: ``Int64``: limit in ns; 0 waits for ever.
        record: ``Int64`` address of a zeroed failure record (pinned host memory), see :mod:`device.failure`.
        claim: ``Int64`` address of a zeroed ``uint32`` in device memory: the first lane to expire writes the
            record.
    """

    timeout_ns: Any
    record: Any
    claim: Any

    def times(self, waits: int) -> WaitBound:
        """Returns ``waits`` times the limit, for a source that may itself wait for others first.

        So the record names the rank that is missing, not a rank that waits for it.
        """
        return self._replace(timeout_ns=self.timeout_ns * waits)


EPOCH_BITS = 48
"""Bits of the epoch in a flag."""

EPOCH_MASK = (1 << EPOCH_BITS) - 1

IDENTITY_BITS = 32
"""Bits of an epoch in an identity (`wait_identity`): enough if it is at most a few ahead."""


@cute.jit
def release_flag(address: Int64, value: Any) -> None:
    """Stores ``value`` by ``st.release.sys``: its acquirer sees everything that this thread has seen.

    After bulk stores, call it only after a full ``wait_group`` (never ``.read``) of the same thread.
    """
    cute.arch.store(_pointer(address), Uint64(value), sem="release", scope="sys")


def release_fence() -> None:
    """Executes ``fence.acq_rel.sys``: flags raised later (`raise_flag`) release what this thread has seen.

    For flags at several peers: each `release_flag` waits for the stores before it, and so for the trip of the
    preceding flag. After bulk stores, call it only after a full ``wait_group``, as `release_flag`.
    """
    cute.arch.fence_acq_rel_sys()


@cute.jit
def raise_flag(address: Int64, value: Any) -> None:
    """Stores ``value`` by ``st.relaxed.sys``, after a `release_fence`."""
    cute.arch.store(_pointer(address), Uint64(value), sem="relaxed", scope="sys")


@cute.jit
def wait_flag(address: Int64, target: Address, bound: WaitBound, site: FailureSite) -> None:
    """Waits until the flag at ``address`` has reached ``target`` (modular ``>=``); acquires it (``.sys``).

    Spins on relaxed loads and acquires once: on sm_90 and sm_100 every acquire load also invalidates the L1
    cache.

    Args:
        address: ``Int64`` address of the flag in this rank's own memory.
        target: Epoch to wait for.
        bound: Time limit and failure record.
        site: Place of the wait, for the record.
    """
    flag, target = _pointer(address), Uint64(target)
    seen = _look(flag)
    if _is_before(seen, target, EPOCH_BITS):
        start = cute.arch.globaltimer()
        while _is_before(seen, target, EPOCH_BITS):
            seen = _look(flag)
            if bound.timeout_ns > 0 and cute.arch.globaltimer() - start > bound.timeout_ns:
                fail(bound, site, target & EPOCH_MASK, seen & EPOCH_MASK)
                start = cute.arch.globaltimer()  # another lane was first: its trap ends the launch
    _acquire(flag)


@cute.jit
def wait_identity(address: Int64, identity: Uint64, bound: WaitBound, site: FailureSite) -> None:
    """Waits until the word at ``address`` is ``identity``; acquires it, as `wait_flag`.

    An identity is the low half of an epoch, compared modularly, and a signature above it. If the epoch
    arrives with another signature, the wait fails at once.
    """
    flag = _pointer(address)
    seen = _look(flag)
    if seen != identity:
        start = cute.arch.globaltimer()
        while seen != identity:
            seen = _look(flag)
            late = bound.timeout_ns > 0 and cute.arch.globaltimer() - start > bound.timeout_ns
            if seen != identity and (late or not _is_before(seen, identity, IDENTITY_BITS)):
                fail(bound, site, identity, seen)
                start = cute.arch.globaltimer()
    _acquire(flag)


def _look(flag: Scalar) -> Any:
    return Uint64(cute.arch.load(flag, Uint64, sem="relaxed", scope="sys"))


def _is_before(seen: Any, target: Address, bits: int) -> Any:
    """Returns whether an epoch of ``bits`` bits is less than another; bits above them are ignored."""
    return Int64((seen - target) << (64 - bits)) < 0


@cute.jit
def fail(bound: WaitBound, site: FailureSite, expected: Uint64, seen: Uint64) -> None:
    """Writes the record and traps, if this lane is the first of the launch; else returns."""
    claim = global_pointer(Uint32, bound.claim, 4)
    if cute.arch.atomic_cas(claim, cmp=Uint32(0), val=Uint32(1), sem="relaxed", scope="gpu") == 0:
        halves = (expected, expected >> 32, seen, seen >> 32)
        words = (site.rank, site.op, site.role, site.tile, site.source, site.index, *halves)
        for i in cutlass.range_constexpr(len(words)):
            cute.arch.store(global_pointer(Uint32, bound.record + 4 * (i + 1), 4), Uint32(words[i]))
        cute.arch.store(global_pointer(Uint32, bound.record, 4), Uint32(1), sem="release", scope="sys")
        trap()


def _pointer(address: Address) -> Any:
    return global_pointer(Uint64, address, 8)


def _acquire(flag: Scalar) -> None:
    """Acquires by one load at system scope. It is PTX, since the DSL drops a load with an unused value."""
    cute.arch.inline_ptx(
        "ld.acquire.sys.global.b64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[flag]
    )


def trap() -> None:
    """Aborts the launch (PTX ``trap``): the host sees a launch failure at the next synchronisation."""
    cute.arch.inline_ptx("trap;")
