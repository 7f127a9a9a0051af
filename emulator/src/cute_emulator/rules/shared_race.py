"""The rule `shared-race`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import SharedUnordered
from cute_emulator.rules import ptx
from cute_emulator.rules.ptx import AWAIT, COMMIT, LOAD, MMA, READY_SM100, SM100
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "shared-race"


MISSING = {
    "": "no barrier, nor release and acquire, between",
    "copy": "the reader has observed no completion of {barrier} that covers it",
    "bulk": "no wait_group of that warp, passed on, retires the read",
    "cp.async": "no cp.async.wait_group of that warp, passed on, covers it",
    "tensor": "no tcgen05.commit of that thread after it, waited for at its mbarrier, covers it",
    "wgmma": "no wgmma.wait_group, passed on, retires the read",
}
"""Missing synchronisation, by the kind of the unit with the earlier access."""


def _unordered(checks: Any, event: SharedUnordered) -> None:
    party, place = event.party, checks.report.place
    missing = MISSING[party.unit].format(barrier=party.barrier)
    at = event.at
    where = "tensor memory" if at is None else f"shared {at:#x}{event.cta.called(at)}"
    checks.report.add(
        KIND,
        f"{missing}: {event.verb} of {where} of {event.cta} by {event.agent.warp}{event.lanes}, line "
        f"{place(event.line)}, after it was {event.was} by {party.what}, line {place(event.first)}",
        event.line,
        key=(event.line, event.first, event.verb),
        other=event.first,
    )


LANE1 = "setp.eq.b32 %p15, %r0, 1;"


def _shared() -> list[Pair]:
    full = "cp.async.bulk.wait_group 0;"
    cases = []
    again = f"st.shared.b32 [%r12], %r0; {ptx.SHARED} bar.sync 0; {ptx.OUT} |W| bar.sync 0;"
    again += "st.shared.b32 [%r12], %r1;"
    again = again.replace("@%p0 cp.async.bulk.wait_group 0;", "")
    cases.append(
        pair("a stage is overwritten while a bulk store may read it", "shared races", "shared-race",
             again + f"@%p0 {full}", {"|W|": ""}, {"|W|": "@%p0 cp.async.bulk.wait_group.read 0;"},
             shape=ptx.TWO)
    )  # fmt: skip
    late = AWAIT.replace("W:", "V:").replace("bra W;", "bra V;")
    load = f"{ptx.INIT} {ptx.IN} |W| ld.shared.b32 %r21, [%r12]; st.global.b32 [%d11], %r21; {late}"
    cases.append(
        pair("a bulk load is awaited with a barrier instead of its mbarrier", "shared races", "shared-race",
             load, {"|W|": "bar.sync 0;"}, {"|W|": AWAIT}, shape=ptx.TWO)
    )  # fmt: skip
    refill = f"""
    {ptx.INIT} {ptx.IN} {AWAIT} ld.shared.b32 %r21, [%r12]; |W|
    {ptx.IN} V: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 1; @!%p10 bra V;
    """
    cases.append(
        pair("a stage is filled again before its readers are done", "shared races", "shared-race", refill,
             {"|W|": ""}, {"|W|": "bar.sync 0;"}, shape=ptx.TWO)
    )  # fmt: skip
    copied = """
    mul.wide.u32 %d20, %r0, 16; add.s64 %d20, %d20, %d0; shl.b32 %r21, %r0, 4; add.s32 %r21, %r21, %r10;
    cp.async.cg.shared.global [%r21], [%d20], 16; cp.async.commit_group;
    cp.async.cg.shared.global [%r21+1024], [%d20], 16; cp.async.commit_group;
    cp.async.wait_group |N|; bar.sync 0; xor.b32 %r22, %r21, 512; ld.shared.b32 %r23, [%r22+1024];
    cp.async.wait_group 0;
    """
    cases.append(
        pair("cp.async: one group less is waited for", "shared races", "shared-race", copied,
             {"|N|": "1"}, {"|N|": "0"}, shape=ptx.TWO)
    )  # fmt: skip
    return cases


def _products() -> list[Pair]:
    done = ptx.FREE.replace("|N|", "32")
    rule, cases = "tcgen05.commit", []
    text = f"{READY_SM100} {LANE1} @%p0 {MMA} |C| {COMMIT} {AWAIT} {LOAD} {done}"
    cases.append(
        pair("another lane than the issuer commits", rule, "shared-race", text,
             {"|C|": "@%p15"}, {"|C|": "@%p0"}, **SM100)
    )  # fmt: skip
    cases.append(
        pair("another warp than the issuer commits", rule, "shared-race",
             f"setp.eq.b32 %p16, %r0, 32; {text}", {"|C|": "@%p16"}, {"|C|": "@%p0"}, **SM100)
    )  # fmt: skip
    cases.append(
        pair("lanes issue a product each, one commits", rule, "shared-race",
             f"{READY_SM100} {LANE1} @%p0 {MMA} |I| {MMA} @%p0 {COMMIT} {AWAIT} {LOAD} {done}",
             {"|I|": "@%p15"}, {"|I|": "@%p0"}, **SM100)
    )  # fmt: skip
    issued = f"{READY_SM100} |I| {MMA} |C| {COMMIT} {AWAIT} {LOAD} {done}"
    cases.append(
        pair("a whole warp issues a product", "one for each lane", "shared-race", issued,
             {"|I|": "@%p1", "|C|": "@%p0"}, {"|I|": "@%p0", "|C|": "@%p0"}, **SM100)
    )  # fmt: skip
    twice = issued.replace("[%r11], 1;", "[%r11], |N|;")
    cases.append(
        pair("a whole warp commits, where one arrival is expected", "one for each lane",
             "exit-pending Deadlock EmulatorError shared-race", twice,
             {"|I|": "@%p0", "|C|": "@%p1", "|N|": "31"},
             {"|I|": "@%p0", "|C|": "@%p0", "|N|": "1"}, **SM100)
    )  # fmt: skip
    load = f"""
    {ptx.INIT} |L| mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 256; bar.sync 0;
    |W| cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d0], 256, [%r11];
    {AWAIT} ld.shared.b32 %r20, [%r12];
    """
    cases.append(
        pair("a whole warp issues a bulk load", "one for each lane",
             "EmulatorError Deadlock exit-tx exit-pending", load, {"|L|": "@%p0", "|W|": "@%p1"},
             {"|L|": "@%p0", "|W|": "@%p0"}, shape={"block": (32, 1, 1)})
    )  # fmt: skip
    cases.append(
        pair("an accumulator is read without a commit", rule, "shared-race",
             f"{READY_SM100} @%p0 {MMA} |C| {LOAD} {done}",
             {"|C|": ""}, {"|C|": f"@%p0 {COMMIT} {AWAIT}"}, **SM100)
    )  # fmt: skip
    return cases


RULE = Rule(
    KIND,
    judges=(
        r"(ld|st|atom|red)\.(?!param|const|local|global)|(ld|st)matrix|cp\.(reduce\.)?asyn"
        r"c|wgmma\.mma_async|tcgen05\.(mma|cp)|tcgen05\.(ld|st|mma|cp|dealloc)"
    ),
    rows=(
        Row(
            "Accesses to shared memory are ordered, those of asynchronous units included: a copy by its "
            "mbarrier's phase, a bulk store's read by `wait_group.read`, its write by a full "
            "`wait_group`, a wgmma by its `wait_group`",
            suite="shared races",
            kinds="`shared-race`, `race`",
        ),
        Row(
            "Accesses to tensor memory are ordered, too: a product by a `tcgen05.commit` of the *same "
            "thread* (9.7.16.12)",
            suite="tcgen05.commit",
        ),
        Row(
            "Each lane that executes a product, a load or a commit issues it",
            suite="one for each lane",
            kinds="error, `shared-race`, deadlock",
        ),
    ),
    check="shared",
    on={SharedUnordered: _unordered},
    pairs=(*_shared(), *_products()),
)
