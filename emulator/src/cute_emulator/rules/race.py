"""The rule `race`."""

from __future__ import annotations

from typing import Any

from cute_emulator import source
from cute_emulator.machine.conflicts import GlobalUnordered
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "race"


def _unordered(checks: Any, event: GlobalUnordered) -> None:
    theirs = event.owner.warp.grid.program.module.text
    place = checks.report.place
    checks.report.add(
        KIND,
        f"{_missing(event)}: {event.verb} of {event.spot} by {event.agent.warp}{event.lanes}, line "
        f"{place(event.line)}, after it was {event.was} by {event.owner.warp}, line "
        f"{source.place(theirs, event.first)}{_launches(event)}",
        event.line,
        key=(event.line, event.first, event.verb),
        other=event.first,
        other_ptx=theirs,
    )


def _missing(event: GlobalUnordered) -> str:
    if event.scopes is not None:
        mine, before = event.scopes
        return f"too narrow scopes, .{mine} scope after .{before} scope"
    if event.is_bulk:
        return "no full wait_group for the bulk store, passed on"
    theirs, ours = event.owner.warp.grid.launch, event.agent.warp.grid.launch
    streams = theirs.rank == ours.rank and theirs.stream != ours.stream
    return f"no {'event, wait_stream, or ' * streams}release and acquire of sufficient scope between"


def _launches(event: GlobalUnordered) -> str:
    """Returns the lines of two launches, if they are known."""
    theirs, mine = event.owner.warp.grid.launch.work, event.agent.warp.grid.launch.work
    return f"; {mine.what}, after {theirs.what}" if theirs is not mine and theirs and mine else ""


RANKS: dict[str, Any] = {"ranks": 2}
CTAS: dict[str, Any] = {"shape": {"grid": (2, 1, 1)}}
WRITE = "st.global.b32 [%d11], %r0; bar.warp.sync -1; mov.b32 %r20, 1;"
READ = "ld.global.b32 %r21, [%d11]; st.global.b32 [%d11+4096], %r21;"
POLL = "P: {} %r22, [%d2]; setp.eq.u32 %p11, %r22, 0; @%p11 bra P;"
SEND = "@%p0 {} [%d2], %r20;"
GRID_WAIT, LET_GO = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
PDL: dict[str, Any] = {"dependent": (False, True), "shape": {"block": (64, 1, 1), "grid": (2, 1, 1)}}
AT = "mad.lo.u32 %r20, %r13, 256, %r3; cvt.u64.u32 %d20, %r20;"
AT += "add.s64 %d21, %d0, %d20; add.s64 %d22, %d1, %d20;"
SLOW = "mov.b32 %r30, 0; S: add.s32 %r30, %r30, 1; setp.lt.s32 %p20, %r30, 100; @%p20 bra S;"


def _flags() -> list[Pair]:
    """Returns releases and acquires, and their scopes, between ranks and between CTAs."""
    cases = []
    right = SEND.format("st.release.sys.global.b32"), POLL.format("ld.acquire.sys.global.b32")
    wrong = {
        "the flag is released at .gpu scope": (SEND.format("st.release.gpu.global.b32"), right[1]),
        "the flag is acquired at .gpu scope": (right[0], POLL.format("ld.acquire.gpu.global.b32")),
        "the flag is a relaxed store": (SEND.format("st.relaxed.sys.global.b32"), right[1]),
        "the flag is a relaxed reduction": (SEND.format("red.relaxed.sys.global.add.u32"), right[1]),
        "the flag is an ordinary store": (SEND.format("st.global.b32"), right[1]),
        "the flag is polled by a relaxed load": (right[0], POLL.format("ld.relaxed.sys.global.b32")),
        "the flag is polled by a volatile load": (right[0], POLL.format("ld.volatile.global.b32")),
        "the fence before the flag is of .gpu scope": (
            "fence.acq_rel.gpu;" + SEND.format("st.relaxed.sys.global.b32"), right[1],
        ),
        "the fence comes after the flag": (
            SEND.format("st.relaxed.sys.global.b32") + "fence.acq_rel.sys;", right[1],
        ),
    }  # fmt: skip
    for ranks, how in (("ranks", RANKS), ("CTAs", CTAS)):
        mine = "%p5" if ranks == "ranks" else "%p4"
        text = f"@!{mine} bra R; {WRITE} |S| bra E; R: |P| {READ} E:"
        for what, (send, poll) in wrong.items():
            if ranks == "CTAs" and ".gpu" in what:
                continue
            good = {"|S|": right[0], "|P|": right[1]}
            name = f"between {ranks}: {what}"
            cases.append(pair(name, "races", "race", text, {"|S|": send, "|P|": poll}, good, **how))
    return cases


def _data_is_flag() -> list[Pair]:
    """Returns payload that is polled for itself: strong accesses store and load it."""
    at = "mul.wide.u32 %d20, %r0, 16; add.s64 %d20, %d20, %d2; mov.b32 %r20, 7;"
    four = "{%r21, %r22, %r23, %r24}"
    texts = {
        "one word": ("st|S|.global.b32 [%d20], %r20;", "ld|L|.global.b32 %r24, [%d20];"),
        "a word and its flag": (
            "st|S|.global.v2.b32 [%d20], {%r0, %r20};", "ld|L|.global.v2.b32 {%r23, %r24}, [%d20];",
        ),
        "four words": (
            "st|S|.global.v4.b32 [%d20], {%r20, %r20, %r20, %r20};", f"ld|L|.global.v4.b32 {four}, [%d20];",
        ),
    }  # fmt: skip
    cases = []
    for what, (store, load) in texts.items():
        words = "%r24" if what == "one word" else "%r23" if what == "a word and its flag" else "%r21"
        body = f"""
        {at} @!%p5 bra R; {store} bra E;
        R: {load} setp.eq.u32 %p11, %r24, 0; @%p11 bra R; st.global.b32 [%d11], {words};
        E:
        """
        good = {"|S|": ".relaxed.sys", "|L|": ".relaxed.sys"}
        for side, name in (("|S|", "stored"), ("|L|", "polled")):
            cases.append(
                pair(f"data that is its own flag, {what}: {name} by ordinary accesses", "races", "race", body,
                     {**good, side: ""}, good, **RANKS)
            )  # fmt: skip
    word = "st.relaxed.sys.global.b32 [%d11], %r20;"
    body = """
    mov.b32 %r20, 7; @!%p5 bra R; |S| bra E;
    R: ld.relaxed.sys.global.b32 %r24, [%d11]; setp.eq.u32 %p11, %r24, 0; @%p11 bra R; E:
    """
    bulk = f"st.shared.b32 [%r12], %r20; {ptx.SHARED} bar.sync 0; {ptx.OUT}"
    name = "data that is its own flag, one word: stored by a bulk store"
    cases.append(pair(name, "races", "race", body, {"|S|": bulk}, {"|S|": word}, **RANKS))
    return cases


def _completion() -> list[Pair]:
    full = "cp.async.bulk.wait_group 0;"
    bulk = f"""
    @!%p5 bra R; st.shared.b32 [%r12], %r0; {ptx.SHARED} bar.sync 0;
    @!%p0 bra E; cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 128;
    cp.async.bulk.commit_group; |W| mov.b32 %r20, 1; {SEND.format("st.release.sys.global.b32")}
    {full} bra E;
    R: {POLL.format("ld.acquire.sys.global.b32")} {READ} E:
    """
    return [
        pair(f"a flag after a bulk store: {what}", "races", "race", bulk,
             {"|W|": words}, {"|W|": full}, **RANKS)
        for what, words in {
            "no wait": "", "a wait for the reads alone": "cp.async.bulk.wait_group.read 0;",
            "a wait that lets one group pend": "cp.async.bulk.wait_group 1;",
        }.items()
    ]  # fmt: skip


def _programmatic() -> list[Pair]:
    suite = "programmatic launch"
    add_one = "ld.global.b32 %r21, [%d21]; add.u32 %r21, %r21, 1; st.global.b32 [%d22], %r21;"
    produce = f"{AT} {LET_GO} {SLOW} {add_one}"
    consume = f"{AT} |B| ld.global.b32 %r21, [%d22]; |L| st.global.b32 [%d22+4096], %r21;"
    after = produce.replace(LET_GO, "") + LET_GO
    bulk_in = f"""
    {ptx.INIT} |B| @%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 256;
    @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d1], 256, [%r11];
    {ptx.AWAIT} ld.shared.b32 %r20, [%r12]; |L|
    """
    bulk_out = f"""
    {LET_GO} {SLOW} @!%p4 bra E; st.shared.b32 [%r12], %r0; {ptx.SHARED} bar.sync 0;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 256;
    @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0; E:
    """
    half = "setp.lt.u32 %p21, %r2, 33; @%p1 griddepcontrol.wait;"
    count = f"{LET_GO} {SLOW} red.global.add.u32 [%d2], %r0;"
    pairs: dict[str, tuple[tuple[str, str], dict[str, str]]] = {
        "no wait before what the first kernel wrote": ((produce, consume), {}),
        "no wait, and the first kernel lets go after its stores": ((after, consume), {}),
        "the wait comes after the load": ((produce, consume), {"|L|": GRID_WAIT}),
        "one warp waits, the other loads, with no barrier between": ((produce, consume), {"|B|": half}),
        "no wait before a bulk load": ((produce, bulk_in), {}),
        "no wait before a load of what a bulk store wrote": ((bulk_out, consume), {}),
        "no wait before a bulk load of what a bulk store wrote": ((bulk_out, bulk_in), {}),
        "no wait before the first kernel's input is overwritten": (
            (produce, f"{AT} |B| st.global.b32 [%d21], %r0; |L|"), {},
        ),
        "no wait before the first kernel's output is overwritten": (
            (produce, f"{AT} |B| st.global.b32 [%d22], %r0; |L|"), {},
        ),
        "no wait before a bulk store over the first kernel's input": (
            (produce, f"st.shared.b32 [%r12], %r0; {ptx.SHARED} bar.sync 0; |B| @!%p4 bra E;"
             "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r10], 256;"
             "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0; E: |L|"), {},
        ),
        "no wait before a counter of the first kernel is set to zero": (
            (count, "|B| mov.b32 %r20, 0; @%p4 st.global.b32 [%d2], %r20; |L|"), {},
        ),
    }  # fmt: skip
    cases = [
        pair(
            name,
            "programmatic launch",
            "race",
            bodies,
            {"|B|": "", "|L|": "", **wrong},
            {"|B|": GRID_WAIT, "|L|": ""},
            **PDL,
        )
        for name, (bodies, wrong) in pairs.items()
    ]
    last = f"{AT} {GRID_WAIT} ld.global.b32 %r21, [%d22]; st.global.b32 [%d22+4096], %r21;"
    third = (produce, f"|M| {LET_GO} {SLOW}", last)
    cases.append(
        pair("the kernel between does not wait for the first, which the third counts on", suite, "race",
             third, {"|M|": ""}, {"|M|": GRID_WAIT}, **{**PDL, "dependent": (False, True, True)})
    )  # fmt: skip
    full = (
        f"{LET_GO} P: ld.acquire.gpu.global.b32 %r20, [%d2]; setp.eq.u32 %p20, %r20, 0; @%p20 bra P;",
        "|B| mov.b32 %r20, 1; @%p0 red.release.gpu.global.add.u32 [%d2], %r20; |L|",
    )
    cases.append(
        pair("a kernel waits for the one that waits for its end", suite, "Deadlock", full,
             {"|B|": GRID_WAIT, "|L|": ""}, {"|B|": "", "|L|": ""}, **PDL)
    )  # fmt: skip
    return cases


RULE = Rule(
    KIND,
    judges=r"(ld|st|atom|red|multimem)\.(?!param|const|local|shared)|cp\.(reduce\.)?async",
    rows=(
        Row(
            "Conflicting accesses to global memory by two warps are ordered, or both strong at "
            "scopes that include each other (8.7, 8.10); payload that is its own flag "
            "(Lamport, LL) is stored and loaded by strong accesses",
            suite="races",
        ),
        Row(
            "A programmatic dependent launch may begin when all CTAs of the launch before it have "
            "executed `griddepcontrol.launch_dependents` or ended; only `griddepcontrol.wait`"
            " orders it after their accesses (9.7.13.13)",
            suite="programmatic launch",
        ),
    ),
    check="race",
    on={GlobalUnordered: _unordered},
    pairs=(*_flags(), *_data_is_flag(), *_completion(), *_programmatic()),
)
