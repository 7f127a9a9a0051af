"""The rule `shfl-exited`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import ExitedLaneRead
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "shfl-exited"


def _look(checks: Any, event: ExitedLaneRead) -> None:
    checks.report.add(
        KIND,
        f"lane {event.lane} of {event.group.warp} reads in line {checks.report.place(event.line)} from lane "
        f"{event.source}, which the member mask {event.members:#010x} names but which has exited or is "
        "not in the block",
        event.line,
    )


def _pairs() -> tuple[Pair, ...]:
    texts = {
        "down": "shfl.sync.down.b32 %r20, %r0, 4, 31, -1;",
        "idx": "shfl.sync.idx.b32 %r20, %r0, 20, 31, -1;",
        "bfly": "shfl.sync.bfly.b32 %r20, %r0, 16, 31, -1;",
    }
    return tuple(
        Pair(f"shfl.{name} reads from lanes that have exited",
             f"setp.gt.u32 %p9, %r2, 15; setp.ne.b32 %p10, %r0, %r0; @|P| ret; {text}", {"|P|": "%p9"},
             {"|P|": "%p10"})
        for name, text in texts.items()
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"shfl",
    rows=(
        Row(
            "A shuffle does not read from a lane of its mask that has exited",
            suite=KIND,
        ),
    ),
    on={ExitedLaneRead: _look},
    pairs=_pairs(),
)
