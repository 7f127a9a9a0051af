"""The rule `proxy-fence`."""

from __future__ import annotations

from typing import Any

from cute_emulator import source
from cute_emulator.machine.conflicts import GlobalUnfenced, SharedUnfenced
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "proxy-fence"


def _in_global(checks: Any, event: GlobalUnfenced) -> None:
    theirs = event.owner.warp.grid.program.module.text
    checks.report.add(
        KIND,
        f"no fence.proxy.async between: the async {event.verb} of line {checks.report.place(event.line)} by "
        f"{event.agent.warp} {event.verb}s {event.spot}, which {event.owner.warp} wrote in line "
        f"{source.place(theirs, event.first)} through the generic proxy",
        event.line,
        key=(event.line, event.first, event.verb),
        other=event.first,
        other_ptx=theirs,
    )


def _in_shared(checks: Any, event: SharedUnfenced) -> None:
    checks.report.add(
        KIND,
        f"no fence.proxy.async between: {event.what} of line {checks.report.place(event.line)}, issued by "
        f"{event.warp}, {'reads' if event.is_read else 'writes'} shared {event.at:#x}"
        f"{event.cta.called(event.at)} of {event.cta}, which {event.writer} wrote "
        f"{'with cp.async' if event.is_copy else 'through the generic proxy'}",
        event.line,
    )


GLOBAL = "fence.proxy.async.global;"
COPIED = (
    "mul.wide.u32 %d20, %r0, 16; add.s64 %d20, %d20, %d0; shl.b32 %r21, %r0, 4; add.s32 %r21, %r21, %r10;"
)
COPIED += "cp.async.cg.shared.global [%r21], [%d20], 16; cp.async.commit_group;"


def _stores() -> list[Pair]:
    """Returns a generic store, a fence, and an async unit that reads; the fence comes after the store."""
    rule = "proxy-fence: read"
    readers: dict[str, tuple[str, str, dict[str, Any]]] = {
        "a bulk store": (ptx.OUT, ptx.SHARED, {"shape": ptx.TWO}),
        "a TMA store": (
            ptx.TENSOR_OUT,
            ptx.SHARED,
            {"shape": ptx.TWO, "tensor_map": ptx.rows_map},
        ),
        "a bulk reduction": (ptx.REDUCE_OUT, ptx.SHARED, {"shape": ptx.TWO}),
        "a wgmma": (
            ptx.DESCRIPTOR + ptx.WGMMA,
            ptx.SHARED,
            {"shape": ptx.FOUR, "arch": "sm_90a", "buf": 8192},
        ),
    }
    cases = []
    for what, (read, fence, how) in readers.items():
        text = ptx.INIT + f"|A| {ptx.STORE} |Z| bar.sync 0; {read}"
        for variant, words in {
            "no fence": {"|A|": "", "|Z|": ""},
            "the fence stands before the store": {"|A|": fence, "|Z|": ""},
            "the fence is of global memory": {"|A|": "", "|Z|": GLOBAL},
            "the fence is of one warp, without a barrier": {"|A|": f"@%p1 {fence}", "|Z|": ""},
        }.items():
            good = {"|A|": "", "|Z|": fence}
            cases.append(
                pair(f"{what} reads a store: {variant}", rule, "proxy-fence", text, words, good, **how)
            )
        half = ptx.INIT + f"@%p1 {ptx.STORE} |A| @%p2 {ptx.STORE} |Z| bar.sync 0; {read}"
        cases.append(
            pair(f"{what} reads two stores: the fence stands between", rule, "proxy-fence", half,
                 {"|A|": fence, "|Z|": ""}, {"|A|": "", "|Z|": fence}, **how)
        )  # fmt: skip
        loop = (
            ptx.INIT
            + f"""
        mov.b32 %r30, 0;
        L: |A| {ptx.STORE} |Z| bar.sync 0; {read} bar.sync 0;
        add.s32 %r30, %r30, 1; setp.lt.s32 %p12, %r30, 3; @%p12 bra L;
        """
        )
        cases.append(
            pair(f"{what} in a loop: the fence stands before the stores", rule, "proxy-fence", loop,
                 {"|A|": fence, "|Z|": ""}, {"|A|": "", "|Z|": fence}, **how)
        )  # fmt: skip
        late = ptx.INIT + f"{ptx.STORE} bar.sync 0; |A| {read}"
        fixed = {"|A|": f"@%p0 {fence}" if "wgmma" not in what else fence}
        cases.append(
            pair(f"{what} reads a store: no fence on the reader's side", rule, "proxy-fence", late,
                 {"|A|": ""}, fixed, **how)
        )  # fmt: skip
    return cases


def _global_reads() -> list[Pair]:
    """Returns the same through global memory: a store, and a bulk load that reads it."""
    rule = "proxy-fence: read"
    text = ptx.INIT + f"|A| st.global.b32 [%d10], %r0; |Z| bar.sync 0; {ptx.IN} {ptx.AWAIT}"
    good = {"|A|": "", "|Z|": GLOBAL}
    cases = [
        pair(f"a bulk load reads a store to global memory: {variant}", rule, "proxy-fence", text, words, good,
             shape=ptx.TWO)
        for variant, words in {
            "no fence": {"|A|": "", "|Z|": ""},
            "the fence stands before the store": {"|A|": GLOBAL, "|Z|": ""},
            "the fence is of shared memory": {"|A|": "", "|Z|": ptx.SHARED},
        }.items()
    ]  # fmt: skip
    across = f"""
    @!%p4 bra READ;
    |A| st.global.b32 [%d10], %r0; |Z| bar.sync 0; {ptx.FLAG} bra END;
    READ: {ptx.INIT} {ptx.ACQUIRE} |C| bar.sync 0; {ptx.IN} {ptx.AWAIT}
    END:
    """
    for variant, words in {
        "no fence": {"|A|": "", "|Z|": "", "|C|": ""},
        "the fence stands before the store": {"|A|": GLOBAL, "|Z|": "", "|C|": ""},
    }.items():
        for side in ("writer", "reader"):
            fixed = {"|A|": "", "|Z|": "", "|C|": ""} | {{"writer": "|Z|", "reader": "|C|"}[side]: GLOBAL}
            cases.append(
                pair(f"a bulk load of another CTA: {variant} (fixed at the {side})", rule, "proxy-fence",
                     across, words, fixed, shape={**ptx.TWO, **ptx.PEER_CTA})
            )  # fmt: skip
    return cases


def _overwrites() -> list[Pair]:
    """Returns a generic store, and an async copy that writes the same place after it."""
    rule, cases = "proxy-fence: write", []
    words = {
        "no fence": {"|A|": "", "|Z|": ""},
        "the fence stands before the store": {"|A|": ptx.SHARED, "|Z|": ""},
        "the fence is of global memory": {"|A|": "", "|Z|": GLOBAL},
    }
    loads: dict[str, tuple[str, dict[str, Any]]] = {
        "a bulk load": (ptx.IN, {}),
        "a TMA load": (ptx.TENSOR_IN, {"tensor_map": ptx.rows_map}),
    }
    for what, (load, also) in loads.items():
        text = ptx.INIT + f"|A| {ptx.STORE} |Z| bar.sync 0; {load} {ptx.AWAIT} ld.shared.b32 %r20, [%r12];"
        for variant, wrong in words.items():
            name = f"{what} overwrites a store: {variant}"
            good = {"|A|": "", "|Z|": ptx.SHARED}
            cases.append(pair(name, rule, "proxy-fence", text, wrong, good, shape=ptx.TWO, **also))
    stage = f"""
    mov.b32 %r30, 0; mov.b32 %r31, 0;
    L: @%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 256;
    @%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d0], 256, [%r11];
    W: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], %r31; @!%p10 bra W; xor.b32 %r31, %r31, 1;
    ld.shared.b32 %r20, [%r12]; add.s32 %r20, %r20, 1; {ptx.STORE} |Z| bar.sync 0;
    add.s32 %r30, %r30, 1; setp.lt.s32 %p12, %r30, 3; @%p12 bra L;
    """
    cases.append(
        pair("a stage that is changed in place is filled again", rule, "proxy-fence", ptx.INIT + stage,
             {"|Z|": ""}, {"|Z|": ptx.SHARED}, shape=ptx.TWO)
    )  # fmt: skip
    writers = {
        "a bulk store": ptx.OUT,
        "a bulk reduction": ptx.REDUCE_OUT,
        "a TMA reduction": ptx.TENSOR_REDUCE,
    }
    zeroes = f"mov.b32 %r20, 0; {ptx.STORE} {ptx.SHARED} |A| st.global.b32 [%d11], %r20; |Z| bar.sync 0;"
    for what, write in writers.items():
        for variant, wrong in {
            "no fence": {"|A|": "", "|Z|": ""},
            "the fence stands before the store": {"|A|": GLOBAL, "|Z|": ""},
            "the fence is of shared memory": {"|A|": "", "|Z|": ptx.SHARED},
        }.items():
            good = {"|A|": "", "|Z|": GLOBAL}
            name = f"{what} after a store of zeroes: {variant}"
            how: dict[str, Any] = {"tensor_map": ptx.rows_map} if "TMA" in what else {}
            cases.append(pair(name, rule, "proxy-fence", zeroes + write, wrong, good, shape=ptx.TWO, **how))
    across = f"""
    mov.b32 %r20, 0; {ptx.STORE} {ptx.SHARED} bar.sync 0;
    @!%p4 bra ADD;
    st.global.b32 [%d11], %r20; |Z| bar.sync 0; {ptx.FLAG} bra END;
    ADD: {ptx.ACQUIRE} |C| bar.sync 0; {ptx.REDUCE_OUT}
    END:
    """
    for side in ("writer", "reader"):
        good = {"|Z|": "", "|C|": ""} | {{"writer": "|Z|", "reader": "|C|"}[side]: GLOBAL}
        cases.append(
            pair(f"another CTA adds to zeroes that a CTA stored (fixed at the {side})", rule, "proxy-fence",
                 across, {"|Z|": "", "|C|": ""}, good, shape={**ptx.TWO, **ptx.PEER_CTA})
        )  # fmt: skip
    return cases


def _cp_async() -> list[Pair]:
    """Returns async units that read what `cp.async` wrote: after a wait and a fence."""
    rule, cases = "proxy-fence: cp.async", []
    readers: dict[str, tuple[str, dict[str, Any]]] = {
        "a bulk store": (ptx.OUT, {"shape": ptx.TWO}),
        "a wgmma": (
            ptx.DESCRIPTOR + ptx.WGMMA,
            {"shape": ptx.FOUR, "arch": "sm_90a", "buf": 8192},
        ),
    }
    for what, (read, how) in readers.items():
        text = f"{COPIED} |A| cp.async.wait_group 0; |Z| bar.sync 0; {read}"
        for variant, wrong in {
            "no fence": {"|A|": "", "|Z|": ""},
            "the fence stands before the wait": {"|A|": ptx.SHARED, "|Z|": ""},
        }.items():
            good = {"|A|": "", "|Z|": ptx.SHARED}
            name = f"{what} reads what cp.async copied: {variant}"
            cases.append(pair(name, rule, "proxy-fence", text, wrong, good, **how))
        count = how["shape"]["block"][0]
        awaited = (
            ptx.INIT.replace(", 1;", f", {count};")
            + f"""
        {COPIED} cp.async.mbarrier.arrive.noinc.shared.b64 [%r11]; {ptx.AWAIT} |Z| bar.sync 0; {read}
        """
        )
        name = f"{what} reads what cp.async copied, awaited at an mbarrier: no fence"
        cases.append(pair(name, rule, "proxy-fence", awaited, {"|Z|": ""}, {"|Z|": ptx.SHARED}, **how))
    return cases


RULE = Rule(
    KIND,
    judges=r"cp\.(reduce\.)?async|wgmma\.mma_async|tcgen05\.(mma|cp)",
    rows=(
        Row(
            "An async unit reads (bulk and TMA stores, loads of global memory, wgmma, "
            "tcgen05.mma and .cp) what ordinary stores wrote only if a `fence.proxy.async` of "
            "its space follows the stores, in the writer or in the reader (8.6,"
            " 8.7, 9.7.13.4)",
            suite="proxy-fence: read",
        ),
        Row(
            "An async copy overwrites (bulk and TMA loads into shared memory; bulk and TMA "
            "stores and reductions into global memory) what ordinary stores wrote only after such a fence",
            suite="proxy-fence: write",
        ),
        Row(
            "`cp.async` writes through the generic proxy: async units read its data after its "
            "wait *and then* a fence (9.7.9.25.3)",
            suite="proxy-fence: cp.async",
        ),
    ),
    check="proxy",
    on={GlobalUnfenced: _in_global, SharedUnfenced: _in_shared},
    pairs=(*_stores(), *_global_reads(), *_overwrites(), *_cp_async()),
)
