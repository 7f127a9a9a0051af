"""The rule `setmaxnreg`."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from cute_emulator.machine.events import CtaEnded
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "setmaxnreg"


def _look(checks: Any, event: CtaEnded) -> None:
    """Reports a warpgroup of an ended CTA whose warps executed different `setmaxnreg` instructions."""
    registers = event.cta.registers
    if registers is None:
        return
    for first in range(0, len(registers.done), 4):
        group = [n for n in range(first, first + 4) if n in registers.done]
        seen = Counter(tuple(registers.done[n]) for n in group)
        if len(seen) < 2:
            continue
        usual = seen.most_common(1)[0][0]
        other = next((n for n in group if tuple(registers.done[n]) != usual), first)
        line = max(registers.lines[n] for n in group)
        each = ", ".join(f"warp {n}: {_in_turn(registers.done[n])}" for n in group)
        checks.report.add(
            KIND,
            f"not all warps of warpgroup {first // 4} of {event.cta} execute the same setmaxnreg ({each}), "
            f"as line {checks.report.place(line)} requires",
            line,
            key=(line, other),
        )


def _in_turn(names: list[str]) -> str:
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    return " then ".join(f"{name}, {n} times" if n > 1 else name for name, n in runs) or "none"


TWO_GROUPS: dict[str, Any] = {"shape": {"block": (256, 1, 1)}, "arch": "sm_90a"}


def _pairs() -> list[Pair]:
    rule = "setmaxnreg"
    cases = []
    one = "setp.eq.b32 %p13, %r1, 5; setp.ge.u32 %p14, %r1, 4; |P| setmaxnreg.dec.sync.aligned.u32 64;"
    cases += [
        pair(f"{who} of a warpgroup executes setmaxnreg", rule, "setmaxnreg", text, {"|P|": words},
             {"|P|": "@%p14"}, head=".maxnreg 128", **TWO_GROUPS)
        for who, words, text in (
            ("one warp", "@%p13", one),
            ("all but one warp", "@%p13", one.replace("eq.b32 %p13, %r1, 5", "gt.u32 %p13, %r1, 4")),
        )
    ]  # fmt: skip
    amounts = "setp.eq.b32 %p13, %r1, 5; @%p13 bra A; setmaxnreg.dec.sync.aligned.u32 64; bra B;"
    amounts += "A: setmaxnreg.dec.sync.aligned.u32 |N|; B:"
    cases.append(
        pair("the warps of a warpgroup ask for different numbers of registers", rule, "setmaxnreg", amounts,
             {"|N|": "56"}, {"|N|": "64"}, head=".maxnreg 128", **TWO_GROUPS)
    )  # fmt: skip
    return cases


RULE = Rule(
    KIND,
    judges=r"setmaxnreg",
    rows=(
        Row(
            "All warps of a warpgroup execute the same `setmaxnreg`",
            suite="setmaxnreg",
        ),
    ),
    check="exit",
    on={CtaEnded: _look},
    pairs=tuple(_pairs()),
)
