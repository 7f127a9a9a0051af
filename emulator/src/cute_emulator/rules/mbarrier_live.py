"""The rule `mbarrier-live`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import MbarrierInvalidated, MbarrierMade
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "mbarrier-live"


def _made(checks: Any, event: MbarrierMade) -> None:
    if event.old is not None:
        checks.report.add(
            KIND,
            f"no mbarrier.inval before: the mbarrier.init of line {checks.report.place(event.line)} of "
            f"{event.group.warp} initialises the address of {event.old}",
            event.line,
        )


def _invalidated(checks: Any, event: MbarrierInvalidated) -> None:
    if event.old is None:
        checks.report.add(
            KIND,
            f"no mbarrier.init before: the mbarrier.inval of line {checks.report.place(event.line)} of "
            f"{event.group.warp} invalidates shared {event.offset:#x}, which is no mbarrier",
            event.line,
        )


def _pairs() -> tuple[Pair, ...]:
    kernel: dict[str, Any] = {"shape": {"block": (64, 1, 1)}}
    init, inval = "mbarrier.init.shared.b64 [%r11], {};", "mbarrier.inval.shared.b64 [%r11];"
    again = f"@%p0 {init.format(1)} |I| @%p0 {init.format(2)}"
    met = f"@%p0 {init.format(1)} bar.sync 0; |I| bar.sync 0; @%p0 {init.format(1)}"
    used = "@%p0 mbarrier.arrive.shared.b64 %d20, [%r11];"
    loop = f"mov.b32 %r20, 0; L: @%p0 {init.format(1)} {used} |I| add.s32 %r20, %r20, 1;"
    loop += "setp.lt.s32 %p20, %r20, 3; @%p20 bra L;"
    twice = {"|I|": ""}, {"|I|": f"@%p0 {inval}"}
    other = {"|I|": f"@%p0 {inval.replace('%r11', '%r11+8')}"}
    return (
        Pair("an mbarrier is initialised twice", again, *twice, kernel),
        Pair("an mbarrier is initialised twice, with barriers between", met, *twice, kernel),
        Pair("an mbarrier is initialised in each turn of a loop", loop, *twice, kernel),
        Pair("an mbarrier is invalidated that was not initialised", f"@%p0 {init.format(1)} |I|", other,
             twice[1], kernel),
        Pair("an mbarrier is invalidated twice", f"@%p0 {init.format(1)} @%p0 {inval} |I|",
             twice[1], twice[0], kernel),
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"mbarrier\.(init|inval)",
    rows=(
        Row(
            "`mbarrier.init` of an existing mbarrier follows its `mbarrier.inval`, which follows its init "
            "(9.7.13.15.9, 9.7.13.15.10)",
            suite=KIND,
        ),
    ),
    on={MbarrierMade: _made, MbarrierInvalidated: _invalidated},
    pairs=_pairs(),
)
