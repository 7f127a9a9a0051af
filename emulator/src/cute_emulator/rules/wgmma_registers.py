"""The rule `wgmma-registers`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import WgmmaChanged
from cute_emulator.rules.ptx import END, READY, SM90, SS, USE, WAIT
from cute_emulator.rules.ptx import WGMMA_FENCE as FENCE
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "wgmma-registers"


def _look(checks: Any, event: WgmmaChanged) -> None:
    checks.report.add(
        KIND,
        f"no wgmma.wait_group between: {event.warp} has changed registers of {event.operand} of "
        f"the wgmma "
        f"of line {checks.report.place(event.line)}, which is in flight",
        event.line,
        key=(event.line, event.operand),
    )


RS = """
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {%f0, %f1, %f2, %f3}, {%r31, %r32, %r33, %r34}, %d20, |S|, 1, 1, 0;
"""
A = "mov.b32 %r31, 0; mov.b32 %r32, %r0; mov.b32 %r33, 0; mov.b32 %r34, %r0;"


def _pairs() -> list[Pair]:
    first = SS.replace("|S|", "0")
    rs = RS.replace("|S|", "0")
    cases = []
    changed = {
        "a move into A": (f"{READY} {A} {FENCE} {rs} {END} |B| mov.b32 %r32, 5; |G| {USE}", ""),
        "arithmetic on A": (f"{READY} {A} {FENCE} {rs} {END} |B| add.u32 %r33, %r33, 9; |G| {USE}", ""),
        "a load into A": (
            f"""{READY} {A} {FENCE} {rs} {END} |B|
            ld.shared.b32 %r31, [%r12]; add.u32 %r31, %r31, 7; |G| {USE}""",
            "",
        ),
        "A of two groups, of which the first was waited for": (
            f"""{READY} {A} mov.b32 %r41, 1; mov.b32 %r42, 1; {FENCE} {rs} {END}
            {RS.replace("|S|", "0").replace("%f", "%f1").replace("%r31", "%r41")} {END} |B|
            mov.b32 %r41, 7; |G| {USE}""",
            "wgmma.wait_group.sync.aligned 1;",
        ),
        "a move into D": (f"{READY} {FENCE} {first} {END} |B| mov.b32 %f2, 0f3F800000; |G| {USE}", ""),
        "A before the group is committed": (f"{READY} {A} {FENCE} {rs} |C| mov.b32 %r32, 5; |G| {USE}", ""),
    }  # fmt: skip
    later = "xor.b32 %r43, %r31, %r32; xor.b32 %r43, %r43, %r33; xor.b32 %r43, %r43, %r41;"
    later += "st.global.b32 [%d12], %r43; st.global.f32 [%d11+2048], %f2;"
    for what, (text, early) in changed.items():
        text += later
        wrong = {"|B|": early, "|C|": "", "|G|": f"{END if '|C|' in text else ''} {WAIT}"}
        good = {"|B|": WAIT, "|C|": END + WAIT, "|G|": ""}
        name = f"registers of a wgmma in flight: {what}"
        cases.append(pair(name, "wgmma registers", "wgmma-registers", text, wrong, good, **SM90))
    return cases


RULE = Rule(
    KIND,
    judges=r"wgmma\.mma_async",
    rows=(
        Row(
            "Registers of a wgmma in flight, A's and D's, are unchanged until a `wait_group` that covers it",
            suite="wgmma registers",
        ),
    ),
    on={WgmmaChanged: _look},
    check="wgmma",
    pairs=tuple(_pairs()),
)
