"""tensormap.replace and its copy against maps made anew, and a TMA load through a map a kernel changed."""

import dataclasses

import numpy as np
import pytest

from cute_emulator.errors import EmulatorError
from cute_emulator.units import swizzle, tma
from cute_emulator.units.tma_encode import encode_tiled, field_bits

from .handwritten import aligned, run

MAP = encode_tiled(7, 0x10000, [64, 32, 8], [256, 8192], [8, 4, 1], [1, 1, 1])
CHANGES = {
    ("global_address", 0, 0x7F12_3456_7890): {"address": 0x7F12_3456_7890},
    ("rank", 0, 1): {"dims": (64, 32), "strides": (256,), "box": (8, 4), "element_strides": (1, 1)},
    ("global_dim", 0, 48): {"dims": (48, 32, 8)},
    ("global_dim", 2, 3): {"dims": (64, 32, 3)},
    ("global_dim", 1, 0): {"dims": (64, 1 << 32, 8)},
    ("global_stride", 0, 512): {"strides": (512, 8192)},
    ("global_stride", 1, 1 << 37): {"strides": (256, 1 << 37)},
    ("box_dim", 0, 16): {"box": (16, 4, 1)},
    ("box_dim", 1, 256): {"box": (8, 256, 1)},
    ("element_stride", 1, 2): {"element_strides": (1, 2, 1)},
    ("elemtype", 0, 9): {"type": "bf16"},
    ("elemtype", 0, 11): {"type": "f32", "tf32": True},
    ("swizzle_mode", 0, 2): {"swizzle": swizzle.SW64},
    ("fill_mode", 0, 1): {"fill_nan": True},
}


@pytest.mark.parametrize("field", CHANGES)
def test_fields(field):
    words = np.frombuffer(MAP.encode(), np.uint32).copy()
    for word, shift, bits, value in field_bits(*field):
        words[word] = int(words[word]) & ~(((1 << bits) - 1) << shift) | value << shift
    assert tma.TensorMap.decode(words.view(np.uint8)) == dataclasses.replace(MAP, **CHANGES[field])


def test_values_that_do_not_fit():
    for name, value, says in (
        ("box_dim", 257, "box_dim of 257 does not fit its 8 bits"),
        ("element_stride", 9, "element_stride of 9 does not fit its 3 bits"),
        ("global_stride", 8, "stride 8 of ordinal 0: a multiple of 16"),
        ("global_stride", 1 << 40, "stride 1099511627776 of ordinal 0: .* below 2\\*\\*40"),
        ("elemtype", 16, "CUtensorMapDataType 16 is not modelled"),
    ):
        with pytest.raises(ValueError, match=says):
            field_bits(name, 0, value)


SMEM = ".shared .align 128 .b8 buffer[512]; .shared .align 128 .b8 map[128]; .shared .align 8 .b64 loaded;"
# %d0: output, %d1: map, %d2: room for the new map, %d3: source
KERNEL = """
mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; mov.u32 %r1, buffer; mov.u32 %r2, map; mov.u32 %r3, loaded;
@%p0 mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
shl.b32 %r4, %r0, 2; cvt.u64.u32 %d5, %r4; add.s64 %d6, %d1, %d5; ld.global.b32 %r5, [%d6];
add.u32 %r6, %r2, %r4; st.shared.b32 [%r6], %r5; bar.warp.sync -1;
@!%p0 bra CHANGED;
tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r2], %d3;
tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r2], 0, 24;
tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r2], 0, 128;
CHANGED: bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d2], [%r2], 128;
fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;
@!%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r3], 512;
mov.b32 %r7, 16; mov.b32 %r8, 1;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d2, {%r7, %r8}], [%r3];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra WAIT;
shl.b32 %r9, %r0, 4; add.u32 %r10, %r1, %r9; cvt.u64.u32 %d7, %r9; add.s64 %d8, %d0, %d7;
ld.shared.v4.b32 {%r11, %r12, %r13, %r14}, [%r10]; st.global.v4.b32 [%d8], {%r11, %r12, %r13, %r14};
"""


@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
def test_a_kernel_that_changes_a_map(mode):
    """Another tensor, 24 instead of 16 columns, rows of 128 bytes: a box of 16 x 8 at (16, 1)."""
    old, new = aligned(16 * 64, np.float32, -1), aligned(32 * 9, np.float32)
    new[:] = np.arange(len(new))
    encoded = encode_tiled(7, old.ctypes.data, [16, 9], [256], [16, 8], [1, 1]).encode()
    described, room, out = aligned(128, np.uint8), aligned(128, np.uint8), aligned(128, np.float32, np.nan)
    described[:] = np.frombuffer(encoded, np.uint8)
    m = run(KERNEL, [out, described, room, new, old], SMEM, mode=mode)
    want = new.reshape(9, 32)[1:9, 16:32].copy()
    want[:, 8:] = 0  # beyond the 24 columns
    np.testing.assert_array_equal(out.reshape(8, 16), want)
    assert not m.report.findings
    assert tma.TensorMap.decode(room) == dataclasses.replace(
        tma.TensorMap.decode(described), address=new.ctypes.data, dims=(24, 9), strides=(128,)
    )


def test_a_stride_that_is_no_multiple_of_16_bytes_is_a_fault():
    arrays = [aligned(128, np.uint8) for _ in range(4)]
    with pytest.raises(EmulatorError, match="multiple of 16"):
        run(KERNEL.replace("0, 128;", "0, 120;"), arrays, SMEM)
