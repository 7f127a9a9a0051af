"""FlashInfer's CUDA C++ kernels against NumPy in double precision; launches are those of its host code."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
from nvcc import call, instantiated

DATA = Path(importlib.util.find_spec("flashinfer").submodule_search_locations[0]) / "data"
random = np.random.default_rng(0)


def kernel(header: str, function: str, parameters: str, before: str = "") -> str:
    """Returns PTX of a kernel of a header."""
    folders = [DATA / "include", DATA / "spdlog" / "include"]
    return instantiated([f"flashinfer/{header}"], f"flashinfer::{function}", parameters, folders, before)


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns the norm of rows."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def half(*shape: int) -> np.ndarray:
    """Returns random numbers."""
    return random.standard_normal(shape).astype(np.float16)


name, tolerance = sys.argv[1], 2e-3
if name == "cuda-rmsnorm":
    x, weight, out = half(5, 1000), half(1000), half(5, 1000)
    ptx = kernel(
        "norm.cuh",
        "norm::RMSNormKernel<8, half>",
        "half*, half*, half*, uint32_t, uint32_t, uint32_t, float, float",
    )
    call(ptx, 5, (32, 4), [x, weight, out, 1000, 1000, 1000, 0.0, 1e-6], shared=16)
    want = rms(x.astype(float), weight.astype(float))
elif name == "cuda-add-rmsnorm":
    x, residual, weight = half(5, 1000), half(5, 1000), half(1000)
    total = x.astype(float) + residual
    ptx = kernel(
        "norm.cuh",
        "norm::FusedAddRMSNormKernel<8, half>",
        "half*, half*, half*, uint32_t, uint32_t, uint32_t, float, float",
    )
    call(ptx, 5, (32, 4), [x, residual, weight, 1000, 1000, 1000, 0.0, 1e-6], shared=4 * (4 + 1000))
    out, want = np.stack([x, residual]), np.stack([rms(total, weight.astype(float)), total])
    tolerance = 4e-3
elif name == "silu-and-mul":
    x, out = half(6, 2 * 512), half(6, 512)
    silu = "__device__ __forceinline__ float silu(const float& x) { return x / (1.0f + __expf(-x)); }"
    ptx = kernel(
        "activation.cuh", "activation::act_and_mul_kernel<half, silu, 8>", "half*, const half*, int", silu
    )
    call(ptx, 6, 64, [out, x, 512])
    gate, up = np.split(x.astype(float), 2, 1)
    want = gate / (1 + np.exp(-gate)) * up
elif name == "pack-bits":
    bits, out = random.integers(0, 2, 5000).astype(np.uint8), np.zeros(625, np.uint8)
    little = "quantization::PackBitsKernel<flashinfer::quantization::BitOrder::kLittle>"
    ptx = kernel("quantization.cuh", little, "bool*, uint8_t*, int64_t")
    call(ptx, 3, 256, [bits, out, 5000], named="BitOrderE1")
    want = np.packbits(bits, bitorder="little")
elif name == "topk-mask":
    logits = random.permutation(6000).astype(np.float32).reshape(2, 3000) - 3000
    out, states = np.zeros_like(logits), np.zeros(2 * 4096, np.uint8)
    ptx = kernel(
        "topk.cuh", "sampling::RadixTopKMaskLogitsKernel_MultiCTA<256, 4, false, float, int>",
        "float*, float*, int*, uint32_t, uint32_t, uint32_t, "
        "flashinfer::sampling::RadixRowState*, uint32_t, uint32_t",
    )  # fmt: skip
    call(ptx, 6, 256, [logits, out, None, 40, 3000, 2, states, 1000, 3], shared=2080 + 4 * 1000)
    least = np.sort(logits, 1)[:, -40, None]
    want = np.where(logits >= least, logits, -np.inf)
    assert not states.any(), "the state is not reset for the next launch"
elif name == "softmax":
    logits, out, temperature = (
        random.standard_normal((3, 3000)).astype(np.float32),
        np.zeros((3, 3000), np.float32),
        0.7,
    )
    ptx = kernel(
        "sampling.cuh",
        "sampling::OnlineSoftmaxFusedKernel<256, 4, float, true>",
        "float*, float*, float*, float, uint32_t",
    )
    call(ptx, 3, 256, [logits, out, None, temperature, 3000], shared=4096 + 4 * 3000)
    powers = np.exp((logits - logits.max(1, keepdims=True)).astype(float) / temperature)
    want, tolerance = powers / powers.sum(1, keepdims=True), 1e-6
elif name == "merge-states":
    sets, heads, width = 37, 2, 128
    v, s = half(3, sets, heads, width), random.standard_normal((3, sets, heads)).astype(np.float32)
    out, merged = half(3, heads, width), np.zeros((3, heads), np.float32)
    ptx = kernel(
        "attention/cascade.cuh", "MergeStatesLargeNumIndexSetsKernel<8, 16, 8, 4, half, half>",
        "half*, float*, half*, float*, uint32_t, uint32_t",
    )  # fmt: skip
    call(ptx, (3, heads), (16, 8), [v, s, out, merged, sets, heads], shared=4 * 8 * width * 2 + 128 * 4)
    share = np.exp2(s.astype(float))
    want = (v * share[..., None]).sum(1) / share.sum(1)[..., None]
    np.testing.assert_allclose(merged, np.log2(share.sum(1)), rtol=1e-5)
elif name == "rope":
    rows, heads, shared_heads, width = 6, 4, 2, 64
    q, k, angles = half(rows, heads, width), half(rows, shared_heads, width), random.standard_normal((10, 32))
    cache = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    positions = random.integers(0, 10, rows).astype(np.int32)
    ptx = kernel(
        "pos_enc.cuh", "BatchQKApplyRotaryPosIdsCosSinCacheKernel<false, 64, 8, 8, half, int>",
        "half*, half*, half*, half*, float*, int*, uint32_t, uint32_t, uint32_t, uint32_t, "
        "size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t",
    )  # fmt: skip
    q_out, k_out = np.zeros_like(q), np.zeros_like(k)
    strides = [heads * width, width, shared_heads * width, width]
    call(
        ptx,
        2,
        (8, 4),
        [q, k, q_out, k_out, cache, positions, rows, heads, shared_heads, width, *strides, *strides],
    )
    x = np.concatenate([q, k], 1).astype(float)
    low, high = np.split(x, 2, 2)
    turn = np.concatenate([angles, angles], 1)[positions][:, None]
    out, want = (
        np.concatenate([q_out, k_out], 1),
        x * np.cos(turn) + np.concatenate([-high, low], 2) * np.sin(turn),
    )
else:
    raise ValueError(f"no case {name}")
np.testing.assert_allclose(out.astype(float), want, rtol=tolerance, atol=tolerance)
