"""What a warp or a CTA has in flight: who waits for it goes on, and nobody is given it twice."""

import numpy as np
import pytest

from cute_emulator.errors import EmulatorError
from cute_emulator.execution.scheduler import Schedule

from .handwritten import aligned, run

SMEM = ".shared .align 128 .b8 buffer[512]; .shared .align 8 .b64 bar; .shared .align 4 .b32 slot;"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512; ld.shared.b32 %r2, [%r1];"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512;"
CLUSTER = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}


@pytest.mark.parametrize("commit", ["", "cp.async.commit_group;"])
def test_wait_all_waits_for_copies_whether_committed_or_not(commit):
    source, out = np.arange(32, dtype=np.uint32) + 7, aligned(32)
    body = f"""
    mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; add.s64 %d0, %d0, %d2; add.s64 %d1, %d1, %d2;
    shl.b32 %r1, %r0, 2; mov.b32 %r2, buffer; add.s32 %r1, %r1, %r2;
    cp.async.ca.shared.global [%r1], [%d0], 4; {commit} cp.async.wait_all;
    ld.shared.b32 %r3, [%r1]; st.global.b32 [%d1], %r3;
    """
    assert run(body, [source, out], SMEM, mode="lazy").report.findings == []
    assert out.tolist() == source.tolist()


def test_who_waits_for_tensor_memory_gets_what_another_warp_frees():
    out = aligned(2)
    spin = "mov.b32 %r4, 0; S: add.s32 %r4, %r4, 1; setp.lt.s32 %p1, %r4, 300; @%p1 bra S;"
    body = f"""
    mov.u32 %r0, %tid.x; shr.u32 %r3, %r0, 5; mul.wide.u32 %d1, %r3, 4; add.s64 %d0, %d0, %d1;
    shl.b32 %r1, %r3, 2; mov.b32 %r5, buffer; add.s32 %r1, %r1, %r5;
    {ALLOC} {spin} {DEALLOC} add.u32 %r3, %r3, 5; st.global.b32 [%d0], %r3;
    """
    run(body, [out], SMEM, block=(64, 1, 1))
    assert out.tolist() == [5, 6]


def test_who_gave_up_the_permit_allocates_no_more():
    permit = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    body = f"mov.b32 %r1, slot; {ALLOC} {permit} {DEALLOC} {{}}"
    run(body.format(""), [], SMEM)
    with pytest.raises(EmulatorError, match="allocates after tcgen05.relinquish_alloc_permit"):
        run(body.format(ALLOC), [], SMEM)


def test_nobody_arrives_twice_at_a_cluster_barrier():
    meet = "barrier.cluster.arrive; barrier.cluster.wait;"
    run(meet + meet, [], **CLUSTER)
    with pytest.raises(EmulatorError, match="arrives at the cluster barrier again without having waited"):
        run("barrier.cluster.arrive;" + meet, [], **CLUSTER)


@pytest.mark.parametrize(
    ("fence", "found"), [("fence.proxy.async.shared::cta;", []), ("", ["mbarrier-init", "mbarrier-race"])]
)
def test_a_relaxed_barrier_tells_of_the_mbarriers_that_were_fenced(fence, found):
    body = f"""
    mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; mov.b32 %r1, bar;
    mov.u32 %r2, %cluster_ctarank; xor.b32 %r2, %r2, 1; mapa.shared::cluster.u32 %r3, %r1, %r2;
    @%p0 mbarrier.init.shared.b64 [%r1], 1; {fence}
    barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;
    @%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    """
    report = run(body, [], SMEM, **CLUSTER).report
    assert sorted({finding.kind for finding in report.findings}) == found


def test_a_barrier_that_reduces_gives_every_thread_the_votes_of_all():
    out = aligned(64 * 4)
    body = """
    mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 16; add.s64 %d0, %d0, %d1;
    setp.lt.u32 %p0, %r0, 40; setp.lt.u32 %p1, %r0, 64; setp.eq.u32 %p2, %r0, 63;
    barrier.cta.red.popc.aligned.u32 %r1, 0, 64, %p0;
    bar.red.and.pred %p3, 0, %p1; bar.red.and.pred %p4, 0, !%p2;
    bar.red.or.pred %p5, 1, 64, %p2; bar.red.popc.u32 %r2, 1, !%p0;
    selp.b32 %r3, 1, 0, %p3; selp.b32 %r4, 2, 0, %p4; selp.b32 %r5, 4, 0, %p5;
    or.b32 %r3, %r3, %r4; or.b32 %r3, %r3, %r5;
    st.global.v4.b32 [%d0], {%r1, %r2, %r3, 1};
    """
    for seed in range(3):
        run(body, [out], block=(64, 1, 1), seed=seed, schedule=Schedule("random", lanes=bool(seed)))
        assert np.unique(out.reshape(64, 4), axis=0).tolist() == [[40, 24, 0b101, 1]]


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((48, 48), "thread count 48 is not a multiple of the warp size"),
        ((64, 96), "a participant expects 96 threads, an earlier one 64"),
    ],
)
@pytest.mark.parametrize("verb", ["sync", "red"])
def test_wrong_thread_counts_of_a_barrier_are_errors_that_say_where(verb, counts, says):
    meet = {"sync": "bar.sync 2, {};", "red": "bar.red.popc.u32 %r1, 2, {}, %p0;"}[verb]
    body = f"""
    mov.u32 %r0, %tid.x; setp.ge.u32 %p0, %r0, 32; @%p0 bra SECOND;
    {meet.format(counts[0])} bra.uni END;
    SECOND: {meet.format(counts[1])}
    END:
    """
    with pytest.raises(EmulatorError, match=rf"warp \d.*line \d+ \(bar.{verb}.*{says}"):
        run(body, [], block=(64, 1, 1))


def test_who_gave_up_a_wait_at_an_mbarrier_is_not_waiting_there():
    out = aligned(1)
    body = """
    mov.u32 %r0, %tid.x; setp.ne.b32 %p0, %r0, 0;
    @!%p0 mbarrier.init.shared.b64 [bar], 1;
    bar.sync 0;
    setp.lt.u32 %p1, %r0, 32; @%p1 bra MEET;
    mov.u64 %d10, %globaltimer;
    LOOK: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0; @%p2 trap;
    mov.u64 %d11, %globaltimer; sub.s64 %d12, %d11, %d10;
    setp.lt.u64 %p5, %d12, 1000000; @%p5 bra LOOK;
    MEET: bar.sync 0;
    @!%p0 mbarrier.init.shared.b64 [bar], 2;
    @!%p0 st.global.b32 [%d0], 1;
    """
    run(body, [out], SMEM, block=(64, 1, 1))
    assert out[0] == 1
