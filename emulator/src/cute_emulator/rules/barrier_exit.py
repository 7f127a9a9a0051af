"""The rule `barrier-exit`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import BarrierIncomplete
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "barrier-exit"


def _look(checks: Any, event: BarrierIncomplete) -> None:
    warp, barrier = event.group.warp, event.barrier
    checks.report.add(
        KIND,
        f"line {checks.report.place(event.line)} of {warp}: {barrier.present} of the CTA's "
        f"{32 * len(warp.cta.warps)} threads arrived at {barrier.name}, and the others have exited",
        event.line,
    )


def _pairs() -> tuple[Pair, ...]:
    spellings = {"bar.sync": "bar.sync 0;", "barrier.sync": "barrier.sync 0;"}
    never = "setp.ne.b32 %p9, %r0, %r0; @|P| bra E;"
    shape = {"shape": ptx.TWO}
    return tuple(
        Pair(f"a warp exits and does not come to {name}", never + text + "E:", {"|P|": "%p2"},
             {"|P|": "%p9"}, shape, strict=True)
        for name, text in spellings.items()
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"bar(rier)?(\.cta)?\.(sync|red)",
    rows=(
        Row(
            "Every warp of the CTA arrives at a barrier without a count",
            suite=KIND,
        ),
    ),
    setting="strict",
    check="barrier",
    on={BarrierIncomplete: _look},
    pairs=_pairs(),
)
