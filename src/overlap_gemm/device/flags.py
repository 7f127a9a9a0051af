"""Flags between ranks: release, and a bounded wait that acquires.

A flag is a monotonic 32-bit epoch, compared modularly, never reset. Release and acquire are at system scope:
threads of two GPUs are not inside one ``.gpu`` scope, so a ``.gpu`` pair would not synchronise (PTX ISA,
memory consistency model, "morally strong operations").

A flag's word has 32 bits, or 64 where NVSHMEM may raise it, whose signals have as many: whoever writes and
reads a word does it in its full width, since the model promises nothing where accesses of two widths race
("mixed-size data races"). The epoch is in the low bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from overlap_gemm.device.failure import FailureSite
from overlap_gemm.device.memory import global_pointer


class WaitBound(NamedTuple):
    """What bounds every wait on a peer, and where an expired one is written.

    Attributes:
        timeout_ns: ``Int64``; 0 waits for ever.
        record: ``Int64`` address of a zeroed failure record (pinned host memory), see :mod:`device.failure`.
        claim: ``Int64`` address of a zeroed ``uint32`` in device memory: the first lane to expire writes the
            record.
    """

    timeout_ns: Any
    record: Any
    claim: Any


@cute.jit
def release_flag(address: Int64, value: Any, word: cutlass.Constexpr = Uint32) -> None:
    """``st.release.sys``: who acquires ``value`` at ``address``, a ``word``, sees all that this thread has.

    After bulk stores, call it only behind a full ``wait_group`` (never ``.read``) of the same thread.
    """
    cute.arch.store(global_pointer(word, address, word.width // 8), word(value), sem="release", scope="sys")


def release_fence() -> None:
    """``fence.acq_rel.sys``: flags that this thread raises behind it (`raise_flag`) release what it has seen.

    For flags at several peers: each `release_flag` waits for the stores before it, so for the last flag's
    way. After bulk stores, call it only behind a full ``wait_group``, as `release_flag`.
    """
    cute.arch.fence_acq_rel_sys()


@cute.jit
def raise_flag(address: Int64, value: Any, word: cutlass.Constexpr = Uint32) -> None:
    """``st.relaxed.sys``, behind a `release_fence`; the flag is a ``word``."""
    cute.arch.store(global_pointer(word, address, word.width // 8), word(value), sem="relaxed", scope="sys")


@cute.jit
def wait_flag(
    address: Int64,
    target: Uint32,
    bound: WaitBound,
    site: FailureSite,
    word: cutlass.Constexpr = Uint32,
) -> None:
    """Waits until the flag at ``address`` has reached ``target`` (modular ``>=``); acquires it (``.sys``).

    Spins on relaxed loads and acquires once: on sm_90 and sm_100 every acquire load also invalidates the L1
    cache.

    Args:
        address: ``Int64`` address of the flag in this rank's own memory.
        target: epoch to wait for.
        bound: time limit and failure record.
        site: who waits for whom, for the record.
        word: the flag's type, ``Uint32`` or ``Uint64``.
    """
    flag = global_pointer(word, address, word.width // 8)
    seen = Uint32(cute.arch.load(flag, word, sem="relaxed", scope="sys"))
    if Int32(seen - target) < 0:
        start = cute.arch.globaltimer()
        while Int32(seen - target) < 0:
            seen = Uint32(cute.arch.load(flag, word, sem="relaxed", scope="sys"))
            if bound.timeout_ns > 0 and cute.arch.globaltimer() - start > bound.timeout_ns:
                fail(bound, site, target, seen)
                start = cute.arch.globaltimer()  # another lane was first: look on until its trap ends us
    _acquire(flag, word)


@cute.jit
def fail(bound: WaitBound, site: FailureSite, expected: Uint32, seen: Uint32) -> None:
    """Writes the record and traps, if this lane is the first of the launch; else returns."""
    claim = global_pointer(Uint32, bound.claim, 4)
    if cute.arch.atomic_cas(claim, cmp=Uint32(0), val=Uint32(1), sem="relaxed", scope="gpu") == 0:
        words = (site.rank, site.op, site.role, site.tile, site.source, site.index, expected, seen)
        for i in cutlass.range_constexpr(len(words)):
            cute.arch.store(global_pointer(Uint32, bound.record + 4 * (i + 1), 4), Uint32(words[i]))
        cute.arch.store(global_pointer(Uint32, bound.record, 4), Uint32(1), sem="release", scope="sys")
        trap()


def _acquire(flag: Any, word: Any) -> None:
    """One acquire load at system scope. In PTX, because the DSL drops a load whose value nobody uses."""
    cute.arch.inline_ptx(
        f"ld.acquire.sys.global.b{word.width} {{$w0}}, [{{$r0}}];",
        write_only_types=[word],
        read_only_args=[flag],
    )


def trap() -> None:
    """Aborts the launch (PTX ``trap``): the host sees a launch failure at the next synchronisation."""
    cute.arch.inline_ptx("trap;")
