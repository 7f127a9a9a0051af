"""What scripts ask of the host: block-scaled torch._scaled_mm, cudaMalloc and its kin, own CPU tensors."""

import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_emulator import Emulator
from cute_emulator.host.torch import device_memory, scaled_mm
from cute_emulator.host.torch.torch_mode import CudaOnCpu, plays_host_memory


def blocked(factors):
    """Factors `[rows, blocks]` as cuBLAS wants them, entry by entry."""
    rows, blocks = factors.shape
    tiles_m, tiles_k = -(-rows // 128), -(-blocks // 4)
    out = np.zeros(512 * tiles_m * tiles_k, np.uint8)
    for (r, b), code in np.ndenumerate(factors):
        tile = r // 128 * tiles_k + b // 4
        out[512 * tile + r % 32 * 16 + r % 128 // 32 * 4 + b % 4] = code
    return torch.from_numpy(out)


def scaled_operand(rng, rows, k, scheme):
    """Its values, the tensor, and its factors as cuBLAS wants them."""
    block, factor, dtype = (
        (16, torch.float8_e4m3fn, ml_dtypes.float4_e2m1fn)
        if scheme == "nvfp4"
        else (32, torch.float8_e8m0fnu, ml_dtypes.float8_e4m3fn)
    )
    codes = rng.integers(0, 16 if block == 16 else 120, (rows, k)).astype(np.uint8)
    low, high = (0x20, 0x60) if block == 16 else (120, 134)
    factors = rng.integers(low, high, (rows, k // block)).astype(np.uint8)
    scale_dtype = ml_dtypes.float8_e4m3fn if block == 16 else ml_dtypes.float8_e8m0fnu
    scales = factors.view(scale_dtype).astype(np.float64)
    values = codes.view(dtype).astype(np.float64) * np.repeat(scales, block, 1)
    if block == 16:
        x = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)
    else:
        x = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return values, x, blocked(factors).view(factor)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
def test_block_scaled_products_of_torch(scheme):
    rng = np.random.default_rng(0)
    m, n, k = 160, 64, 192
    left, a, sa = scaled_operand(rng, m, k, scheme)
    right, b, sb = scaled_operand(rng, n, k, scheme)
    values = left, right
    with CudaOnCpu(Emulator(), 0, lambda: None):
        got = torch._scaled_mm(a, b.t(), sa, sb, out_dtype=torch.float32)
    np.testing.assert_allclose(got.numpy(), values[0] @ values[1].T, rtol=1e-6)
    assert not scaled_mm.is_block_scaled(a, b, torch.ones(1))


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("of_rows", [True, False], ids=["groups of rows", "groups of k"])
def test_a_scaled_product_for_each_group(scheme, of_rows):
    rng = np.random.default_rng(1)
    sizes, n = ((130, 0, 64) if of_rows else (64, 0, 192)), 48
    lefts = [scaled_operand(rng, *((size, 96) if of_rows else (140, size)), scheme) for size in sizes]
    rights = [scaled_operand(rng, n, 96 if of_rows else size, scheme) for size in sizes]
    as_bytes = [[x.view(torch.uint8) for _, x, _ in side] for side in (lefts, rights)]
    a = torch.cat(as_bytes[0], 0 if of_rows else 1).view(lefts[0][1].dtype)
    if of_rows:
        b = torch.stack(as_bytes[1]).view(a.dtype).transpose(1, 2)
    else:
        b = torch.cat(as_bytes[1], 1).view(a.dtype).t()
    scales = [[torch.cat([s.view(torch.uint8) for *_, s in side])] for side in (lefts, rights)]
    scales = [[s.view(lefts[0][2].dtype) for s in side] for side in scales]
    further = np.ones(3)
    if scheme == "nvfp4":
        for side in scales:
            side.append(torch.tensor([0.5, 2.0, 3.0]))
        further = np.array([0.25, 4.0, 9.0])
    ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32)
    with CudaOnCpu(Emulator(), 0, lambda: None):
        got = torch._scaled_grouped_mm_v2(
            a, b, scales[0], [0], [1], scales[1], [0], [1], ends, None, torch.float32, [], False
        )
    products = [f * (x @ y.T) for f, (x, *_), (y, *_) in zip(further, lefts, rights, strict=True)]
    want = np.concatenate(products) if of_rows else np.stack(products)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)


def test_memory_of_the_runtime():
    done, adopted = [], []

    def in_order(operation):
        done.append("wait")
        operation()

    memory = device_memory.DeviceMemory(adopted.append, in_order, lambda: done.append("wait"))
    table = device_memory.runtime_functions(memory)
    table |= device_memory.driver_functions(memory, int)
    a, b = table["cudaMalloc"](64), table["cuMemAlloc"](64)
    assert a % 256 == b % 256 == 0 and len(adopted) == 2
    table["cudaMemset"](a, 7, 64)
    table["cuMemsetD32Async"](b, 0x01020304, 8, None)
    table["cuMemcpyDtoDAsync"](b + 32, a, 16, None)
    host = np.full(64, 0xEE, np.uint8)
    table["cudaMemcpy"](host, b, 64, None)
    want = np.concatenate([np.full(8, 0x01020304, np.uint32).view(np.uint8), np.full(16, 7, np.uint8)])
    np.testing.assert_array_equal(host[:48], want)
    assert (host[48:] == 0xFF).all(), "fresh memory is poisoned"
    table["cudaFree"](a)
    assert done == ["wait"] * 5
    table["cudaHostRegister"](host.ctypes.data, host.nbytes, 3)
    assert adopted[-1].data_ptr() == host.ctypes.data and adopted[-1].nbytes() == host.nbytes
    registered = weakref.ref(adopted.pop())
    assert registered() is not None, "until it is unregistered"
    table["cudaHostUnregister"](host.ctypes.data)
    assert registered() is None and done == ["wait"] * 6


def test_a_script_has_cpu_tensors_of_its_own():
    assert not plays_host_memory(torch.zeros(3)), "a library's tensors are the device's"
    with CudaOnCpu(Emulator(), 0, lambda: None):
        assert plays_host_memory(torch.zeros(3))
        assert not plays_host_memory(torch.zeros(3, device="cuda"))
        assert not plays_host_memory(object())
