"""The rule `sync-mask`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import LanesNotNamed
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "sync-mask"


def _look(checks: Any, event: LanesNotNamed) -> None:
    checks.report.add(
        KIND,
        f"lanes {event.lanes:#010x} of {event.group.warp} execute line {checks.report.place(event.line)} "
        f"({event.name}) with the member mask {event.members:#010x}, which does not name them",
        event.line,
    )


def _pairs() -> tuple[Pair, ...]:
    texts = (
        "shfl.sync.idx.b32 %r20, %r0, 0, 31, |M|;", "vote.sync.ballot.b32 %r20, %p0, |M|;",
        "match.any.sync.b32 %r20, %r0, |M|;", "redux.sync.add.u32 %r20, %r0, |M|;",
        "elect.sync %r20|%p9, |M|;", "bar.warp.sync |M|;",
    )  # fmt: skip
    return tuple(
        Pair(f"{text.split()[0]} by a lane that its mask does not name", text, {"|M|": "0x7fffffff"},
             {"|M|": "-1"})
        for text in texts
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"shfl|vote|match|redux|elect|bar\.warp",
    rows=(
        Row(
            "A lane that executes a `.sync` instruction is in its mask",
            suite=KIND,
        ),
    ),
    on={LanesNotNamed: _look},
    pairs=_pairs(),
)
