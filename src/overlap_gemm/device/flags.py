"""Flags between ranks: a release by the writer, a bounded wait that acquires.

A flag is a 64-bit word, as NVSHMEM's signals are. All accesses have 64 bits: the memory model guarantees
nothing for races of two widths ("mixed-size data races"). The low 48 bits (`EPOCH_BITS`) are an epoch that
only increases and is never reset; the writer may use the others. A flag is raised if its epoch is 0 to
2**47 - 1 ahead of the expected one. So a flag must be raised once in 2**47 calls: 20 years of calls of 5 us.
(An epoch of 32 bits would allow 2**31 calls: 3 hours.)

Each wait is one thread's. Several lanes of a warp may wait for different flags at once. A wait orders only
the thread that executes it: the warp's other lanes may read the data after a warp barrier, which the caller
executes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int64, Uint32, Uint64, cute

from overlap_gemm.device.failure import FailureSite
from overlap_gemm.device.memory import global_pointer
from overlap_gemm.device.traced import Address, Scalar


class WaitBound(NamedTuple):
    """Limit of waits on peers, and the place of the failure record.

    Attributes:
        timeout_ns: ``Int64``: limit in ns; 0: no limit.
        record: ``Int64``: address of a zeroed record in pinned host memory (:mod:`device.failure`).
        claim: ``Int64``: address of a zeroed ``uint32`` in device memory. The lane that sets it writes the
        record.
    """

    timeout_ns: Any
    record: Any
    claim: Any

    def times(self, waits: int) -> WaitBound:
        """Returns the bound with ``waits`` times the limit, for a source that itself waits for other ranks.

        So if a rank is missing, the wait for that rank expires first. Waits for the ranks that it delays are
        longer.
        """
        return self._replace(timeout_ns=self.timeout_ns * waits)


EPOCH_BITS = 48
"""Number of low bits of a flag that hold the epoch."""

EPOCH_MASK = (1 << EPOCH_BITS) - 1

IDENTITY_BITS = 32
"""Number of low bits of an identity (`wait_identity`) that hold an epoch.

An epoch 0 to 2**31 - 1 ahead of the expected one counts as arrived or later; any other as not yet arrived."""


@cute.jit
def release_flag(address: Int64, value: Any) -> None:
    """Stores ``value`` at ``address`` by ``st.release.sys``; one thread.

    A thread that acquires the flag observes everything that this thread has observed. After bulk stores the
    thread first waits for their completion: a full ``wait_group``, never ``.read``.
    """
    cute.arch.store(_pointer(address), Uint64(value), sem="release", scope="sys")


def release_fence() -> None:
    """Executes ``fence.acq_rel.sys``: later flags (`raise_flag`) release what this thread has observed.

    One fence serves flags at several peers. Several `release_flag` would take a trip each: every one waits
    until all stores before it are performed, the preceding flag's included. After bulk stores the thread
    first waits as for `release_flag`.
    """
    cute.arch.fence_acq_rel_sys()


@cute.jit
def raise_flag(address: Int64, value: Any) -> None:
    """Stores ``value`` at ``address`` by ``st.relaxed.sys``; the thread has executed a `release_fence`."""
    cute.arch.store(_pointer(address), Uint64(value), sem="relaxed", scope="sys")


@cute.jit
def wait_flag(address: Int64, target: Address, bound: WaitBound, site: FailureSite) -> None:
    """Waits until the epoch at ``address`` is ``target`` or later (modular), then acquires; one thread.

    The loop has relaxed loads at system scope. One ``ld.acquire.sys`` follows: on sm_90 and sm_100 each
    acquire also invalidates the L1 cache. If the limit expires, writes a failure record and traps (`fail`).

    Args:
        address: ``Int64`` address of the flag in this rank's memory.
        target: Expected epoch.
        bound: Limit and place of the record.
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
    """Waits until the word at ``address`` equals ``identity``, then acquires as `wait_flag` does.

    An identity has an epoch in its low 32 bits (`IDENTITY_BITS`) and a signature above it. If the epoch
    arrives with another signature, or a later epoch arrives, the wait fails at once, without regard to the
    limit: it writes a record and traps. ``site.role`` is `Role.CALL_ENTERED`; `read_record` distinguishes the
    cases.
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
    """Returns whether the epoch in the low ``bits`` bits of ``seen`` is before ``target``'s (modular)."""
    return Int64((seen - target) << (64 - bits)) < 0


@cute.jit
def fail(bound: WaitBound, site: FailureSite, expected: Uint64, seen: Uint64) -> None:
    """Writes the failure record and traps, if this lane is the first to fail; else returns.

    The lane that sets ``bound.claim`` from 0 to 1 (compare-and-swap, relaxed, device scope) is first. It
    stores word 0 of the record last (release, system scope). Other lanes continue to wait until the trap ends
    the launch.
    """
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
    """Executes one ``ld.acquire.sys``. It is PTX, since the DSL drops a load whose value is unused."""
    cute.arch.inline_ptx(
        "ld.acquire.sys.global.b64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[flag]
    )


def trap() -> None:
    """Executes PTX ``trap``: the launch fails, and the host gets the error at the next synchronization."""
    cute.arch.inline_ptx("trap;")
