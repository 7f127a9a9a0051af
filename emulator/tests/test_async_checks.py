"""Order of late events, and the checks on mbarrier initialisation and tensor memory: planted, and silent."""

import numpy as np
import pytest

from cute_emulator.errors import EmulatorError
from cute_emulator.machine.asyncq import AsyncEngine, Event
from cute_emulator.machine.tmem_order import TmemOrder
from cute_emulator.rules import CHECKS, STRICT_CHECKS

from .handwritten import aligned, run

SMEM = ".shared .align 128 .b8 buffer[512]; .shared .align 8 .b64 bar; .shared .align 4 .b32 slot;"
COPY = """
mov.u32 %r0, %tid.x;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra JOIN;
mov.u32 %r1, bar; mov.u32 %r2, buffer;
mbarrier.init.shared.b64 [%r1], 1;
FENCE
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%d0], 512, [%r1];
WAIT:
mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
@!%p1 bra WAIT;
JOIN:
bar.warp.sync -1;
"""
TMEM = """
mov.u32 %r1, slot;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.b32 %r2, [%r1];
OPERATIONS
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
"""
LD, LD_WAIT = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2];", "tcgen05.wait::ld.sync.aligned;"
ST, ST_WAIT = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};", "tcgen05.wait::st.sync.aligned;"


def kinds(machine):
    return [finding.kind for finding in machine.report.findings]


@pytest.mark.parametrize(
    "fence, found",
    [
        ("", ["mbarrier-init"]),
        ("fence.mbarrier_init.release.cluster;", []),
        ("fence.proxy.async.shared::cta;", []),
        ("fence.acq_rel.cta;", ["mbarrier-init"]),
        ("fence.proxy.async.global;", ["mbarrier-init"]),
    ],
)
def test_mbarrier_initialisation_must_be_fenced(fence, found):
    source = np.arange(128, dtype=np.uint32)
    assert kinds(run(COPY.replace("FENCE", fence), [source], SMEM)) == found


@pytest.mark.parametrize(
    "operations, found",
    [
        (LD, ["tmem-unwaited"]),
        (LD + LD_WAIT, []),
        (LD + ST_WAIT, ["tmem-unwaited"]),
        (ST, ["tmem-unwaited"]),
        (ST + ST_WAIT, []),
        (LD + LD_WAIT + ST + ST_WAIT, []),
    ],
)
def test_tensor_memory_accesses_must_be_waited_for(operations, found):
    body = TMEM.replace("OPERATIONS", operations)
    assert kinds(run(body, [], SMEM, checks=CHECKS + STRICT_CHECKS)) == found
    assert kinds(run(body, [], SMEM)) == []  # strict: on request only


def test_tensor_memory_must_be_allocated():
    body = TMEM.replace("OPERATIONS", "add.u32 %r2, %r2, 32;" + LD)
    with pytest.raises(EmulatorError, match="columns 32 to 32 of tensor memory are not allocated"):
        run(body, [], SMEM)


def test_open_accesses_by_column_and_half():
    order = TmemOrder()
    order.begin("ld", 3, lane=96 + 16, lanes=16, first=64, columns=8)
    assert order.conflict(("ld",), 71, 1) == ("ld", 3)
    assert order.conflict(("ld",), 72, 8) is None
    assert order.conflict(("st",), 64, 8) is None
    assert order.conflict(("ld",), 64, 8, halves=(0,)) is None
    order.wait("ld", 2)
    assert order.conflict(("ld", "st"), 64, 8, halves=(1,)) == ("ld", 3)
    order.wait("ld", 3)
    assert order.conflict(("ld", "st"), 0, 512) is None


@pytest.mark.parametrize("seed", range(8))
def test_lazy_order_depends_on_the_seed_and_writes_come_last(seed):
    happened = []
    engine = AsyncEngine("lazy", seed)
    for kind in ("write", "load", "tensor", "read") * 2:
        event = Event(lambda kind=kind: happened.append(kind), None, None, kind, kind)
        engine.enqueue(("pipe", kind), event) if kind == "tensor" else engine.submit(event)
    assert not happened
    while engine.idle_step():
        pass
    assert happened[-2:] == ["write", "write"] and len(happened) == 8
    assert happened[::2] == happened[1::2]  # one kind after the other
    first = {0: "tensor", 1: "load", 2: "read", 3: "tensor"}[seed % 4]
    second = {0: "load", 1: "tensor", 2: "load", 3: "read"}[seed % 4]
    assert happened[:4:2] == [first, second]


DESCRIPTOR = """
mov.u32 %r0, buffer; shr.u32 %r0, %r0, 4; cvt.u64.u32 %d1, %r0; or.b64 %d1, %d1, 0x4000004000010000;
"""
PRODUCT = """
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d1, %d1, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""
FENCE = "wgmma.fence.sync.aligned;"


@pytest.mark.parametrize(
    "first, touch, second, found",
    [
        (FENCE, "", "", 0),
        ("", "", "", 1),
        (FENCE, "mov.b32 %f1, 0f00000000;", "", 1),
        (FENCE, "mov.b32 %f1, 0f00000000;", FENCE, 0),
    ],
)
def test_wgmma_registers_must_be_fenced(first, touch, second, found):
    """Two products into the same registers; the second needs a fence only if they were touched in between."""
    smem = ".shared .align 1024 .b8 buffer[8192];"
    body = DESCRIPTOR + first + PRODUCT + touch + second + PRODUCT
    machine = run(body, [], smem, block=(128, 1, 1), arch="sm_90a", checks=("wgmma",))
    assert kinds(machine) == ["wgmma-fence"] * found


def test_arriving_at_a_cta_that_has_exited():
    body = """
    mov.u32 %r0, %cluster_ctarank;
    mov.u32 %r1, bar;
    mbarrier.init.shared.b64 [%r1], 32;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 bra JOIN;
    mapa.shared::cluster.u32 %r2, %r1, 0;
    nanosleep.u32 1000;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
    JOIN:
    """
    shape = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
    with pytest.raises(EmulatorError, match="of a CTA that has exited"):
        run(body, [], SMEM, **shape)
    run(body.replace("JOIN:", "JOIN: barrier.cluster.arrive; barrier.cluster.wait;"), [], SMEM, **shape)


COMMIT = """
mov.u32 %r0, %tid.x;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra JOIN;
mov.u32 %r1, bar;
mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
WAIT
JOIN:
bar.warp.sync -1;
"""
AWAITED = "LOOK: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra LOOK;"


@pytest.mark.parametrize("wait, found", [(AWAITED, []), ("", ["exit-pending"])])
def test_a_commit_that_nobody_waits_for_is_reported_when_its_cta_exits(wait, found):
    assert kinds(run(COMMIT.replace("WAIT", wait), [np.zeros(4, np.uint32)], SMEM, mode="lazy")) == found


def test_a_commit_to_a_cta_that_has_exited_is_an_error_where_nothing_reported_it():
    checks = tuple(check for check in CHECKS if check != "exit")
    with pytest.raises(EmulatorError, match="which has exited"):
        run(COMMIT.replace("WAIT", ""), [np.zeros(4, np.uint32)], SMEM, mode="lazy", checks=checks)


PEERS = """
mov.u32 %r0, %cluster_ctarank; mov.u32 %r1, bar; mov.b16 %h0, 3;
mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra WAIT;
elect.sync %r5|%p3, -1;
@%p3 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h0;
LOOK: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra LOOK;
WAIT:
AWAITED
"""


def test_a_commit_to_a_neighbour_that_has_exited_is_found_and_the_run_goes_on():
    shape = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "mode": "lazy"}
    (finding,) = run(PEERS.replace("AWAITED", ""), [], SMEM, **shape).report.findings
    assert finding.kind == "exit-remote" and "CTA (1, 0, 0), which has exited" in finding.message
    awaited = "SEEN: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra SEEN;"
    assert not run(PEERS.replace("AWAITED", awaited), [], SMEM, **shape).report.findings


FREED = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; mov.u32 %r3, bar; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1;
mul.wide.u32 %d5, %r0, 4; add.s64 %d6, %d0, %d5; mov.b32 %r5, 9;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32; bar.sync 0;
ld.shared.b32 %r2, [%r3]; shl.b32 %r4, %r1, 21; add.u32 %r4, %r4, %r2;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r5}; tcgen05.wait::st.sync.aligned;
bar.sync 0;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
MEET
mov.b32 %r6, 0;
@%p2 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r4]; tcgen05.wait::ld.sync.aligned;
st.global.b32 [%d6], %r6;
"""


@pytest.mark.parametrize("meet", ["", "bar.sync 0;"])
def test_tensor_memory_that_another_warp_has_freed_is_named_and_the_run_goes_on(meet):
    out = aligned(64)
    m = run(FREED.replace("MEET", meet), [out], SMEM, block=(64, 1, 1))
    freed = [f for f in m.report.findings if f.kind == "tmem-freed"]
    assert len(freed) == 1 and "warp 1 uses columns 0 to 0" in freed[0].message
    assert "warp 0 has freed" in freed[0].message and "tcgen05.dealloc" in freed[0].excerpt
    assert (out[32:] == 9).all()
