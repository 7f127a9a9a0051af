"""The rule `tmem-pair`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import CtaEnded, TensorMemoryAllocated
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "tmem-pair"


def _allocated(checks: Any, event: TensorMemoryAllocated) -> None:
    cta = event.group.warp.cta
    peer = cta.cluster.ctas[cta.rank_in_cluster ^ 1]
    if not peer.live_warps:
        _emit(checks, peer, cta, event.line)


def _ended(checks: Any, event: CtaEnded) -> None:
    cta = event.cta
    if cta.promised:
        peer = cta.cluster.ctas[cta.rank_in_cluster ^ 1]
        _emit(checks, cta, peer, peer.tmem_alloc_line)


def _emit(checks: Any, missing: Any, other: Any, line: int) -> None:
    checks.report.add(
        KIND,
        f"no tcgen05.alloc.cta_group::2 of {missing}, which exits without it: {other} allocates in line "
        f"{checks.report.place(line)} for both, and a warp of each must execute it",
        line,
        key=line,
    )


PAIR: dict[str, Any] = {"shape": {"block": (32, 1, 1), "grid": (2, 1, 1), "cluster": (2, 1, 1)}}
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"
ALLOC = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [slot], |N|;"
FREE = "ld.shared.b32 %r30, [slot]; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r30, |N|;"


def _pairs() -> tuple[Pair, ...]:
    pairs = []
    for columns in (32, 64, 512):
        for who, alone in (("the first", "%p4"), ("the second", "!%p4")):
            body = f"{MEET} @|W| bra A; bra E; A: {ALLOC} {FREE} E: {MEET}".replace("|N|", str(columns))
            body = f"setp.eq.b32 %p6, %r2, %r2; {body}"
            name = f"{who} CTA alone of a pair allocates {columns} columns for both"
            pairs.append(Pair(name, body, {"|W|": alone}, {"|W|": "%p6"}, PAIR))
    return tuple(pairs)


RULE = Rule(
    KIND,
    judges=r"tcgen05\.alloc",
    rows=(
        Row(
            "`tcgen05.alloc.cta_group::2` is executed by a warp of each CTA of the pair (9.7.16.7.1)",
            suite=KIND,
        ),
    ),
    on={TensorMemoryAllocated: _allocated, CtaEnded: _ended},
    pairs=_pairs(),
)
