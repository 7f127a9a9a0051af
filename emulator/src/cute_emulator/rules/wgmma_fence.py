"""The rule `wgmma-fence`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import WgmmaUnfenced
from cute_emulator.rules.ptx import END, READY, SM90, SS, USE, WAIT
from cute_emulator.rules.ptx import WGMMA_FENCE as FENCE
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "wgmma-fence"


def _look(checks: Any, event: WgmmaUnfenced) -> None:
    checks.report.add(
        KIND,
        f"no wgmma.fence before: the wgmma of line {checks.report.place(event.line)} of "
        f"{event.warp} uses "
        "registers that other instructions may access",
        event.line,
    )


RS = """
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {%f0, %f1, %f2, %f3}, {%r31, %r32, %r33, %r34}, %d20, |S|, 1, 1, 0;
"""
A = "mov.b32 %r31, 0; mov.b32 %r32, %r0; mov.b32 %r33, 0; mov.b32 %r34, %r0;"
ZERO = "mov.b32 %f0, 0f00000000; mov.b32 %f1, 0f00000000; mov.b32 %f2, 0f00000000; mov.b32 %f3, 0f00000000;"


def _pairs() -> list[Pair]:
    first, again = SS.replace("|S|", "0"), SS.replace("|S|", "1")
    rs, rs_again = RS.replace("|S|", "0"), RS.replace("|S|", "1")
    fences = {
        "before the first": f"{READY} |F| {first} {END} {WAIT} {USE}",
        "after zeroes for the accumulator": f"{READY} {ZERO} |F| {again} {END} {WAIT} {USE}",
        "after the accumulator was changed": f"""
            {READY} {FENCE} {first} {END} {WAIT} add.f32 %f1, %f1, 0f3F800000; |F| {again} {END} {WAIT} {USE}
        """,
        "before A in registers": f"{READY} {A} |F| {rs} {END} {WAIT} {USE}",
        "after A was loaded anew": f"""
            {READY} {A} {FENCE} {rs} {END} {WAIT} add.u32 %r32, %r32, 1; |F| {rs_again} {END} {WAIT} {USE}
        """,
        "in a loop that promotes": f"""
            {READY} {FENCE} mov.b32 %r40, 0; mov.b32 %f8, 0f00000000;
            L: {first} {END} {WAIT} add.f32 %f8, %f8, %f0;
            add.s32 %r40, %r40, 1; |F| setp.lt.s32 %p12, %r40, 3; @%p12 bra L; {USE}
        """,
    }
    return [
        pair(
            f"no wgmma.fence {where}",
            "wgmma.fence",
            "wgmma-fence",
            text,
            {"|F|": ""},
            {"|F|": FENCE},
            **SM90,
        )
        for where, text in fences.items()
    ]


RULE = Rule(
    KIND,
    judges=r"wgmma\.mma_async",
    rows=(
        Row(
            "A wgmma's registers are fenced: before the first, and after any access to its "
            "accumulator or to A in registers (9.7.15.5)",
            suite="wgmma.fence",
        ),
    ),
    on={WgmmaUnfenced: _look},
    check="wgmma",
    pairs=tuple(_pairs()),
)
