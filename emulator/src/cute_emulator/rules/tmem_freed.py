"""The rule `tmem-freed`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import FreedTensorMemoryUsed
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "tmem-freed"


def _look(checks: Any, event: FreedTensorMemoryUsed) -> None:
    cta, last = event.group.warp.cta, event.first + event.columns - 1
    warp, line = cta.tmem_freed[event.first].tolist()
    checks.report.add(
        KIND,
        f"line {checks.report.place(event.line)} of {event.group.warp} uses columns {event.first} to {last} "
        f"of tensor memory, which {cta.warps[warp - 1]} has freed in line {checks.report.place(line)}: "
        "no synchronisation orders the dealloc after this use",
        event.line,
        other=line,
    )


def _pairs() -> tuple[Pair, ...]:
    free = "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;"
    at = f"{ptx.ALLOC.replace('|N|', '32')} bar.sync 0; shl.b32 %r31, %r1, 21; add.s32 %r31, %r31, %r30;"
    fill = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%r0}; tcgen05.wait::st.sync.aligned;"
    texts = {
        "loaded": "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r32}, [%r31]; tcgen05.wait::ld.sync.aligned;",
        "stored": "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%r2}; tcgen05.wait::st.sync.aligned;",
    }
    body = f"{at} {fill} |A| bar.sync 0; |T| bar.sync 0; |Z|"
    return tuple(
        Pair(f"tensor memory is {name} after its dealloc", body.replace("|T|", text),
             {"|A|": f"bar.sync 0; {free}", "|Z|": ""}, {"|A|": "", "|Z|": free}, ptx.SM100)
        for name, text in texts.items()
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"tcgen05\.(ld|st|mma|cp|dealloc)",
    rows=(
        Row(
            "Tensor memory is not used after its dealloc",
            suite=KIND,
        ),
    ),
    on={FreedTensorMemoryUsed: _look},
    pairs=_pairs(),
)
