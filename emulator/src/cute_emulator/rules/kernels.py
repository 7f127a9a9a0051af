"""Pieces of PTX that pairs of rules share; the registers are those of `conformance.kernel.PRELUDE`."""

from __future__ import annotations

from typing import Any

FOUR_WARPS: dict[str, Any] = {"shape": {"block": (128, 1, 1)}}
SM100: dict[str, Any] = {**FOUR_WARPS, "buf": 8192}
ALLOC = """
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;
bar.sync 0; ld.shared.b32 %r30, [slot];
"""
FREE = "bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;"


def umma(before: str, text: str) -> str:
    """A tensor-core operation of thread 0 on zeros in shared memory, awaited; into 32 columns at %r30."""
    return f"""
    mov.b32 %r20, 0; mov.b32 %r22, %r12; add.s32 %r23, %r10, 8192;
    Z: st.shared.b32 [%r22], %r20; add.s32 %r22, %r22, 512; setp.lt.u32 %p13, %r22, %r23; @%p13 bra Z;
    fence.proxy.async.shared::cta; @%p0 mbarrier.init.shared.b64 [%r11], 1;
    @%p0 fence.mbarrier_init.release.cluster; bar.sync 0; {ALLOC} {before}
    shr.u32 %r20, %r10, 4; cvt.u64.u32 %d20, %r20; or.b64 %d20, %d20, 0x4000400800010000;
    mov.b32 %r21, 0x4080490; setp.ne.b32 %p14, %r0, %r0;
    @%p0 {text}
    @%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r11];
    W: mbarrier.try_wait.parity.shared.b64 %p10, [%r11], 0; @!%p10 bra W; {FREE}
    """
