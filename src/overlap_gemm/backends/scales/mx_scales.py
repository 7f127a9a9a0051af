"""Scales of MX types: e8m0, one per row and 32 elements of K, in the order that tensor cores read.

The unit of this order is an *atom*: the scales of 128 rows and 128 elements of K, in 512 bytes. Row ``r`` has
4 scales in it, at byte ``16 * (r % 32) + 4 * (r // 32)``. Atoms are contiguous along K, then along the rows:
`torch.nn.functional.SwizzleType.SWIZZLE_32_4_4`. Both extents are padded to full atoms. Callers may pass the
scales in any shape with this number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.scale_blocks import ATOM_BYTES, ATOM_ROWS, MX
from ...spec.sharding import ceil_div

SCALE = torch.float8_e8m0fnu

WIDTH = MX[2]
"""Elements of K per scale: 32."""

ATOM_SCALES = ATOM_BYTES // ATOM_ROWS
"""Scales per row of an atom: 4."""


def num_scales(rows: int, depth: int) -> int:
    """Returns the number of scales (bytes) of a matrix `[rows, depth]`, padding included."""
    return ceil_div(rows, ATOM_ROWS) * atoms_along(depth) * ATOM_BYTES


def atoms_along(depth: int) -> int:
    """Returns the number of atoms along K for `depth` elements."""
    return ceil_div(depth, ATOM_SCALES * WIDTH)


def atoms_of(scale: Tensor) -> Tensor:
    """Returns row-major scales in the order of atoms, padded with zero bytes.

    Args:
        scale: `[rows, ceil(K / 32)]`, of an 8-bit dtype.

    Returns:
        `[ceil(rows / 128), atoms along K * 512]`, of the same dtype.
    """
    rows, width = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -width % ATOM_SCALES, 0, -rows % ATOM_ROWS))
    high, wide = padded.shape[0] // ATOM_ROWS, padded.shape[1] // ATOM_SCALES
    atoms = padded.view(high, ATOM_ROWS // 32, 32, wide, ATOM_SCALES)
    return atoms.permute(0, 3, 2, 1, 4).flatten(1).view(scale.dtype)


def rows_of(scale: Tensor, rows: int, depth: int) -> Tensor:
    """Returns row-major scales `[rows, ceil(depth / 32)]`; inverse of `atoms_of`.

    Args:
        scale: Scales in the order of atoms, `num_scales(rows, depth)` elements of any shape, contiguous.
        rows: Rows of the matrix.
        depth: K of the matrix.
    """
    high, wide = ceil_div(rows, ATOM_ROWS), atoms_along(depth)
    atoms = scale.view(torch.uint8).view(high, wide, 32, ATOM_ROWS // 32, ATOM_SCALES)
    all_rows = atoms.permute(0, 3, 2, 1, 4).reshape(high * ATOM_ROWS, wide * ATOM_SCALES)
    return all_rows[:rows, : ceil_div(depth, WIDTH)].view(scale.dtype)


def words_of(scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
    """Returns the scales as kernels load them: int16 `[ceil(rows / 128), atoms along K * 256]`.

    The result is a view of `scale` if that is contiguous, begins at a multiple of 16 bytes, and `step` needs
    no new atoms. Otherwise it is a copy. A matrix without scales gets one line of zeros.

    Args:
        scale: Scales in the order of atoms, `num_scales(*shape)` elements.
        shape: `[rows, K]` of the matrix.
        step: Rows of a full shard if tiles restart at each shard; None: they do not. Each shard then begins
            with a new atom, which needs a copy unless `step` is a multiple of 128.
    """
    rows, depth = shape
    words = max(atoms_along(depth), 1) * ATOM_BYTES // 2
    if not scale.numel():  # of a matrix without elements, which is not read, or is read as zeros
        return scale.new_zeros(2 * words, dtype=torch.uint8).view(torch.int16).view(1, words)
    if step is not None and step < rows and step % ATOM_ROWS:
        scale = torch.cat([atoms_of(part) for part in rows_of(scale, rows, depth).split(step)])
    elif not scale.is_contiguous() or scale.data_ptr() % 16:
        scale = scale.clone(memory_format=torch.contiguous_format)
    return scale.view(torch.uint8).view(-1).view(torch.int16).view(-1, words)
