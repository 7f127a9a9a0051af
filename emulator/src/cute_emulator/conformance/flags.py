"""Flags, data that is its own flag, and asynchronous completion (PTX ISA 8.7, 8.10, 9.7.9.25, 9.7.13)."""

from __future__ import annotations

from typing import Any

from cute_emulator.conformance.kernel import Case, pair
from cute_emulator.conformance.proxies import AWAIT, IN, INIT, OUT, SHARED

RANKS: dict[str, Any] = {"ranks": 2}
CTAS: dict[str, Any] = {"shape": {"grid": (2, 1, 1)}}
TWO: dict[str, Any] = {"shape": {"block": (64, 1, 1)}}
WRITE = "st.global.b32 [%d11], %r0; bar.warp.sync -1; mov.b32 %r20, 1;"
READ = "ld.global.b32 %r21, [%d11]; st.global.b32 [%d11+4096], %r21;"
POLL = "P: {} %r22, [%d2]; setp.eq.u32 %p11, %r22, 0; @%p11 bra P;"
SEND = "@%p0 {} [%d2], %r20;"


def _flags() -> list[Case]:
    """Release and acquire, and their scopes, between ranks and between CTAs."""
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


def _data_is_flag() -> list[Case]:
    """Payload that is polled for itself must be stored and loaded by strong accesses."""
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
    bulk = f"st.shared.b32 [%r12], %r20; {SHARED} bar.sync 0; {OUT}"
    name = "data that is its own flag, one word: stored by a bulk store"
    cases.append(pair(name, "races", "race", body, {"|S|": bulk}, {"|S|": word}, **RANKS))
    return cases


def _completion() -> list[Case]:
    full = "cp.async.bulk.wait_group 0;"
    bulk = f"""
    @!%p5 bra R; st.shared.b32 [%r12], %r0; {SHARED} bar.sync 0;
    @!%p0 bra E; cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 128;
    cp.async.bulk.commit_group; |W| mov.b32 %r20, 1; {SEND.format("st.release.sys.global.b32")}
    {full} bra E;
    R: {POLL.format("ld.acquire.sys.global.b32")} {READ} E:
    """
    cases = [
        pair(f"a flag after a bulk store: {what}", "races", "race", bulk,
             {"|W|": words}, {"|W|": full}, **RANKS)
        for what, words in {
            "no wait": "", "a wait for the reads alone": "cp.async.bulk.wait_group.read 0;",
            "a wait that lets one group pend": "cp.async.bulk.wait_group 1;",
        }.items()
    ]  # fmt: skip
    again = f"st.shared.b32 [%r12], %r0; {SHARED} bar.sync 0; {OUT} |W| bar.sync 0;"
    again += "st.shared.b32 [%r12], %r1;"
    again = again.replace("@%p0 cp.async.bulk.wait_group 0;", "")
    cases.append(
        pair("a stage is overwritten while a bulk store may read it", "races", "shared-race",
             again + f"@%p0 {full}", {"|W|": ""}, {"|W|": "@%p0 cp.async.bulk.wait_group.read 0;"}, **TWO)
    )  # fmt: skip
    late = AWAIT.replace("W:", "V:").replace("bra W;", "bra V;")
    load = f"{INIT} {IN} |W| ld.shared.b32 %r21, [%r12]; st.global.b32 [%d11], %r21; {late}"
    cases.append(
        pair("a bulk load is awaited with a barrier instead of its mbarrier", "races", "shared-race",
             load, {"|W|": "bar.sync 0;"}, {"|W|": AWAIT}, **TWO)
    )  # fmt: skip
    refill = f"""
    {INIT} {IN} {AWAIT} ld.shared.b32 %r21, [%r12]; |W|
    {IN} V: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 1; @!%p10 bra V;
    """
    cases.append(
        pair("a stage is filled again before its readers are done", "races", "shared-race", refill,
             {"|W|": ""}, {"|W|": "bar.sync 0;"}, **TWO)
    )  # fmt: skip
    copied = """
    mul.wide.u32 %d20, %r0, 16; add.s64 %d20, %d20, %d0; shl.b32 %r21, %r0, 4; add.s32 %r21, %r21, %r10;
    cp.async.cg.shared.global [%r21], [%d20], 16; cp.async.commit_group;
    cp.async.cg.shared.global [%r21+1024], [%d20], 16; cp.async.commit_group;
    cp.async.wait_group |N|; bar.sync 0; xor.b32 %r22, %r21, 512; ld.shared.b32 %r23, [%r22+1024];
    cp.async.wait_group 0;
    """
    cases.append(
        pair("cp.async: one group less is waited for", "races", "shared-race", copied,
             {"|N|": "1"}, {"|N|": "0"}, **TWO)
    )  # fmt: skip
    return cases


CASES = [*_flags(), *_data_is_flag(), *_completion()]
