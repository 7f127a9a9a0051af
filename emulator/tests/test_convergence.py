"""What the lanes of a warp, and the warps of a CTA, must do together, and what is said where some do not."""

import numpy as np
import pytest

from cute_emulator.errors import Deadlock
from cute_emulator.execution.scheduler import Schedule
from cute_emulator.settings import Setting

from .handwritten import aligned, run

POISON = 0xFFFFFFFF
LANE = np.arange(32, dtype=np.uint32)
HEAD = "mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1; add.s32 %r1, %r0, 100;"
SAVE = "st.global.b32 [%d2], %r2;"


def outcome(body, **options):
    out = aligned(64, fill=7)
    report = run(HEAD + body, [out], **{"block": (32, 1, 1), **options}).report
    return out[:32].copy(), report.findings


def half(shuffle):
    """The lower half of the warp shuffles, the upper half has left."""
    return f"setp.gt.u32 %p0, %r0, 15; @%p0 ret; {shuffle} {SAVE}"


def test_a_lane_that_the_mask_names_but_has_exited_is_reported_and_its_value_poison():
    out, findings = outcome(half("shfl.sync.down.b32 %r2, %r1, 4, 31, -1;"))
    (finding,) = findings
    assert finding.kind == "shfl-exited" and "lane 12 " in finding.message and "lane 16," in finding.message
    assert "shfl.sync.down" in finding.excerpt
    np.testing.assert_array_equal(out[:12], LANE[:12] + 104)
    assert (out[12:16] == POISON).all() and (out[16:] == 7).all()


def test_one_lane_that_all_read_from_and_that_has_exited():
    out, findings = outcome(half("shfl.sync.idx.b32 %r2, %r1, 20, 31, -1;"))
    assert [f.kind for f in findings] == ["shfl-exited"]
    assert (out[:16] == POISON).all()


@pytest.mark.parametrize("mask", ["0xffff", "-1"])
def test_lanes_that_are_not_read_from_may_have_exited(mask):
    out, findings = outcome(half(f"shfl.sync.bfly.b32 %r2, %r1, 8, 31, {mask};"))
    assert not findings
    np.testing.assert_array_equal(out[:16], (LANE[:16] ^ 8) + 100)


def test_a_lane_that_is_not_named_yields_poison_without_a_finding():
    """Reductions of part of a warp read such values and do not use them."""
    shuffle = "setp.gt.u32 %p0, %r0, 15; @%p0 bra E; shfl.sync.down.b32 %r2, %r1, 4, 31, 0xffff;"
    out, findings = outcome(f"mov.b32 %r2, 1; {shuffle} E: {SAVE}")
    assert not findings
    assert (out[12:16] == POISON).all() and (out[16:] == 1).all()


def test_the_predicate_is_of_the_range_and_not_of_who_takes_part():
    out, _ = outcome(half("shfl.sync.down.b32 %r3|%p1, %r1, 4, 15, -1; selp.b32 %r2, 1, 0, %p1;"))
    np.testing.assert_array_equal(out[:16], (LANE[:16] < 12).astype(np.uint32))


def test_parts_of_a_warp_may_shuffle_side_by_side():
    masks = "setp.gt.u32 %p0, %r0, 15; selp.b32 %r3, 0xffff0000, 0xffff, %p0;"
    out, findings = outcome(f"{masks} shfl.sync.bfly.b32 %r2, %r1, 3, 31, %r3; {SAVE}")
    assert not findings
    np.testing.assert_array_equal(out, (LANE ^ 3) + 100)


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.idx.b32 %r2, %r1, 0, 31, {};",
        "setp.eq.u32 %p1, %r0, %r0; vote.sync.ballot.b32 %r2, %p1, {};",
        "match.any.sync.b32 %r2, %r1, {};",
        "redux.sync.add.u32 %r2, %r1, {};",
        "elect.sync %r2|%p1, {};",
        "bar.warp.sync {};",
    ],
    ids=["shfl", "vote", "match", "redux", "elect", "bar.warp"],
)
def test_an_executing_lane_that_the_mask_does_not_name(instruction):
    def found(mask):
        return [f.kind for f in outcome("mov.b32 %r2, 0; " + instruction.format(mask) + SAVE)[1]]

    assert found("0x7fffffff") == ["sync-mask"]
    assert found("-1") == []


def test_a_barrier_that_part_of_the_warps_reach_is_named_with_those_who_have_not_come():
    body = """
    shr.u32 %r3, %r0, 5; setp.gt.u32 %p0, %r3, 1; @%p0 bra W;
    bar.sync 1, 128;
    W: setp.ne.u32 %p1, %r3, 2; @%p1 bra E; bar.sync 2, 64; E: st.global.b32 [%d0], %r0;
    """
    with pytest.raises(Deadlock) as caught:
        outcome(body, block=(128, 1, 1))
    said = next(line for line in str(caught.value).splitlines() if "not all come to barrier 1" in line)
    assert "(64 of 128 threads arrived): there are rank 0 CTA (0, 0, 0) warp 0, rank 0 CTA" in said
    assert "warp 2 waits for barrier 2 of" in said and "warp 3 has exited" in said


def test_a_cluster_barrier_that_a_cta_does_not_reach_is_named():
    body = """
    mov.u32 %r3, %cluster_ctarank; setp.eq.u32 %p0, %r3, 1; @%p0 bra W;
    barrier.cluster.arrive; barrier.cluster.wait; bra E;
    W: bar.sync 3, 64;
    E: st.global.b32 [%d0], %r0;
    """
    with pytest.raises(
        Deadlock,
        match=r"not all come to barrier of the cluster .*32 of 64.*\(1, 0, 0\) warp 0 waits for barrier 3",
    ):
        outcome(body, grid=(2, 1, 1), cluster=(2, 1, 1))


def test_strictly_a_barrier_of_all_is_not_completed_by_exits():
    body = "shr.u32 %r3, %r0, 5; setp.gt.u32 %p0, %r3, 0; @%p0 ret; bar.sync 0; mov.b32 %r2, 1;" + SAVE
    out, findings = outcome(body, block=(64, 1, 1))
    assert (out == 1).all() and not findings
    for starved in (0, 1):  # whoever comes first
        options = Setting("immediate", starved_warp=starved).options(strict=True)
        (finding,) = outcome(body, block=(64, 1, 1), **options)[1]
        assert finding.kind == "barrier-exit" and "32 of the CTA's 64 threads" in finding.message


# -- values handed over between the lanes of a warp ---------------------------------------------------

SHARED = ".shared .align 128 .b8 buf[1024];"
PLACES = """
mov.b32 %r5, buf; shl.b32 %r6, %r0, 2; add.s32 %r7, %r5, %r6; xor.b32 %r8, %r6, 124; add.s32 %r8, %r5, %r8;
setp.eq.u32 %p1, %r0, %r0;
"""
MEETS = ("bar.warp.sync -1;", "bar.sync 0;")
WAITS = (  # for the other lanes, but orders no memory
    "shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;",
    "vote.sync.ballot.b32 %r9, %p1, -1;",
)
HANDED = {
    "to the mirrored lane": "st.shared.b32 [%r7], %r1; {} ld.shared.b32 %r2, [%r8];",
    "in halves of words": "st.shared.b16 [%r7+2], 5; {} ld.shared.b32 %r2, [%r8];",
    "from one lane to all": """
        setp.eq.u32 %p0, %r0, 3; @%p0 st.shared.b32 [%r5], %r1; {} ld.shared.b32 %r2, [%r5];""",
    "to one lane": """
        st.shared.b32 [%r7], %r1; {} mov.b32 %r2, 0; setp.eq.u32 %p0, %r0, 3;
        @%p0 ld.shared.b32 %r2, [%r5];""",
    "as vectors": """
        shl.b32 %r9, %r0, 4; add.s32 %r9, %r9, %r5; st.shared.v4.b32 [%r9], {{%r1, %r1, %r1, %r1}}; {}
        ld.shared.b32 %r2, [%r7];""",
}


def handed(body):
    return outcome(PLACES + body.replace("; ", ";\n") + SAVE, smem=SHARED)[1]


@pytest.mark.parametrize("body", HANDED.values(), ids=HANDED)
def test_lanes_that_hand_over_values_must_meet(body):
    for waits in ("", *WAITS):
        (finding,) = handed(body.format(waits.replace("%r9", "%r19")))
        assert finding.kind == "lane-race"
        assert "ld.shared" in finding.excerpt and "st.shared" in finding.excerpt
    for meets in MEETS:
        assert not handed(body.format(meets))


@pytest.mark.parametrize(
    "body",
    [
        "st.shared.b32 [%r7], %r1; ld.shared.b32 %r2, [%r7];",
        "st.shared.b16 [%r7], 5; st.shared.b16 [%r7+2], 6; ld.shared.b32 %r2, [%r7];",
        "st.shared.b32 [%r5], 3; ld.shared.b32 %r2, [%r5];",
        "st.shared.b32 [%r8], 3; bar.warp.sync -1; st.shared.b32 [%r7], %r1; ld.shared.b32 %r2, [%r7];",
        "st.shared.b32 [%r7], %r1; ld.shared.b32 %r2, [%r8+512];",
        "st.volatile.shared.b32 [%r7], %r1; ld.volatile.shared.b32 %r2, [%r8];",
    ],
    ids=["its own", "its own halves", "one place, all alike", "met before", "elsewhere", "volatile"],
)
def test_what_a_lane_stored_itself_or_volatile_needs_no_meeting(body):
    assert not handed(body)


ALONE = """
setp.ne.u32 %p0, %r0, {lane}; mov.b32 %r2, %r0; @%p0 bra M; nanosleep.u32 500; add.u32 %r2, %r2, 200;
M: bar.warp.sync {members};
mov.b32 %r4, 0;
W: add.u32 %r2, %r2, %r0; add.u32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 100; @%p1 bra W;
"""


@pytest.mark.parametrize("lane", [0, 7, 31])
@pytest.mark.parametrize("lanes", [False, True], ids=["in order", "in any order"])
@pytest.mark.parametrize("members", ["-1", "%r5"])
def test_lanes_that_have_met_go_on_together(lane, lanes, members):
    """Unless their turns are drawn: then what follows a barrier is still explored apart."""
    out = aligned(64, fill=7)
    body = "mov.b32 %r5, -1;" + ALONE.format(lane=lane, members=members) + SAVE
    report = run(HEAD + body, [out], schedule=Schedule(lanes=lanes), seed=3).report
    assert not report.findings
    np.testing.assert_array_equal(out[:32], LANE + 100 * LANE + 200 * (lane == LANE))
    assert (report.instructions < 4 * 100 + 50) != lanes


def test_lanes_that_meet_at_different_barriers_go_their_ways():
    out = aligned(64, fill=7)
    body = """
    setp.lt.u32 %p0, %r0, 5; @%p0 bra A; bar.warp.sync -1; add.u32 %r2, %r0, 1000; bra E;
    A: bar.warp.sync -1; add.u32 %r2, %r0, 2000; E:
    """
    assert not run(HEAD + body + SAVE, [out]).report.findings
    np.testing.assert_array_equal(out[:32], LANE + np.where(LANE < 5, 2000, 1000))
