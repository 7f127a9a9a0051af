"""The rule `tmem-fence`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import TensorUnfenced
from cute_emulator.rules.ptx import ALLOC, AWAIT, COMMIT, FREE, INIT, LOAD, MMA, READY_SM100, SM100
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "tmem-fence"


def _look(checks: Any, event: TensorUnfenced) -> None:
    place = checks.report.place
    missing = "after_thread_sync before this" if event.has_before else "before_thread_sync after that"
    checks.report.add(
        KIND,
        f"no tcgen05.fence::{missing} between: line {place(event.line)} of {event.agent.warp} uses tensor "
        f"memory that {event.party.what} used in line {place(event.first)}",
        event.line,
        key=(event.line, event.first),
        other=event.first,
    )


BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"


def _pairs() -> list[Pair]:
    """Returns `tcgen05.fence` around a barrier, an mbarrier and a flag between two warps."""
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
    fences = {"|B|": BEFORE, "|A|": AFTER, "|E|": BEFORE}
    five: dict[str, Any] = {"shape": {"block": (160, 1, 1)}, "buf": 8192}
    for what, link in links.items():
        link = f"bar.warp.sync -1; {link}" if "mbarrier" in what else link
        text = f"{INIT} {ALLOC.replace('|N|', '32')} {at} {store} |B| {link} |A| {use} {done}"
        for missing in ("|B|", "|A|"):
            side = "before" if missing == "|B|" else "after"
            name = f"tensor memory handed over at {what}: no fence {side} the synchronisation"
            cases.append(pair(name, rule, "tmem-fence", text, {**fences, missing: ""}, fences, **five))
        name = f"tensor memory handed over at {what}: no fence at all"
        cases.append(
            pair(name, rule, "tmem-fence", text, dict.fromkeys(fences, ""), fences, strict=True, **five)
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


RULE = Rule(
    KIND,
    judges=r"tcgen05\.(ld|st|mma|cp|dealloc)",
    rows=(
        Row(
            "Two threads use tensor memory with `tcgen05.fence::before_thread_sync` after "
            "the first use and `::after_thread_sync` before the second (9.7.16.6.3). By default: if "
            "the first fence is present; throughout a kernel that has an after-fence anywhere; "
            "before a dealloc, in a kernel that has any fence. NVIDIA's CuTe DSL GEMMs have"
            " none, which is accepted",
            suite="tcgen05.fence",
            setting="default, in full: `--also tmem-fence`",
        ),
    ),
    check="shared",
    in_full="tmem-fence",
    on={TensorUnfenced: _look},
    pairs=tuple(_pairs()),
)
