"""The end of a run: allocations of tensor memory that wait for each other."""

from __future__ import annotations

from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "tensor-columns"


MEET_OTHER = """
bar.sync 0; mov.b32 %r20, 1; @%p0 red.release.gpu.global.add.u32 [%d2], %r20;
Q: ld.acquire.gpu.global.b32 %r21, [%d2]; setp.lt.u32 %p11, %r21, |C|; @%p11 bra Q;
"""


def _pairs() -> list[Pair]:
    cases = [
        pair(f"{count} CTAs of an SM take {n} columns each and meet", "columns of an SM", "Deadlock",
             ptx.ALLOC + MEET_OTHER.replace("|C|", str(count)) + ptx.FREE, {"|N|": str(n)},
             {"|N|": str(good)},
             shape={**ptx.FOUR, "grid": (count, 1, 1)}, options={"num_sms": 1})
        for count, n, good in ((2, 512, 256), (3, 256, 128), (5, 128, 64))
    ]  # fmt: skip
    both = f"""
    {ptx.ALLOC.replace("|N|", "256")} bar.sync 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], |N|;
    bar.sync 0; ld.shared.b32 %r31, [slot]; bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r31, |N|;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 256;
    """
    cases.append(
        pair("a CTA takes more columns than there are", "columns of an SM", "Deadlock", both,
             {"|N|": "512"}, {"|N|": "256"}, shape=ptx.FOUR)
    )  # fmt: skip
    return cases


RULE = Rule(
    KIND,
    judges="",
    rows=(
        Row(
            "The CTAs of an SM share its 512 columns of tensor memory (9.7.16.1): an allocation "
            "waits for another CTA's dealloc",
            suite="columns of an SM",
        ),
    ),
    pairs=tuple(_pairs()),
    ends="deadlock",
)
