"""The rule `cta-group`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import CtaGroupNamed
from cute_emulator.rules.ptx import SM100, umma
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "cta-group"


def _look(checks: Any, event: CtaGroupNamed) -> None:
    names = "12" if event.pair else "21"
    checks.report.add(
        KIND,
        f"not all tcgen05 instructions of the kernel name the same .cta_group: line "
        f"{checks.report.place(event.line)} of {event.group.warp} names ::{names[1]}, others before it "
        f"::{names[0]}",
        event.line,
    )


def _pairs() -> tuple[Pair, ...]:
    cluster = {**SM100, "shape": {"block": (128, 1, 1), "grid": (2, 1, 1), "cluster": (2, 1, 1)}}
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    product = "tcgen05.mma.cta_group::1.kind::f16 [%r30], %d20, %d20, %r21, %p14;"
    commit = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster.b64 [%r11];"
    text = umma("", product).replace(commit.format(1), commit.format("|G|"))
    give = "@%p1 tcgen05.relinquish_alloc_permit.cta_group::{}.sync.aligned;"
    later = umma(give.format("|G|"), product)
    copied = umma("", "tcgen05.cp.cta_group::1.128x256b [%r30], %d20;")
    copied = copied.replace(commit.format(1), commit.format("|G|"))
    wrong, right = {"|G|": "2"}, {"|G|": "1"}
    return (
        Pair("a commit of a pair after a product of one CTA", f"{text} {meet}", wrong, right, cluster),
        Pair("a commit of a pair after a copy of one CTA", f"{copied} {meet}", wrong, right, cluster),
        Pair("the permit of a pair after an allocation of one CTA", f"{later} {meet}", wrong, right, cluster),
    )


RULE = Rule(
    KIND,
    judges=r"tcgen05\.(alloc|dealloc|relinquish_alloc_permit|mma|cp|commit)",
    rows=(Row("All tcgen05 instructions of a kernel name the same `.cta_group` (9.7.16.2.1)", suite=KIND),),
    on={CtaGroupNamed: _look},
    pairs=_pairs(),
)
