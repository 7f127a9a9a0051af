"""The rule `alias-fence`."""

from __future__ import annotations

from typing import Any

from cute_emulator import source
from cute_emulator.machine.conflicts import GlobalAliased
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "alias-fence"


def _look(checks: Any, event: GlobalAliased) -> None:
    theirs = event.owner.warp.grid.program.module.text
    names = ("its own address", "a multicast address")
    checks.report.add(
        KIND,
        f"no fence.proxy.alias between: {event.verb} of {event.spot} by {event.agent.warp}, line "
        f"{checks.report.place(event.line)}, through {names[event.is_multicast]}, after it was {event.was} "
        f"by {event.owner.warp}, line {source.place(theirs, event.first)}, through "
        f"{names[not event.is_multicast]}",
        event.line,
        key=(event.line, event.first, event.verb),
        other=event.first,
        other_ptx=theirs,
    )


def _pairs() -> tuple[Pair, ...]:
    stored, loaded = "st.global.b32 [%d1], %r13;", "ld.global.b32 %r20, [%d1];"
    everywhere = "multimem.st.relaxed.sys.global.b32 [%d2], %r13;"
    total = "multimem.ld_reduce.relaxed.sys.global.add.u32 %r20, [%d2];"
    texts = {
        "stored by its own address, then summed": (stored, total),
        "stored everywhere, then loaded": (everywhere, loaded),
        "stored everywhere, then stored by its own address": (everywhere, stored),
        "summed, then stored by its own address": (f"{everywhere} @%p1 {total}", stored),
        "loaded by its own address, then stored everywhere": (f"{stored} @%p1 {loaded}", everywhere),
    }
    kernel = {"ranks": 2, "shape": ptx.TWO, "multicast": True}
    fence = "@%p1 fence.proxy.alias;"
    return tuple(
        Pair(f"a place is {name}", f"@!%p5 bra E; @%p1 {first} |F| bar.sync 0; @%p2 {second} E:",
             {"|F|": ""}, {"|F|": fence}, kernel)
        for name, (first, second) in texts.items()
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"multimem",
    rows=(
        Row(
            "Accesses by a multicast address and by a rank's address need a `fence.proxy.alias` "
            "between (8.7)",
            suite=KIND,
        ),
    ),
    check="race",
    on={GlobalAliased: _look},
    pairs=_pairs(),
)
