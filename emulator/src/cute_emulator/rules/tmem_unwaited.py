"""The rule `tmem-unwaited`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import TensorUnwaited
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "tmem-unwaited"


def _look(checks: Any, event: TensorUnwaited) -> None:
    first, last = event.columns
    checks.report.add(
        KIND,
        f"no tcgen05.wait::{event.kind} of warp {event.warp} before: {event.what} (line "
        f"{checks.report.place(event.line)}) uses columns {first}..{last} of {event.cta}, which a "
        f"tcgen05.{event.kind} of that warp accesses",
        event.line,
    )


def _pairs() -> tuple[Pair, ...]:
    at = f"{ptx.ALLOC.replace('|N|', '32')} shl.b32 %r31, %r1, 21; add.s32 %r31, %r31, %r30;"
    free = f"tcgen05.fence::before_thread_sync; {ptx.FREE.replace('|N|', '32')}"
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%r0};"
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r32}, [%r31];"
    filled = f"{store} tcgen05.wait::st.sync.aligned;"
    texts = {
        "a load": (f"{at} {filled} {load} |W| {free}", "ld"),
        "a store": (f"{at} {store} |W| {free}", "st"),
    }
    return tuple(
        Pair(f"tensor memory is freed with {name} not waited for", body, {"|W|": ""},
             {"|W|": f"tcgen05.wait::{kind}.sync.aligned;"}, ptx.SM100, strict=True)
        for name, (body, kind) in texts.items()
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"tcgen05\.(ld|st|mma|cp|dealloc)",
    rows=(
        Row(
            "A product does not overwrite tensor memory, and a dealloc does not free it, before "
            "`tcgen05.wait` of the warps that access it",
            suite=KIND,
        ),
    ),
    setting="strict",
    check="tmem",
    on={TensorUnwaited: _look},
    pairs=_pairs(),
)
