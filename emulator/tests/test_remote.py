"""Multicast memory, cluster launch control, asynchronous stores, bulk copies between CTAs."""

import numpy as np
import pytest

from cute_emulator.errors import EmulatorError
from cute_emulator.machine.asyncq import MODES
from cute_emulator.units.tma_encode import encode_tiled

from .handwritten import aligned, launch, machine, module, run

ADDRESS = "mov.u32 %r0, %tid.x; mul.wide.u32 %d5, %r0, {size}; add.s64 %d6, %d5, %d0; add.s64 %d7, %d5, %d1;"


@pytest.mark.parametrize("kind", ["add.v4.f32", "add.acc::f32.v4.bf16x2", "max.s32"])
def test_multimem_ld_reduce_and_store(kind):
    rng = np.random.default_rng(3)
    words = 128 if "v4" in kind else 32
    copies = [
        aligned(words, np.uint32, rng.integers(0, 1 << 30, words, np.uint32) & 0x3FFFBFFF) for _ in range(3)
    ]
    multicast = aligned(words)
    body = ADDRESS.format(size=words // 8)
    regs = "{%r1, %r2, %r3, %r4}" if "v4" in kind else "%r1"
    suffix = kind.split(".", 1)[1]
    store = suffix.replace("acc::f32.", "")
    body += f"multimem.ld_reduce.relaxed.sys.global.{kind} {regs}, [%d6];"
    body += f"multimem.st.relaxed.sys.global.{store} [%d6], {regs};"
    m = machine(copies)
    m.memory.register_multicast(multicast.ctypes.data, multicast.nbytes, [c.ctypes.data for c in copies])
    m.submit(launch(module(body, 2), [multicast, 0]))
    before = [c.copy() for c in copies]
    m.run()
    assert not multicast.any()
    if kind == "max.s32":
        want = np.maximum.reduce([c.view(np.int32) for c in before]).view(np.uint32)
    elif "bf16" in kind:
        halves = [(c.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for c in before]
        total = ((halves[0] + halves[1]) + halves[2]).view(np.uint32).astype(np.uint64)
        want = ((total + 0x7FFF + (total >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint32)
    else:
        f = [c.view(np.float32) for c in before]
        want = ((f[0] + f[1]) + f[2]).view(np.uint32)
    for c in copies:
        np.testing.assert_array_equal(c, want)


def test_multimem_red_adds_to_every_copy():
    copies = [aligned(1), aligned(1, fill=10)]
    multicast = aligned(1)
    m = machine(copies)
    m.memory.register_multicast(multicast.ctypes.data, 4, [c.ctypes.data for c in copies])
    m.submit(launch(module("multimem.red.release.sys.global.add.u32 [%d0], 2;", 1), [multicast]))
    m.run()
    assert [int(c[0]) for c in copies] == [64, 74]


def test_bytes_in_other_ranks_memory_are_counted():
    """Of the lanes that store; a word that a warp stores as one counts once, and bytes at home do not."""
    own, other = aligned(128), aligned(128)
    m = machine([own])
    m.memory.register(other.ctypes.data, other.nbytes, 1, "of rank 1")
    body = ADDRESS.format(size=16) + "st.global.v4.u32 [%d6], {1, 2, 3, 4}; setp.lt.u32 %p0, %r0, 10;"
    body += "@%p0 st.global.v4.u32 [%d7], {1, 2, 3, 4}; mov.u32 %r1, 5; st.relaxed.sys.global.u32 [%d1], %r1;"
    m.submit(launch(module(body, 2), [own, other]))
    m.run()
    assert m.report.sent == {(0, 1): 10 * 16 + 4}


REMOTE_STORE = """
mov.u32 %r0, %tid.x; mov.u32 %r4, %cluster_ctarank;
mov.b32 %r10, bar; setp.eq.b32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r10], 1;
@%p0 mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 128;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
xor.b32 %r6, %r4, 1; mov.b32 %r7, buf;
mapa.shared::cluster.u32 %r8, %r7, %r6; mapa.shared::cluster.u32 %r11, %r10, %r6;
shl.b32 %r12, %r0, 2; add.s32 %r13, %r8, %r12;
mul.lo.s32 %r14, %r0, 10; add.s32 %r14, %r14, %r4;
{send}
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0; @!%p2 bra WAIT;
add.s32 %r15, %r7, %r12; ld.shared.b32 %r1, [%r15];
shl.b32 %r9, %r4, 5; add.s32 %r9, %r9, %r0;
mul.wide.u32 %d5, %r9, 4; add.s64 %d5, %d5, %d0; st.global.b32 [%d5], %r1;
barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
"""
SMEM = ".shared .align 8 .b64 bar; .shared .align 16 .b8 buf[128]; .shared .align 16 .b8 own[128];"
CLUSTER = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
ST_ASYNC = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r13], %r14, [%r11];"
BULK = """
mov.b32 %r16, own; add.s32 %r17, %r16, %r12; st.shared.b32 [%r17], %r14; {fence}
bar.sync 0;
@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r8], [%r16], 128, [%r11];
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "send", [ST_ASYNC, BULK.format(fence="fence.proxy.async.shared::cta;")], ids=["st", "bulk"]
)
def test_stores_to_the_other_cta_complete_on_its_mbarrier(mode, send):
    out = np.zeros(64, np.uint32)
    m = run(REMOTE_STORE.format(send=send), [out], smem=SMEM, mode=mode, **CLUSTER)
    lane = np.arange(32) * 10
    np.testing.assert_array_equal(out, np.concatenate([lane + 1, lane]))
    assert m.report.ok


def test_bulk_copy_of_unfenced_shared_memory_is_reported():
    out = np.zeros(64, np.uint32)
    m = run(REMOTE_STORE.format(send=BULK.format(fence="")), [out], smem=SMEM, **CLUSTER)
    assert [f.kind for f in m.report.findings] == ["proxy-fence"]
    assert "warp 0 wrote" in m.report.findings[0].message


TO_SEVERAL = {
    "bulk": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [%r11], [%d0], 16, [%r10], %h0;",
    "tile": "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%r11], [%d1, {%r5}], [%r10], %h0;",
    "commit": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
    " [%r10], %h0;",
}


@pytest.mark.parametrize("mask", [0, 4, 7])
@pytest.mark.parametrize("send", TO_SEVERAL)
def test_a_multicast_mask_names_ctas_that_are_there(send, mask):
    source, tensor = aligned(4, fill=5), aligned(32)
    encoded = encode_tiled(2, source.ctypes.data, [4], [], [4], [1]).encode()
    tensor[:] = np.frombuffer(encoded, np.uint32)
    body = f"""
    mov.b32 %r10, bar; mov.b32 %r11, buf; mov.b32 %r5, 0; mov.u16 %h0, {mask};
    mbarrier.init.shared.b64 [%r10], 1; fence.mbarrier_init.release.cluster;
    {TO_SEVERAL[send]}
    """
    smem = ".shared .align 8 .b64 bar; .shared .align 128 .b8 buf[16];"
    with pytest.raises(
        EmulatorError, match=rf"line \d+ .*multicast mask {mask:#x} must name CTAs of the cluster of 2"
    ):
        run(body, [source, tensor], smem=smem, **{**CLUSTER, "block": (1, 1, 1)})


def test_a_bulk_copy_ends_within_the_shared_memory_that_it_reads():
    body = """
    mov.b32 %r10, bar; mov.b32 %r11, buf; mbarrier.init.shared.b64 [%r10], 1;
    fence.mbarrier_init.release.cluster;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r11], [%r11+16], 32, [%r10];
    """
    smem = ".shared .align 8 .b64 bar; .shared .align 16 .b8 buf[32];"
    with pytest.raises(EmulatorError, match=r"line \d+ .*source 0x420 \+ 32 exceeds shared memory"):
        run(body, [], smem=smem, block=(1, 1, 1))


CANCEL = """
mov.u32 %r0, %tid.x; mov.b32 %r10, bar; mov.b32 %r11, resp; setp.eq.b32 %p0, %r0, 0;
@!%p0 bra END;
mbarrier.init.shared.b64 [%r10], 1; fence.mbarrier_init.release.cluster;
mov.u32 %r2, %ctaid.x; mov.b32 %r3, 0;
NEXT:
mul.wide.u32 %d5, %r2, 4; add.s64 %d5, %d5, %d0; mov.b32 %r4, 1; red.global.add.u32 [%d5], %r4;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 16;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r11], [%r10];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r10], %r3; @!%p2 bra WAIT;
xor.b32 %r3, %r3, 1;
ld.shared.b128 %q0, [%r11];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q0;
@!%p3 bra END;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r2, %r5, %r6, _}, %q0;
bra NEXT;
END:
"""


@pytest.mark.parametrize("mode", MODES)
def test_cluster_launch_control_hands_out_each_remaining_cta_once(mode):
    done = np.zeros(40, np.uint32)
    smem = ".reg .b128 %q<2>; .shared .align 8 .b64 bar; .shared .align 16 .b8 resp[16];"
    m = run(CANCEL, [done], smem=smem, grid=(40, 1, 1), num_sms=3, dynamic_smem=120_000, mode=mode)
    assert (done == 1).all()
    assert m.report.ok
