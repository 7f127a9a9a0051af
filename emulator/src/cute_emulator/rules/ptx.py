"""Pieces of PTX that pairs of rules share; the registers are those of `conformance.kernel.PRELUDE`."""

from __future__ import annotations

from typing import Any

from cute_emulator.units.tma_encode import encode_tiled

TWO = {"block": (64, 1, 1)}
FOUR = {"block": (128, 1, 1)}
PEER_CTA = {"grid": (2, 1, 1)}
CLUSTER: dict[str, Any] = {"block": (32, 1, 1), "grid": (2, 1, 1), "cluster": (2, 1, 1)}
SM90: dict[str, Any] = {"arch": "sm_90a", "shape": FOUR, "buf": 8192}
SM100: dict[str, Any] = {"shape": FOUR, "buf": 8192}


def rows_map(address: int) -> bytes:
    """Returns a tensor map over the output: 8 rows of 32 words."""
    return encode_tiled(2, address, [32, 8], [128], [32, 8], [1, 1]).encode()


STORE = "st.shared.b32 [%r12], %r0;"
SHARED, GLOBAL = "fence.proxy.async.shared::cta;", "fence.proxy.async.global;"
INIT = "@%p0 mbarrier.init.shared.b64 [%r11], 1; @%p0 fence.mbarrier_init.release.cluster; bar.sync 0;"
AWAIT = "W: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 0; @!%p10 bra W;"
OUT = """
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 256;
@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;
"""
TENSOR_OUT = """
mov.b32 %r20, 0; mov.b32 %r21, 0;
@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d3, {%r20, %r21}], [%r10];
@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;
"""
REDUCE_OUT = OUT.replace("cp.async.bulk.global", "cp.reduce.async.bulk.global")
REDUCE_OUT = REDUCE_OUT.replace("bulk_group [", "bulk_group.add.u32 [")
DESCRIPTOR = """
shr.u32 %r20, %r10, 4; cvt.u64.u32 %d20, %r20; or.b64 %d20, %d20, 0x4000004000010000;
"""
WGMMA = """
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d20, %d20, 0, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
"""
IN = """
@%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 256;
@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d0], 256, [%r11];
"""
TENSOR_IN = """
mov.b32 %r20, 0; mov.b32 %r21, 0; @%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 1024;
@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r10], [%d3, {%r20, %r21}], [%r11];
"""
FLAG = "mov.b32 %r21, 1; @%p0 st.release.gpu.global.b32 [%d2], %r21;"
ACQUIRE = "P: ld.acquire.gpu.global.b32 %r22, [%d2]; setp.eq.b32 %p11, %r22, 0; @%p11 bra P;"
TENSOR_REDUCE = TENSOR_OUT.replace("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
TENSOR_REDUCE = TENSOR_REDUCE.replace("bulk_group [", "add.tile.bulk_group [")
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"
READY = f"mov.b32 %r20, 0; st.shared.b32 [%r12], %r20; {SHARED} bar.sync 0; {DESCRIPTOR}"
WGMMA_FENCE = "wgmma.fence.sync.aligned;"
END = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
SS = """
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d20, %d20, |S|, 1, 1, 0, 0;
"""
USE = "st.global.f32 [%d11], %f0;"
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
LOAD = """
shl.b32 %r31, %r1, 21; add.s32 %r31, %r31, %r30;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r32}, [%r31]; tcgen05.wait::ld.sync.aligned;
st.global.b32 [%d11], %r32;
"""


def umma(before: str, text: str) -> str:
    """Returns a tensor-core operation on zeros in shared memory, awaited, into 32 columns at %r30."""
    return f"""
    mov.b32 %r20, 0; mov.b32 %r22, %r12; add.s32 %r23, %r10, 8192;
    Z: st.shared.b32 [%r22], %r20; add.s32 %r22, %r22, 512; setp.lt.u32 %p13, %r22, %r23; @%p13 bra Z;
    fence.proxy.async.shared::cta; @%p0 mbarrier.init.shared.b64 [%r11], 1;
    @%p0 fence.mbarrier_init.release.cluster; bar.sync 0; {ALLOC.replace("|N|", "32")} {before}
    shr.u32 %r20, %r10, 4; cvt.u64.u32 %d20, %r20; or.b64 %d20, %d20, 0x4000400800010000;
    mov.b32 %r21, 0x4080490; setp.ne.b32 %p14, %r0, %r0;
    @%p0 {text}
    @%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r11];
    W: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 0; @!%p10 bra W; {FREE.replace("|N|", "32")}
    """
