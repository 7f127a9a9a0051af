"""What is not modelled is refused by name and line where it is executed, never carried out as another."""

import numpy as np
import pytest

from cute_emulator.errors import UnsupportedInstruction

from .handwritten import run

REFUSED = """
add.rz.f64 %d9, %d9, %d9; fma.rz.f64 %d9, %d9, %d9, %d9; sqrt.rm.f64 %d9, %d9; rcp.rz.f64 %d9, %d9;
add.rna.f32x2 %d9, %d9, %d9; fma.rn.oob.f16 %h1, %h1, %h1, %h1; add.rz.f16 %h1, %h1, %h1; sqrt.f16 %h1, %h1;
cvt.rp.f16.f32 %h1, %r1; cvt.rm.bf16x2.f32 %r1, %r1, %r1; cvt.rz.f64.s64 %d9, %d9; cvt.sat.f64.f32 %d9, %r1;
cvt.rs.satfinite.e4m3x4.f32 %r1, {%r1, %r1, %r1, %r1}, %r1; cvt.rs.f16.f32 %h1, %r1;
cvt.rs.satfinite.e2m1x4.f32 %h1, {%r1, %r1, %r1, %r1}, %r1; cvt.pack.sat.s16.s32 %r1, %r1, %r1;
cvt.rn.satfinite.s2f6x2.f32 %h1, %r1, %r1; set.lt.and.f32.f32 %r1, %r1, %r1, %p1;
setp.lt.f16x2 %p1|%p2, %r1, %r1; setp.foo.f32 %p1, %r1, %r1; setp.foo.s32 %p1, %r1, %r1;
setp.ltu.s32 %p1, %r1, %r1; set.lt.f16x2.f16x2 %r1, %r1, %r1; testp.normal.f32 %p1, %r1;
add.sat.s32 %r1, %r1, %r1; add.cc.u32 %r1, %r1, %r1; mad.lo.cc.u32 %r1, %r1, %r1, %r1;
mul.foo.lo.s32 %r1, %r1, %r1; mul24.hi.u32 %r1, %r1, %r1; mad24.lo.u32 %r1, %r1, %r1, %r1;
and.foo.b32 %r1, %r1, %r1; shl.wrap.b32 %r1, %r1, %r1; lop3.or.b32 %r1|%p1, %r1, %r1, %r1, 3, %p2;
lop3.b32 %r1, %r1, %r1, %r1, %r2; prmt.b32.f4e %r1, %r1, %r1, %r1; max.sat.s16x2 %r1, %r1, %r1;
sub.u16x2 %r1, %r1, %r1; vadd.u32.u32.u32 %r1, %r1, %r1; tanh.rn.f32 %r1, %r1; szext.clamp.s32 %r1, %r1, 5;
bmsk.clamp.b32 %r1, 1, 2; fns.b32 %r1, %r1, 0, 1; add.s32 %r1, %r1; bfe.u32 %r1, %r1, 3;
vote.ballot.b32 %r1, %p1; shfl.down.b32 %r1, %r1, 1, 31; redux.sync.add.f32 %r1, %r1, -1; bar.sync;
mov.b16 %h1, 1.5; mov.b64 %d9, 0f3F800000; mov.foo.b32 %r1, %r1; selp.foo.b32 %r1, %r1, %r1, %p1;
mov.b32 5, %r1; atom.global.exch.b128 %d9, [%d0], %d9; ld.global.b24 %r1, [%d0];
tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%d0, {%r1}]; add.s32 %r1, %r1, 1.5; shfl.sync.idx.b32 %r1, %r1;
@%p1 call nowhere;
"""


@pytest.mark.parametrize("text", [t.strip() for t in REFUSED.split(";") if t.strip()])
def test_what_is_not_modelled_is_refused(text):
    with pytest.raises(UnsupportedInstruction, match=r"line \d+.*not modelled") as refused:
        run(f"mov.b32 %r1, 7; setp.eq.b32 %p1, %r1, 7; {text};", [np.zeros(1, np.uint32)])
    assert text.split()[-2 if "@" in text else 0] in str(refused.value)
    if "@" in text:
        return
    skipped = np.zeros(1, np.uint32)  # where no lane executes it, nothing is asked of it
    run(f"mov.b32 %r1, 7; setp.eq.b32 %p3, %r1, 8; @%p3 {text}; st.global.b32 [%d0], 5;", [skipped])
    assert skipped[0] == 5
