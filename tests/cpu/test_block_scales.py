"""Scales of blocks as kernels read them, however they lay, and as they travel after a shard's rows."""

from itertools import product

import pytest
import torch

from overlap_gemm.backends.scales.scale_layouts import PaddedScaleRows, ScaleVectors

ROWS, K_BLOCKS = (1, 2, 3, 4, 5, 9), (2, 3, 4, 5)


def lying(matrix, extents, strides, first=0):
    """A copy of a matrix at an offset, with strides of its own; NaN around it."""
    size = first + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True)) + 1
    memory = torch.full((size + 8,), torch.nan)
    return memory.as_strided(extents, strides, first).copy_(matrix)


LAYOUTS = {
    "rows": lambda m, k: (k, 1),
    "rows, apart": lambda m, k: (k + 3, 1),
    "rows, every second element": lambda m, k: (2 * k, 2),
    "along the rows": lambda m, k: (1, m),
    "along the rows, whole 16 bytes": lambda m, k: (1, -(-m // 4) * 4),
    "along the rows, every second element": lambda m, k: (2, 2 * m),
}


def assert_readable(matrix):
    assert matrix.stride(1) == 1 and matrix.stride(0) % 4 == 0 and matrix.stride(0) >= matrix.shape[1]
    assert matrix.data_ptr() % 16 == 0


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("way", LAYOUTS)
def test_scales_that_lie_anywhere_become_lines_of_whole_16_bytes(way, first):
    layout = PaddedScaleRows(128)
    for m, k in product(ROWS, K_BLOCKS):
        scale = lying(torch.rand(m, k), (m, k), LAYOUTS[way](m, k), first)
        of_b = layout.of_b(scale, (128 * m, 128 * k))
        assert_readable(of_b)
        assert torch.equal(of_b[:, :k], scale)
        for step in (None, 1, 3, 4, 5, 100):
            of_a = layout.of_a(scale, (m, 128 * k), step)
            assert_readable(of_a)
            unit = m if step is None or step >= m else -(-step // 4) * 4
            for begin, part in zip(range(0, of_a.shape[1], unit), scale.split(step or m), strict=False):
                assert torch.equal(of_a[:, begin : begin + len(part)], part.t())


def test_scales_that_lie_along_the_rows_are_not_copied():
    scale = lying(torch.rand(6, 3), (6, 3), (1, 8))
    for step in (None, 4, 6):
        assert PaddedScaleRows(128).of_a(scale, (6, 384), step).data_ptr() == scale.data_ptr()
    assert PaddedScaleRows(128).of_a(scale, (6, 384), 2).data_ptr() != scale.data_ptr()


@pytest.mark.parametrize("width", [128, 32])
def test_scales_of_a_shard_are_a_matrix_for_a_full_one(width):
    for rows, chunk, depth in product((0, 1, 33), (33, 70), (144, 256, 272)):
        scale = torch.rand(rows, -(-depth // width))
        sent = PaddedScaleRows(width).of_shard(scale, chunk, depth)
        assert_readable(sent)
        assert sent.is_contiguous()
        assert sent.nbytes == PaddedScaleRows(width).num_bytes(chunk, depth)
        assert torch.equal(sent[:, :rows], scale.t()) and not sent[:, rows:].any()


def test_scales_of_a_full_shard_that_lie_along_its_rows_are_sent_from_their_place():
    scale = lying(torch.rand(8, 3), (8, 3), (1, 8))
    assert PaddedScaleRows(128).of_shard(scale, 8, 384).data_ptr() == scale.data_ptr()
    assert PaddedScaleRows(128).of_shard(scale, 12, 384).data_ptr() != scale.data_ptr()
    for rows in (8, 7):
        vector = torch.rand(rows)
        sent = ScaleVectors().of_shard(vector, rows, 384)
        assert (sent.data_ptr() == vector.data_ptr()) == (rows == 8)
        assert torch.equal(sent[:rows], vector) and len(sent) == 8
