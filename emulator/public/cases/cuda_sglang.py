"""SGLang's CUDA C++ kernels against NumPy in double precision; launches are those of its host code."""

import importlib.util
import struct
import sys
from pathlib import Path

import numpy as np
import tvm_ffi
from nvcc import call, instantiated

KERNELS = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "kernels" / "jit"
random = np.random.default_rng(0)


def kernel(header: str, function: str, parameters: str) -> str:
    """Returns PTX of a kernel of a header."""
    folders = [KERNELS / "include", KERNELS / "csrc", Path(tvm_ffi.__file__).parent / "include"]
    return instantiated([header], function, parameters, folders)


name = sys.argv[1]
if name == "moe-align":
    experts, block, count = 16, 8, 300
    ids = random.integers(0, experts - 1, count).astype(np.int32)
    padded = count + experts * block
    tokens, blocks, total = (
        np.zeros(padded, np.int32),
        np.zeros(padded // block, np.int32),
        np.zeros(1, np.int32),
    )
    begins = np.zeros(experts + 1, np.int32)
    ptx = kernel(
        "moe/moe_align_kernel.cu", "sglang::moe::moe_align_block_size_kernel<int, false, false, false>",
        "const int*, int32_t*, int32_t*, int32_t*, int32_t, int32_t, size_t, "
        "int32_t*, bool, const int32_t, int32_t, int32_t",
    )  # fmt: skip
    args = [ids, tokens, blocks, total, experts, block, count, begins, True, experts, padded, padded // block]
    call(ptx, 2, 256, args, shared=4 * (experts + experts + 1 + experts + 32))
    sizes = -(-np.bincount(ids + 1, minlength=experts) // block) * block
    assert total[0] == sizes.sum() and (tokens == count).all()
    np.testing.assert_array_equal(begins, np.concatenate([[0], sizes.cumsum()]))
    np.testing.assert_array_equal(
        blocks[: total[0] // block], np.repeat(np.arange(experts), sizes // block) - 1
    )
elif name == "moe-softmax":
    x, out = random.standard_normal((5, 300)).astype(np.float32), np.zeros((5, 300), np.float32)
    ptx = kernel(
        "moe/moe_topk_softmax.cuh", "sglang::moeSoftmax<float, 256>",
        "const float*, const bool*, float*, const int, const float, const float*",
    )  # fmt: skip
    call(ptx, 5, 256, [x, None, out, 300, 0.0, None])
    powers = np.exp(x.astype(float) - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, powers / powers.sum(1, keepdims=True), rtol=1e-5)
elif name == "moe-topk":
    x = random.permutation(5 * 300).astype(np.float32).reshape(5, 300) / 1500
    before, out, ids = x.copy(), np.zeros((5, 6), np.float32), np.zeros((5, 6), np.int32)
    ptx = kernel(
        "moe/moe_topk_softmax.cuh", "sglang::moeTopKFast<256>",
        "float*, const bool*, float*, int*, const int, const int, const int, const int, const bool",
    )  # fmt: skip
    call(ptx, 5, 256, [x, None, out, ids, 300, 6, 0, 300, True])
    want = np.argsort(-before, 1)[:, :6]
    np.testing.assert_array_equal(np.sort(ids), np.sort(want))
    taken = np.take_along_axis(before.astype(float), ids, 1)
    np.testing.assert_allclose(out, taken / taken.sum(1, keepdims=True), rtol=1e-5)
elif name == "topk":
    import torch

    k, length = 128, 3000
    scores = torch.tensor(
        random.permutation(2 * length).reshape(2, length), dtype=torch.float32, device="cuda"
    )
    begins = torch.zeros(2, dtype=torch.int32, device="cuda")
    lengths = torch.full((2,), length, dtype=torch.int32, device="cuda")
    out = torch.empty(2, k, dtype=torch.int32, device="cuda")
    ptx = kernel(
        "elementwise/fast_topk.cuh", f"sglang::fast_topk_detail::fast_topk_kernel<{k}, false>",
        "const __grid_constant__ sglang::fast_topk_detail::FastTopKParams",
    )  # fmt: skip
    pointers = [t.data_ptr() for t in (scores, begins, out, lengths)]
    call(ptx, 2, 1024, [struct.pack("<5q", *pointers, length)], shared=32768)
    want = scores.cpu().topk(k).indices
    assert (out.cpu().sort().values == want.sort().values).all()
else:
    raise ValueError(f"no case {name}")
