"""The barrier of a cluster is for the threads that have not exited; what its CTAs may all store."""

import numpy as np
import pytest

from cute_emulator.errors import EmulatorError

from .handwritten import run

SETTINGS = [(mode, seed) for mode in ("immediate", "lazy") for seed in range(3)]
WHO = "mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; mov.u32 %r2, %cluster_ctarank;\n"
SLOW = "mov.b32 %r9, 300; SLOW: sub.s32 %r9, %r9, 1; setp.ne.s32 %p9, %r9, 0; @%p9 bra SLOW;\n"
"""Long enough for the other warps to be where they wait."""


def in_cluster(body, out, **options):
    return run(WHO + body, [out], grid=(2, 1, 1), cluster=(2, 1, 1), block=(64, 1, 1), **options)


@pytest.mark.parametrize("late", ["warp 1", "lanes 1 to 31"])
def test_those_who_exit_after_the_arrivals_release_it(late):
    who = "setp.ne.u32 %p0, %r1, 0;" if late == "warp 1" else "and.b32 %r3, %r0, 31; setp.ne.u32 %p0, %r3, 0;"
    out = np.zeros(1, np.uint32)
    body = f"""
    {who}
    @%p0 bra EXITS;
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    atom.global.add.u32 %r5, [%d0], 1;
    ret;
    EXITS: {SLOW}
    """
    in_cluster(body, out)
    assert out[0] == (2 * 32 if late == "warp 1" else 2 * 2)


def test_an_arrival_of_one_who_exits_is_no_others():
    """Warp 1 arrives and exits; CTA 1's warp 0 comes late: nobody goes on before it."""
    for mode, seed in SETTINGS:
        out = np.zeros(8, np.uint32)
        body = f"""
        setp.ne.u32 %p0, %r1, 0; setp.ne.u32 %p1, %r2, 0;
        @%p0 bra LEAVES;
        @!%p1 bra COMES;
        {SLOW}
        st.global.b32 [%d0], 7;
        COMES: barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
        ld.global.b32 %r5, [%d0];
        st.global.b32 [%d0+4], %r5;
        ret;
        LEAVES: barrier.cluster.arrive.release;
        """
        assert not in_cluster(body, out, mode=mode, seed=seed).report.findings
        assert out[1] == 7


def test_who_never_comes_and_never_exits_is_still_waited_for():
    body = """
    setp.ne.u32 %p0, %r1, 0;
    @%p0 bra OTHER;
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    ret;
    OTHER: bar.sync 1, 64;
    """
    with pytest.raises(EmulatorError, match="not all come to barrier of the cluster"):
        in_cluster(body, np.zeros(1, np.uint32))


STORE = "add.s32 %r6, {value}, 0; st.global.b32 [%d0], %r6;"


def test_warps_of_a_cluster_may_all_store_one_value():
    assert not in_cluster(STORE.format(value=5), np.zeros(1, np.uint32)).report.findings
    (finding,) = in_cluster(STORE.format(value="%r2"), np.zeros(1, np.uint32)).report.findings
    assert finding.kind == "race"
    apart = run(STORE.format(value=5), [np.zeros(1, np.uint32)], grid=(2, 1, 1))
    assert [f.kind for f in apart.report.findings] == ["race"]


def test_bytes_that_nobody_sends_or_awaits_are_found_strictly_alone():
    body = "setp.eq.u32 %p0, %r0, 0; mov.b32 %r8, bar; @%p0 mbarrier.init.shared.b64 [%r8], 1;\n"
    body += "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d9, [%r8], 64;"
    options = {"smem": ".shared .align 8 .b8 bar[8];"}
    assert not in_cluster(body, np.zeros(1, np.uint32), **options).report.findings
    strict = in_cluster(body, np.zeros(1, np.uint32), checks=["exit", "tx"], **options).report.findings
    assert {f.kind for f in strict} == {"exit-tx"}
