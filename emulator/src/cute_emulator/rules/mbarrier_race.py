"""The rule `mbarrier-race`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import MbarrierUnordered
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "mbarrier-race"


def _look(checks: Any, event: MbarrierUnordered) -> None:
    checks.report.add(
        KIND,
        f"no barrier between: line {checks.report.place(event.line)} of {event.group.warp} uses "
        f"{event.barrier}, after its mbarrier.init by {event.owner.warp}",
        event.line,
        key=(event.line, "known"),
        other=event.first,
    )


def _pairs() -> tuple[Pair, ...]:
    slow = "mov.b32 %r20, 0; S: add.s32 %r20, %r20, 1; setp.lt.s32 %p9, %r20, 100; @%p9 bra S;"
    init = f"@%p0 mbarrier.init.shared.b64 [%r11], 1; |B| @%p0 bra U; {slow} U:"
    uses = {
        "arrives": "setp.eq.b32 %p10, %r0, 32; @%p10 mbarrier.arrive.shared.b64 %d8, [%r11];",
        "waits": "@%p0 mbarrier.arrive.shared.b64 %d8, [%r11]; "
        "W: @%p2 mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 0; @!%p2 bra E; @!%p10 bra W; E:",
    }  # fmt: skip
    return tuple(
        Pair(f"a warp {name} at an mbarrier that another may not have initialised", f"{init} {use}",
             {"|B|": ""}, {"|B|": "bar.sync 0;"}, {"shape": ptx.TWO})
        for name, use in uses.items()
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"mbarrier\.init",
    rows=(
        Row(
            "An mbarrier's init is ordered before its use",
            suite=KIND,
        ),
    ),
    check="mbarrier",
    on={MbarrierUnordered: _look},
    pairs=_pairs(),
)
