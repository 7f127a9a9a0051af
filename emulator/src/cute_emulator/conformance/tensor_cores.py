"""Tensor cores: registers, accumulators, who commits what, columns and registers to share out."""

from __future__ import annotations

from typing import Any

from cute_emulator.conformance.kernel import Case, pair
from cute_emulator.conformance.proxies import DESCRIPTOR, FOUR, INIT, SHARED

SM90: dict[str, Any] = {"arch": "sm_90a", "shape": FOUR, "buf": 8192}
READY = f"mov.b32 %r20, 0; st.shared.b32 [%r12], %r20; {SHARED} bar.sync 0; {DESCRIPTOR}"
FENCE = "wgmma.fence.sync.aligned;"
END = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
SS = """
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d20, %d20, |S|, 1, 1, 0, 0;
"""
RS = """
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {%f0, %f1, %f2, %f3}, {%r31, %r32, %r33, %r34}, %d20, |S|, 1, 1, 0;
"""
A = "mov.b32 %r31, 0; mov.b32 %r32, %r0; mov.b32 %r33, 0; mov.b32 %r34, %r0;"
ZERO = "mov.b32 %f0, 0f00000000; mov.b32 %f1, 0f00000000; mov.b32 %f2, 0f00000000; mov.b32 %f3, 0f00000000;"
USE = "st.global.f32 [%d11], %f0;"


def _wgmma() -> list[Case]:
    first, again = SS.replace("|S|", "0"), SS.replace("|S|", "1")
    rs, rs_again = RS.replace("|S|", "0"), RS.replace("|S|", "1")
    fences = {
        "before the first": f"{READY} |F| {first} {END} {WAIT} {USE}",
        "after zeroes for the accumulator": f"{READY} {ZERO} |F| {again} {END} {WAIT} {USE}",
        "after the accumulator was changed": f"""
            {READY} {FENCE} {first} {END} {WAIT} add.f32 %f1, %f1, 0f3F800000; |F| {again} {END} {WAIT} {USE}
        """,
        "before A in registers": f"{READY} {A} |F| {rs} {END} {WAIT} {USE}",
        "after A was loaded anew": f"""
            {READY} {A} {FENCE} {rs} {END} {WAIT} add.u32 %r32, %r32, 1; |F| {rs_again} {END} {WAIT} {USE}
        """,
        "in a loop that promotes": f"""
            {READY} {FENCE} mov.b32 %r40, 0; mov.b32 %f8, 0f00000000;
            L: {first} {END} {WAIT} add.f32 %f8, %f8, %f0;
            add.s32 %r40, %r40, 1; |F| setp.lt.s32 %p12, %r40, 3; @%p12 bra L; {USE}
        """,
    }
    cases = [
        pair(
            f"no wgmma.fence {where}", "wgmma.fence", "wgmma-fence", text, {"|F|": ""}, {"|F|": FENCE}, **SM90
        )
        for where, text in fences.items()
    ]
    changed = {
        "a move into A": (f"{READY} {A} {FENCE} {rs} {END} |B| mov.b32 %r32, 5; |G| {USE}", ""),
        "arithmetic on A": (f"{READY} {A} {FENCE} {rs} {END} |B| add.u32 %r33, %r33, 9; |G| {USE}", ""),
        "a load into A": (
            f"""{READY} {A} {FENCE} {rs} {END} |B|
            ld.shared.b32 %r31, [%r12]; add.u32 %r31, %r31, 7; |G| {USE}""",
            "",
        ),
        "A of two groups, of which the first was waited for": (
            f"""{READY} {A} mov.b32 %r41, 1; mov.b32 %r42, 1; {FENCE} {rs} {END}
            {RS.replace("|S|", "0").replace("%f", "%f1").replace("%r31", "%r41")} {END} |B|
            mov.b32 %r41, 7; |G| {USE}""",
            "wgmma.wait_group.sync.aligned 1;",
        ),
        "a move into D": (f"{READY} {FENCE} {first} {END} |B| mov.b32 %f2, 0f3F800000; |G| {USE}", ""),
        "A before the group is committed": (f"{READY} {A} {FENCE} {rs} |C| mov.b32 %r32, 5; |G| {USE}", ""),
    }  # fmt: skip
    later = "xor.b32 %r43, %r31, %r32; xor.b32 %r43, %r43, %r33; xor.b32 %r43, %r43, %r41;"
    later += "st.global.b32 [%d12], %r43; st.global.f32 [%d11+2048], %f2;"
    for what, (text, early) in changed.items():
        text += later
        wrong = {"|B|": early, "|C|": "", "|G|": f"{END if '|C|' in text else ''} {WAIT}"}
        good = {"|B|": WAIT, "|C|": END + WAIT, "|G|": ""}
        name = f"registers of a wgmma in flight: {what}"
        cases.append(pair(name, "wgmma registers", "wgmma-registers", text, wrong, good, **SM90))
    return cases


ALLOC = """
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], |N|;
bar.sync 0; ld.shared.b32 %r30, [slot];
"""
FREE = "bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, |N|;"
UMMA = """
shr.u32 %r20, %r10, 4; cvt.u64.u32 %d20, %r20; or.b64 %d20, %d20, 0x4000400800010000;
mov.b32 %r21, 0x4080490; setp.ne.b32 %p14, %r0, %r0;
"""
READY_SM100 = f"""
mov.b32 %r20, 0; mov.b32 %r22, %r12; add.s32 %r23, %r10, 8192;
Z: st.shared.b32 [%r22], %r20; add.s32 %r22, %r22, 512; setp.lt.u32 %p13, %r22, %r23; @%p13 bra Z;
{SHARED} {INIT} {ALLOC.replace("|N|", "32")} {UMMA}
"""
MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r30], %d20, %d20, %r21, %p14;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r11];"
AWAIT = "W: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 0; @!%p10 bra W;"
LOAD = """
shl.b32 %r31, %r1, 21; add.s32 %r31, %r31, %r30;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r32}, [%r31]; tcgen05.wait::ld.sync.aligned;
st.global.b32 [%d11], %r32;
"""
SM100: dict[str, Any] = {"shape": FOUR, "buf": 8192}
LANE1 = "setp.eq.b32 %p15, %r0, 1;"


def _tcgen05() -> list[Case]:
    done = FREE.replace("|N|", "32")
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
    whole = f"{READY_SM100} |I| {MMA} |C| {COMMIT} {AWAIT} {LOAD} {done}"
    cases.append(
        pair("a whole warp issues a product", "one for each lane", "shared-race", whole,
             {"|I|": "@%p1", "|C|": "@%p0"}, {"|I|": "@%p0", "|C|": "@%p0"}, **SM100)
    )  # fmt: skip
    twice = whole.replace("[%r11], 1;", "[%r11], |N|;")
    cases.append(
        pair("a whole warp commits, where one arrival is expected", "one for each lane",
             "exit-pending Deadlock EmulatorError shared-race", twice,
             {"|I|": "@%p0", "|C|": "@%p1", "|N|": "31"},
             {"|I|": "@%p0", "|C|": "@%p0", "|N|": "1"}, **SM100)
    )  # fmt: skip
    load = f"""
    {INIT} |L| mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 256; bar.sync 0;
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


MEET_OTHER = """
bar.sync 0; mov.b32 %r20, 1; @%p0 red.release.gpu.global.add.u32 [%d2], %r20;
Q: ld.acquire.gpu.global.b32 %r21, [%d2]; setp.lt.u32 %p11, %r21, |C|; @%p11 bra Q;
"""


def _columns() -> list[Case]:
    cases = [
        pair(f"{count} CTAs of an SM take {n} columns each and meet", "columns of an SM", "Deadlock",
             ALLOC + MEET_OTHER.replace("|C|", str(count)) + FREE, {"|N|": str(n)}, {"|N|": str(good)},
             shape={**FOUR, "grid": (count, 1, 1)}, options={"num_sms": 1})
        for count, n, good in ((2, 512, 256), (3, 256, 128), (5, 128, 64))
    ]  # fmt: skip
    both = f"""
    {ALLOC.replace("|N|", "256")} bar.sync 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], |N|;
    bar.sync 0; ld.shared.b32 %r31, [slot]; bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r31, |N|;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 256;
    """
    cases.append(
        pair("a CTA takes more columns than there are", "columns of an SM", "Deadlock", both,
             {"|N|": "512"}, {"|N|": "256"}, shape=FOUR)
    )  # fmt: skip
    return cases


TWO_GROUPS: dict[str, Any] = {"shape": {"block": (256, 1, 1)}, "arch": "sm_90a"}
GROUP0 = "setp.lt.u32 %p13, %r0, 128;"


def _registers() -> list[Case]:
    rule = "setmaxnreg"
    by_group = f"""
    {GROUP0} @%p13 bra A;
    setmaxnreg.dec.sync.aligned.u32 |D|; bra B; A: setmaxnreg.inc.sync.aligned.u32 |I|; B:
    """
    cases = [
        pair(f"a warpgroup asks for {more} registers, where the other keeps {less} of 128", rule, "Deadlock",
             by_group, {"|D|": str(less), "|I|": str(more)}, {"|D|": str(less), "|I|": str(right)},
             head=".maxnreg 128", **TWO_GROUPS)
        for less, more, right in ((40, 224, 216), (96, 168, 160), (24, 240, 232))
    ]  # fmt: skip
    never = f"{GROUP0} @%p13 bra A; |D| bra B; A: setmaxnreg.inc.sync.aligned.u32 152; B:"
    cases.append(
        pair("nobody gives registers back", rule, "Deadlock", never, {"|D|": ""},
             {"|D|": "setmaxnreg.dec.sync.aligned.u32 104;"}, head=".maxnreg 128", **TWO_GROUPS)
    )  # fmt: skip
    one = "setp.eq.b32 %p13, %r1, 5; setp.ge.u32 %p14, %r1, 4; |P| setmaxnreg.dec.sync.aligned.u32 64;"
    cases += [
        pair(f"{who} of a warpgroup executes setmaxnreg", rule, "setmaxnreg", text, {"|P|": words},
             {"|P|": "@%p14"}, head=".maxnreg 128", **TWO_GROUPS)
        for who, words, text in (
            ("one warp", "@%p13", one),
            ("all but one warp", "@%p13", one.replace("eq.b32 %p13, %r1, 5", "gt.u32 %p13, %r1, 4")),
        )
    ]  # fmt: skip
    amounts = "setp.eq.b32 %p13, %r1, 5; @%p13 bra A; setmaxnreg.dec.sync.aligned.u32 64; bra B;"
    amounts += "A: setmaxnreg.dec.sync.aligned.u32 |N|; B:"
    cases.append(
        pair("the warps of a warpgroup ask for different numbers of registers", rule, "setmaxnreg", amounts,
             {"|N|": "56"}, {"|N|": "64"}, head=".maxnreg 128", **TWO_GROUPS)
    )  # fmt: skip
    return cases


BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"


def _fences() -> list[Case]:
    """`tcgen05.fence` around a barrier, an mbarrier and a flag between two warps."""
    rule, cases = "tcgen05.fence", []
    at = "mov.b32 %r31, %r30;"
    store = "@%p1 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%r0}; @%p1 tcgen05.wait::st.sync.aligned;"
    use = "setp.eq.b32 %p13, %r1, 4; @%p13 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r32}, [%r31];"
    use += "@%p13 tcgen05.wait::ld.sync.aligned;"
    done = f"|E| {FREE.replace('|N|', '32')}"
    links = {
        "a barrier": "bar.sync 0;",
        "an mbarrier": f"@%p0 mbarrier.arrive.shared.b64 %d8, [%r11]; {AWAIT}",
        "an mbarrier, relaxed, with fences": (
            f"@%p0 fence.acq_rel.cta; @%p0 mbarrier.arrive.release.cta.shared::cta.b64 %d8, [%r11];{AWAIT}"
        ),
    }
    whole = {"|B|": BEFORE, "|A|": AFTER, "|E|": BEFORE}
    five: dict[str, Any] = {"shape": {"block": (160, 1, 1)}, "buf": 8192}
    for what, link in links.items():
        link = f"bar.warp.sync -1; {link}" if "mbarrier" in what else link
        text = f"{INIT} {ALLOC.replace('|N|', '32')} {at} {store} |B| {link} |A| {use} {done}"
        for missing in ("|B|", "|A|"):
            side = "before" if missing == "|B|" else "after"
            name = f"tensor memory handed over at {what}: no fence {side} the synchronisation"
            cases.append(pair(name, rule, "tmem-fence", text, {**whole, missing: ""}, whole, **five))
        name = f"tensor memory handed over at {what}: no fence at all"
        cases.append(
            pair(name, rule, "tmem-fence", text, dict.fromkeys(whole, ""), whole, strict=True, **five)
        )
    product = f"{READY_SM100} @%p0 {MMA} @%p0 {COMMIT} {AWAIT} |A| {LOAD} |E| {FREE.replace('|N|', '32')}"
    fenced = {"|A|": AFTER, "|E|": BEFORE}
    cases.append(
        pair("an accumulator is freed with no fence before the barrier", rule, "tmem-fence", product,
             {**fenced, "|E|": ""}, fenced, **SM100)
    )  # fmt: skip
    cases.append(
        pair("an accumulator is read with no fence after the wait", rule, "tmem-fence", product,
             {**fenced, "|A|": ""}, fenced, strict=True, **SM100)
    )  # fmt: skip
    return cases


CASES = [*_fences(), *_wgmma(), *_tcgen05(), *_columns(), *_registers()]
