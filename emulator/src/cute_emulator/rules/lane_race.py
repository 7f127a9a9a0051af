"""The rule `lane-race`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import LanesUnordered
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "lane-race"


def _look(checks: Any, event: LanesUnordered) -> None:
    store, place = event.store, checks.report.place
    if store.warp is event.warp:
        writer, why = f"lane {event.lane}", "no bar.warp.sync between"
    else:
        writer = f"lane {event.lane} of {store.warp}"
        why = "no bar.warp.sync before other lanes released what it acquired"
    where = f"{event.at:#x}"
    if store.cta is not None:
        where = f"shared {where}{store.cta.called(event.at)} of {store.cta}"
    checks.report.add(
        KIND,
        f"{why}: {event.who} of {event.warp} reads in line {place(event.line)} {where}, which {writer} wrote "
        f"in line {place(store.line)}",
        event.line,
        key=(event.line, store.line),
        other=store.line,
    )


MEET = "bar.warp.sync -1;"
MISTAKEN = {
    "nothing between": "",
    "a shuffle between": "shfl.sync.idx.b32 %r40, %r0, 0, 31, -1;",
    "a vote between": "vote.sync.ballot.b32 %r40, %p0, -1;",
    "an election between": "elect.sync %r40|%p15, -1;",
    "a reduction between": "redux.sync.add.u32 %r40, %r0, -1;",
    "a fence between": "fence.acq_rel.gpu;",
    "a barrier of half of the lanes between": "@%p16 bar.warp.sync 0xFFFF;",
}
HALF = "setp.lt.u32 %p16, %r2, 16;"
TWO_CTAS: dict[str, Any] = {"grid": (2, 1, 1)}
TWO_WARPS: dict[str, Any] = {"block": (64, 1, 1)}
BULK_OUT = """
@%p3 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 128;
@%p3 cp.async.bulk.commit_group; @%p3 cp.async.bulk.wait_group 0;
"""
MIRROR = "xor.b32 %r41, %r3, 124; add.s32 %r41, %r41, %r10; ld.shared.b32 %r42, [%r41];"
MIRROR_GLOBAL = (
    "xor.b32 %r41, %r3, 124; cvt.u64.u32 %d20, %r41; add.s64 %d20, %d20, %d1; ld.global.b32 %r42, [%d20];"
)
POLL = "P: ld.acquire.gpu.global.b32 %r43, [%d2]; setp.lt.u32 %p11, %r43, |N|; @%p11 bra P;"
READ = "ld.global.b32 %r42, [%d11]; st.global.b32 [%d11+2048], %r42;"
RAISED = {
    "a release store": "mov.b32 %r41, 1; @%p3 st.release.gpu.global.b32 [%d2], %r41;",
    "a release reduction": "mov.b32 %r41, 1; @%p3 red.release.gpu.global.add.u32 [%d2], %r41;",
    "a release atomic": "mov.b32 %r41, 1; @%p3 atom.acq_rel.gpu.global.add.u32 %r44, [%d2], %r41;",
    "an exchange": "mov.b32 %r41, 1; @%p3 atom.release.gpu.global.exch.b32 %r44, [%d2], %r41;",
    "a fence and a relaxed store": "mov.b32 %r41, 1; @%p3 fence.acq_rel.gpu;"
    "@%p3 st.relaxed.gpu.global.b32 [%d2], %r41;",
}  # fmt: skip


def _in_a_warp() -> list[Pair]:
    cases = []
    meet = ("bar.sync 0;", "barrier.cluster.arrive; barrier.cluster.wait;", MEET)
    users = {
        "a lane loads what its mirror stored": (f"{HALF} {ptx.STORE} |M| {MIRROR}", "lane-race"),
        "a lane loads what another stored to global memory": (
            f"{HALF} st.global.b32 [%d11], %r0; |M| {MIRROR_GLOBAL}", "lane-race",
        ),
        "lane 0 issues a bulk store of what all lanes wrote": (
            f"{HALF} {ptx.STORE} {ptx.SHARED} |M| {BULK_OUT}", "lane-race",
        ),
        "lane 0 issues a bulk load of what all lanes wrote": (
            f"{ptx.INIT} {HALF} st.global.b32 [%d10], %r0; fence.proxy.async.global; |M|"
            "@%p3 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 128;"
            "@%p3 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d0], 128, [%r11];"
            "W: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 0; @!%p10 bra W;", "lane-race",
        ),
    }  # fmt: skip
    for what, (text, kind) in users.items():
        for number, (between, words) in enumerate(MISTAKEN.items()):
            good = {"|M|": meet[number % len(meet)]}
            cases.append(pair(f"{what}: {between}", "lanes", kind, text, {"|M|": words}, good))
    return cases


def _releases() -> list[Pair]:
    cases = []
    for what, flag in RAISED.items():
        text = f"""
        {HALF} @!%p4 bra READ;
        st.global.b32 [%d11], %r0; |M| {flag} bra END;
        READ: {POLL.replace("|N|", "1")} {READ}
        END:
        """
        for between, words in MISTAKEN.items():
            if what != "a release reduction" and between not in ("nothing between", "a shuffle between"):
                continue
            name = f"lane 0 raises a flag by {what}: {between}"
            cases.append(
                pair(name, "lanes", "lane-race", text, {"|M|": words}, {"|M|": MEET}, shape=TWO_CTAS)
            )
    arrive = f"""
    {ptx.INIT} {HALF} @%p2 bra READ;
    {ptx.STORE} |M| @%p3 mbarrier.arrive.shared.b64 %d8, [%r11]; bra END;
    READ: W: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 0; @!%p10 bra W;
    add.s32 %r41, %r12, -128; ld.shared.b32 %r42, [%r41];
    END:
    """
    cases += [
        pair(f"lane 0 arrives for all lanes: {between}", "lanes", "lane-race", arrive,
             {"|M|": MISTAKEN[between]}, {"|M|": MEET}, shape=TWO_WARPS)
        for between in ("nothing between", "a shuffle between", "an election between")
    ]  # fmt: skip
    each = arrive.replace("@%p3 mbarrier.arrive", "|A| mbarrier.arrive").replace("|M|", "")
    each = each.replace("[%r11], 1;", "[%r11], |N|;")
    cases.append(
        pair("lane 0 arrives where each lane must", "lanes", "lane-race", each,
             {"|A|": "@%p3", "|N|": "1"}, {"|A|": "", "|N|": "32"}, shape=TWO_WARPS)
    )  # fmt: skip
    passed_on = f"""
    {HALF} @%p2 bra PASS; @!%p4 bra READ;
    st.global.b32 [%d11], %r0; |M| mov.b32 %r41, 1; @%p3 st.release.gpu.global.b32 [%d2+64], %r41; bra END;
    PASS: @!%p4 bra END; Q: ld.acquire.gpu.global.b32 %r43, [%d2+64]; setp.eq.u32 %p11, %r43, 0; @%p11 bra Q;
    mov.b32 %r41, 1; @%p3 st.release.gpu.global.b32 [%d2], %r41; bra END;
    READ: {POLL.replace("|N|", "1")} {READ}
    END:
    """
    cases.append(
        pair("lane 0 raises a flag that a third warp passes on", "lanes", "lane-race", passed_on,
             {"|M|": ""}, {"|M|": MEET}, shape={**TWO_CTAS, **TWO_WARPS})
    )  # fmt: skip
    return cases


RULE = Rule(
    KIND,
    judges=r"(ld|st)\.(?!param|const|local)",
    rows=(
        Row(
            "Another lane, or an async operation that it issues, uses what a lane stored only "
            "after `bar.warp.sync`, a barrier, or a release and an acquire. A shuffle, a vote, an"
            " election, a `redux` and a fence do not suffice (9.7.13.2)",
            suite="lanes",
        ),
        Row(
            "A release by some lanes (a flag, an arrival) publishes only their stores; a warp that "
            "acquires it and uses the others' is reported",
            suite="lanes",
        ),
    ),
    on={LanesUnordered: _look},
    pairs=(*_in_a_warp(), *_releases()),
)
