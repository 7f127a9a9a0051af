"""The rule `peer-start`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import PeerUsed
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "peer-start"


def _look(checks: Any, event: PeerUsed) -> None:
    vector = event.group.warp.agent.vector
    if any(warp.agent.id in vector for warp in event.cta.warps):
        return
    checks.report.add(
        KIND,
        f"no barrier.cluster before: line {checks.report.place(event.line)} of {event.group.warp} "
        f"uses shared "
        f"memory of {event.cta}, whose start is not ordered before",
        event.line,
    )


def _pairs() -> tuple[Pair, ...]:
    kernel: dict[str, Any] = {"shape": {"block": (32, 1, 1), "grid": (2, 1, 1), "cluster": (2, 1, 1)}}
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    relaxed = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    peer = "xor.b32 %r20, %r13, 1; mapa.shared::cluster.u32 %r21, %r12, %r20;"
    texts = {
        "a store": "st.shared::cluster.b32 [%r21], %r0;",
        "a load": "ld.shared::cluster.b32 %r22, [%r21];",
        "a reduction": "red.shared::cluster.add.u32 [%r21], %r0;",
        "an exchange": "atom.shared::cluster.exch.b32 %r22, [%r21], %r0;",
        "a minimum": "red.shared::cluster.min.u32 [%r21], %r0;",
        "a compare-and-swap": "atom.shared::cluster.cas.b32 %r22, [%r21], %r0, %r2;",
        "a store of 8 bytes": "@%p0 st.shared::cluster.b64 [%r21], %d9;",
        "a load of 8 bytes": "@%p0 ld.shared::cluster.b64 %d20, [%r21];",
        "a store of one lane": "@%p0 st.shared::cluster.b32 [%r21], %r0;",
        "a store of bytes": "st.shared::cluster.b8 [%r21], %h1;",
        "a vector store": "@%p0 st.shared::cluster.v2.b32 [%r21], {%r0, %r0};",
    }
    pairs = []
    for name, text in texts.items():
        body = f"{peer} |B| {text} {meet}"
        pairs.append(
            Pair(f"{name} to a CTA that may not have begun", body, {"|B|": ""}, {"|B|": meet}, kernel)
        )
    body = f"{peer} |B| {texts['a store']} {meet}"
    pairs.append(
        Pair("a store to a CTA that may not have begun; relaxed arrivals are enough", body, {"|B|": ""},
             {"|B|": relaxed}, kernel)
    )  # fmt: skip
    return tuple(pairs)


RULE = Rule(
    KIND,
    judges=r"mapa|.*(shared|multicast)::cluster",
    rows=(
        Row(
            "A CTA uses the shared memory of another CTA of its cluster after the start of that CTA: a "
            "`barrier.cluster`, or a release and an acquire (CUDA C++ programming guide, "
            "distributed shared memory)",
            suite=KIND,
        ),
    ),
    on={PeerUsed: _look},
    pairs=_pairs(),
)
