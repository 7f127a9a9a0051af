"""The rule `barrier-divergent`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import AlignedBarrierPassed, AlignedBarrierReached
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "barrier-divergent"


def _reached(checks: Any, event: AlignedBarrierReached) -> None:
    """Checks lanes that arrive: the other lanes of the warp must arrive at the same instruction."""
    warp = event.group.warp
    notes = checks.notes(warp.cta).setdefault(KIND, {})
    first, lanes, live = notes.get(warp.index, (event.instruction, 0, warp.live))
    if first is not event.instruction:
        del notes[warp.index]
        _emit(checks, event, lanes, first.line, f"lanes {event.lanes:#010x} to that of line ")
        return
    lanes |= event.lanes
    if lanes & live == live:
        notes.pop(warp.index, None)
    else:
        notes[warp.index] = first, lanes, live


def _passed(checks: Any, event: AlignedBarrierPassed) -> None:
    """Checks a complete barrier: every lane of the warp must have arrived."""
    notes = checks.notes(event.group.warp.cta).get(KIND, {})
    note = notes.get(event.group.warp.index)
    if note is not None and note[0] is event.instruction:
        del notes[event.group.warp.index]
        first, lanes, _ = note
        _emit(checks, event, lanes, first.line, "the others to none before line ")


def _emit(checks: Any, event: Any, lanes: int, line: int, others: str) -> None:
    place = checks.report.place
    checks.report.add(
        KIND,
        f"an aligned barrier in divergent code: of {event.group.warp} lanes {lanes:#010x} come to "
        f"that of line "
        f"{place(line)}, {others}{place(event.line)}; all lanes of a warp must execute the same one",
        line,
        other=event.line if event.line != line else 0,
    )


def _pairs() -> tuple[Pair, ...]:
    kernel: dict[str, Any] = {"shape": {"block": (64, 1, 1)}}
    split = "setp.lt.u32 %p6, %r2, 16; setp.eq.b32 %p7, %r2, %r2;"
    spellings = {"bar.sync": "bar.sync 0;", "barrier.sync.aligned": "barrier.sync.aligned 0;",
                 "barrier.cta.sync.aligned": "barrier.cta.sync.aligned 0;",
                 "bar.sync of 64 threads": "bar.sync 3, 64;",
                 "bar.red.popc": "bar.red.popc.u32 %r30, 0, %p7;",
                 "bar.red.and": "bar.red.and.pred %p8, 0, %p7;",
                 "barrier.cta.red.or": "barrier.cta.red.or.aligned.pred %p8, 2, 64, %p7;"}  # fmt: skip
    pairs = []
    for name, text in spellings.items():
        arms = f"{split} @|P| bra A; {text} bra E; A: {text} E:"
        pairs.append(Pair(f"{name} in both arms of a branch", arms, {"|P|": "%p6"}, {"|P|": "%p1"}, kernel))
    for name, text in spellings.items():
        arm = f"{split} @|P| bra A; bra E; A: {text} E: {text}"
        pairs.append(Pair(f"{name} twice for some lanes", arm, {"|P|": "%p6"}, {"|P|": "%p7"}, kernel))
    return tuple(pairs)


RULE = Rule(
    KIND,
    judges=r"bar(rier)?(\.cta)?\.(sync|red)",
    rows=(
        Row(
            "All lanes of a warp execute the same `bar.sync`, `bar.red` or `barrier.sync.aligned` "
            "(9.7.13.1); a "
            "`barrier.sync` without `.aligned` counts arriving lanes",
            suite=KIND,
        ),
    ),
    on={AlignedBarrierReached: _reached, AlignedBarrierPassed: _passed},
    pairs=_pairs(),
)
