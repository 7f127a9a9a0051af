"""Programmatic dependent launches (PTX ISA 9.7.13.13)."""

from __future__ import annotations

from typing import Any

from cute_emulator.conformance.kernel import Case, pair
from cute_emulator.conformance.proxies import AWAIT, INIT, SHARED

RULE = "programmatic launch"
WAIT, LET_GO = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
PDL: dict[str, Any] = {"dependent": (False, True), "shape": {"block": (64, 1, 1), "grid": (2, 1, 1)}}
AT = "mad.lo.u32 %r20, %r13, 256, %r3; cvt.u64.u32 %d20, %r20;"
AT += "add.s64 %d21, %d0, %d20; add.s64 %d22, %d1, %d20;"
SLOW = "mov.b32 %r30, 0; S: add.s32 %r30, %r30, 1; setp.lt.s32 %p20, %r30, 100; @%p20 bra S;"


def _cases() -> list[Case]:
    add_one = "ld.global.b32 %r21, [%d21]; add.u32 %r21, %r21, 1; st.global.b32 [%d22], %r21;"
    produce = f"{AT} {LET_GO} {SLOW} {add_one}"
    consume = f"{AT} |B| ld.global.b32 %r21, [%d22]; |L| st.global.b32 [%d22+4096], %r21;"
    after = produce.replace(LET_GO, "") + LET_GO
    bulk_in = f"""
    {INIT} |B| @%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 256;
    @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d1], 256, [%r11];
    {AWAIT} ld.shared.b32 %r20, [%r12]; |L|
    """
    bulk_out = f"""
    {LET_GO} {SLOW} @!%p4 bra E; st.shared.b32 [%r12], %r0; {SHARED} bar.sync 0;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 256;
    @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0; E:
    """
    half = "setp.lt.u32 %p21, %r2, 33; @%p1 griddepcontrol.wait;"
    count = f"{LET_GO} {SLOW} red.global.add.u32 [%d2], %r0;"
    pairs: dict[str, tuple[tuple[str, str], dict[str, str]]] = {
        "no wait before what the first kernel wrote": ((produce, consume), {}),
        "no wait, and the first kernel lets go after its stores": ((after, consume), {}),
        "the wait comes after the load": ((produce, consume), {"|L|": WAIT}),
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
            (produce, f"st.shared.b32 [%r12], %r0; {SHARED} bar.sync 0; |B| @!%p4 bra E;"
             "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r10], 256;"
             "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0; E: |L|"), {},
        ),
        "no wait before a counter of the first kernel is set to zero": (
            (count, "|B| mov.b32 %r20, 0; @%p4 st.global.b32 [%d2], %r20; |L|"), {},
        ),
    }  # fmt: skip
    cases = [
        pair(name, RULE, "race", bodies, {"|B|": "", "|L|": "", **wrong}, {"|B|": WAIT, "|L|": ""}, **PDL)
        for name, (bodies, wrong) in pairs.items()
    ]
    last = f"{AT} {WAIT} ld.global.b32 %r21, [%d22]; st.global.b32 [%d22+4096], %r21;"
    third = (produce, f"|M| {LET_GO} {SLOW}", last)
    cases.append(
        pair("the kernel between does not wait for the first, which the third counts on", RULE, "race", third,
             {"|M|": ""}, {"|M|": WAIT}, **{**PDL, "dependent": (False, True, True)})
    )  # fmt: skip
    full = (
        f"{LET_GO} P: ld.acquire.gpu.global.b32 %r20, [%d2]; setp.eq.u32 %p20, %r20, 0; @%p20 bra P;",
        "|B| mov.b32 %r20, 1; @%p0 red.release.gpu.global.add.u32 [%d2], %r20; |L|",
    )
    cases.append(
        pair("a kernel waits for the one that waits for its end", RULE, "Deadlock", full,
             {"|B|": WAIT, "|L|": ""}, {"|B|": "", "|L|": ""}, **PDL)
    )  # fmt: skip
    return cases


CASES = _cases()
