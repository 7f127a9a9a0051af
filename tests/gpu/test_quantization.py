"""Rows quantised by one kernel on a GPU: bit for bit what torch's operations make of them there."""

import math
from itertools import product

import pytest
import torch

from overlap_gemm import quantize_rows
from overlap_gemm.api import quantization
from overlap_gemm.backends.triton_kernels.row_quantization import HELD, has_kernel

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 8192), (64, 4096), (33, 200), (2, 3, 130), (300, 1), (5, HELD), (5, HELD + 24), (1031, 328)]


@pytest.fixture(autouse=True)
def one_kernel():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("GPUs before Hopper have no such conversion")


def rows(shape, dtype, device):
    """Of many magnitudes, and rows of zeros, of subnormals, with a NaN, with an infinity."""
    given = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=given) * 2.0 ** torch.randint(-12, 12, (*shape[:-1], 1), generator=given)
    x = x.to(dtype)
    matrix = x.view(-1, shape[-1])
    tiny = torch.finfo(dtype).tiny
    for row, column, value in ((0, -1, math.nan), (1, 0, math.inf), (2, -1, -math.inf)):
        matrix[row + 3 : row + 4, column] = value
    for row, value in enumerate((0.0, -0.0, tiny / 4)):
        matrix[row + 6 : row + 7] = value
    return x.to(device)


def torchs(monkeypatch, x, **how):
    with monkeypatch.context() as patch:
        patch.setattr(quantization, "has_kernel", lambda *_: False)
        return quantize_rows(x, **how)


def by_one_kernel(monkeypatch, x, **how):
    def never(*_):
        raise AssertionError("torch's operations were called")

    with monkeypatch.context() as patch:
        patch.setattr(quantization, "by_torch", never)
        return quantize_rows(x, **how)


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        a, b = a.float(), b.float()
        nan = a.isnan()
        assert torch.equal(nan, b.isnan())
        bits = [part.masked_fill(nan, 0).view(torch.int32) for part in (a, b)]  # so that -0 is not 0
        assert torch.equal(*bits), (bits[0] != bits[1]).nonzero()[:5]


TYPES = list(product([torch.float32, torch.bfloat16, torch.float16], [E4M3, E5M2]))
CASES = {
    "types": list(product([(33, 200), (8, HELD + 16)], TYPES, [None, 128], [False])),
    "shapes": list(product(SHAPES, [(torch.bfloat16, E4M3)], [None, 128], [False, True])),
    "blocks": list(product([(1031, 328)], [(torch.float32, E4M3)], [2, 16, 32, 256, 1024], [False, True])),
}


@pytest.mark.parametrize("kind", CASES)
def test_it_is_what_torchs_operations_make(device, monkeypatch, kind):
    for shape, (given, dtype), block, power in CASES[kind]:
        x, how = rows(shape, given, device), {"dtype": dtype, "block": block, "power_of_two": power}
        ours = by_one_kernel(monkeypatch, x, **how)
        assert_same(ours, torchs(monkeypatch, x, **how))
        assert ours.values.is_contiguous()
        count, blocks = x.numel() // shape[-1], ours.scale.shape[-1]
        if blocks > 1 and count > 1:
            assert ours.scale.view(count, blocks).stride() == (1, -(-count // 4) * 4)


@pytest.mark.parametrize("block", [None, 128])
def test_operands_as_they_lie(device, monkeypatch, block):
    wide = rows((200, 1040), torch.bfloat16, device)
    for x in (
        wide.t(),
        wide[:, 16:900],
        wide[:, 3:900],
        wide[:, ::2],
        wide[3].expand(5, -1),
        wide.view(10, 20, 1040).transpose(0, 1),
        wide.requires_grad_(),
        wide[:0],
        wide[:, :0],
    ):
        call = by_one_kernel if x.numel() else torchs
        ours = call(monkeypatch, x, block=block)
        assert_same(ours, torchs(monkeypatch, x.contiguous(), block=block))
        assert not ours.values.requires_grad


def test_offsets_of_more_than_32_bits(device, monkeypatch):
    x = torch.zeros(2**17 + 3, 2**14, device=device, dtype=torch.bfloat16)
    x[-3:] = rows((3, 2**14), torch.bfloat16, device)
    for block in (None, 128):
        ours = by_one_kernel(monkeypatch, x, block=block)
        last = torchs(monkeypatch, x[-3:], block=block)
        assert_same((ours.values[-3:], ours.scale[-3:]), last)
        del ours


def test_blocks_of_other_lengths_are_torchs_operations(device):
    x = torch.randn(4, 256, device=device)
    assert has_kernel(x, 128) and not has_kernel(x, 40) and not has_kernel(x, 2 * HELD)
    assert quantize_rows(x, block=40).scale.shape == (4, 7)


def test_it_can_be_captured(device):
    x = torch.randn(64, 4096, device=device)
    expected = quantize_rows(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = quantize_rows(x)
    ours.values.view(torch.uint8).zero_()
    graph.replay()
    assert_same(ours, expected)
