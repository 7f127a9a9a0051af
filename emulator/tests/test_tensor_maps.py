"""Tensor maps that CuTe DSL's own host code writes, decoded and written again."""

import cutlass
import numpy as np
import pytest

from cute_emulator.host.device import DeviceProperties
from cute_emulator.host.dsl import seam
from cute_emulator.units import swizzle
from cute_emulator.units.tma import TensorMap

from .kernels import build
from .kernels.gemm_sm100 import GemmSm100

BF16, F16, F32, TF32 = cutlass.BFloat16, cutlass.Float16, cutlass.Float32, cutlass.TFloat32
E4M3, E5M2 = cutlass.Float8E4M3FN, cutlass.Float8E5M2
M, N, K = 200, 72, 136

# kernel -> what A's, B's and C's map must say: (type, box, swizzle)
CASES = {
    GemmSm100(): [
        ("bf16", (64, 128), swizzle.SW128),
        ("bf16", (64, 64), swizzle.SW128),
        ("bf16", (32, 128), swizzle.SW64),
    ],
    GemmSm100(F16, F16, F32, a_major="m", b_major="n", cluster=(2, 1), two_cta=True, tile=(256, 64)): [
        ("f16", (64, 64), swizzle.SW128),
        ("f16", (32, 64), swizzle.SW64),
        ("f32", (32, 128), swizzle.SW128),
    ],
    GemmSm100(TF32, TF32, F32, a_major="m"): [
        ("f32", (32, 32), swizzle.SW128_BASE32),
        ("f32", (32, 64), swizzle.SW128),
        ("f32", (32, 128), swizzle.SW128),
    ],
    GemmSm100(E4M3, E5M2, F16, c_major="m", cluster=(1, 2)): [
        ("u8", (128, 64), swizzle.SW128),
        ("u8", (128, 64), swizzle.SW128),
        ("f16", (64, 32), swizzle.SW128),
    ],
}


@pytest.mark.parametrize("gemm", CASES, ids=["bf16", "f16", "tf32", "f8"])
def test_decodes_what_the_host_encodes(gemm, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path))
    calls = []
    seam.SEAM.open(lambda: DeviceProperties("sm_100a", 148), calls.append, lambda _: None, lambda: None)
    try:
        tensors = build.operands(gemm, M, N, K)
        build.call(build.compile_gemm(gemm), gemm, tensors, 1)
    finally:
        seam.SEAM.close()
    maps = [p[:128] for p in calls[0].params if len(p) >= 128]
    assert len(maps) == 3
    tf32 = gemm.a_type is TF32
    for i, (raw, tensor, (kind, box, mode)) in enumerate(zip(maps, tensors, CASES[gemm], strict=True)):
        decoded = TensorMap.decode(raw)
        inner = 1 if tensor.stride(1) == 1 else 0
        assert decoded.address == tensor.data_ptr()
        assert decoded.dims == (tensor.shape[inner], tensor.shape[1 - inner])
        assert decoded.strides == (tensor.stride(1 - inner) * tensor.element_size(),)
        assert (decoded.type, decoded.box, decoded.swizzle) == (kind, box, mode)
        assert (decoded.tf32, decoded.fill_nan, decoded.interleave) == (tf32 and i < 2, False, 0)
        np.testing.assert_array_equal(*(np.frombuffer(b, np.uint64)[:8] for b in (raw, decoded.encode())))
