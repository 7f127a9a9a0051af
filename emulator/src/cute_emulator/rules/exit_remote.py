"""The rule `exit-remote`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import CtaEnded, EndedCtaUsed
from cute_emulator.machine.shared_races import nearby
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "exit-remote"


def _ended(checks: Any, event: CtaEnded) -> None:
    cta = event.cta
    for key, (agent, clock, line) in cta.visitors.items():
        party = agent.party if key == agent.id else 0
        if not any(
            max(w.agent.vector.get(key, 0), nearby(w.agent).get(party, 0)) >= clock for w in cta.warps
        ):
            checks.report.add(
                KIND,
                f"no cluster barrier, nor another release and acquire, between: {cta} exits after "
                f"{agent.warp} accesses its shared memory",
                line,
                key=(cta.rank_in_cluster, agent.warp.index),
            )


def _used(checks: Any, event: EndedCtaUsed) -> None:
    place = checks.report.place(event.line)
    if event.barrier is None:
        text = f"line {place} of {event.group.warp} accesses shared memory of {event.cta}, which has exited"
    else:
        text = f"the tcgen05.commit of line {place} of {event.group.warp} arrives at {event.barrier} of "
        text += f"{event.cta}, which has exited"
    checks.report.add(KIND, text, event.line)


def _pairs() -> tuple[Pair, ...]:
    meet = ptx.MEET
    peer = "xor.b32 %r20, %r13, 1; mapa.shared::cluster.u32 %r21, %r12, %r20;"
    texts = {
        "loads from": "ld.shared::cluster.b32 %r22, [%r21];",
        "stores to": "st.shared::cluster.b32 [%r21], %r0;",
        "adds to": "red.shared::cluster.add.u32 [%r21], %r0;",
    }
    pairs = []
    for name, text in texts.items():
        body = f"{ptx.STORE} {peer} {meet} {text} |M|"
        words = {"|M|": ""}, {"|M|": meet}
        pairs.append(
            Pair(f"a CTA ends while its peer {name} its memory", body, *words, {"shape": ptx.CLUSTER})
        )
    late = f"{ptx.STORE} {peer} {meet} @!%p4 bra E; mov.b32 %r23, 0; S: add.s32 %r23, %r23, 1;"
    late += f"setp.lt.s32 %p9, %r23, 400; @%p9 bra S; {texts['loads from']} E: |M|"
    pairs.append(
        Pair("a CTA ends long before its peer loads from its memory", late, {"|M|": ""}, {"|M|": meet},
             {"shape": ptx.CLUSTER})
    )  # fmt: skip
    return tuple(pairs)


RULE = Rule(
    KIND,
    judges=r"mapa|.*(shared|multicast)::cluster",
    rows=(
        Row(
            "A CTA ends when no peer may still use its shared memory",
            suite=KIND,
        ),
    ),
    check="exit",
    on={CtaEnded: _ended, EndedCtaUsed: _used},
    pairs=_pairs(),
)
