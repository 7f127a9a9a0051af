"""Scales of MX types: e8m0, one for 32 elements of K, in the order in which tensor cores read them.

An *atom* is the scales of 128 rows and 128 elements of K, 512 bytes: row ``r``'s 4 are at
``16 * (r % 32) + 4 * (r // 32)``. A matrix's scales are whole atoms, those of 128 rows after each other
(`torch.nn.functional.SwizzleType.SWIZZLE_32_4_4`). Functions check the number of elements, not the shape.
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
"""Elements of K that share a scale."""

ATOM_SCALES = ATOM_BYTES // ATOM_ROWS
"""Scales of one row in an atom."""


def num_scales(rows: int, depth: int) -> int:
    """Returns the number of scales of a matrix `[rows, depth]`, with the padding of its atoms."""
    return ceil_div(rows, ATOM_ROWS) * atoms_along(depth) * ATOM_BYTES


def atoms_along(depth: int) -> int:
    """Returns the number of atoms that hold the scales of `depth` elements of K."""
    return ceil_div(depth, ATOM_SCALES * WIDTH)


def atoms_of(scale: Tensor) -> Tensor:
    """Returns scales `[rows, ceil(K / 32)]` of 8 bits as `[atoms of rows, bytes]`, padded with zero bytes."""
    rows, width = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -width % ATOM_SCALES, 0, -rows % ATOM_ROWS))
    high, wide = padded.shape[0] // ATOM_ROWS, padded.shape[1] // ATOM_SCALES
    atoms = padded.view(high, ATOM_ROWS // 32, 32, wide, ATOM_SCALES)
    return atoms.permute(0, 3, 2, 1, 4).flatten(1).view(scale.dtype)


def rows_of(scale: Tensor, rows: int, depth: int) -> Tensor:
    """Returns the scales `[rows, ceil(depth / 32)]` from which `atoms_of` made `scale` of any shape."""
    high, wide = ceil_div(rows, ATOM_ROWS), atoms_along(depth)
    atoms = scale.view(torch.uint8).view(high, wide, 32, ATOM_ROWS // 32, ATOM_SCALES)
    all_rows = atoms.permute(0, 3, 2, 1, 4).reshape(high * ATOM_ROWS, wide * ATOM_SCALES)
    return all_rows[:rows, : ceil_div(depth, WIDTH)].view(scale.dtype)


def words_of(scale: Tensor, shape: Sequence[int], step: int | None = None) -> Tensor:
    """Returns the scales of a matrix as kernels read them: int16 `[atoms of rows, words]`.

    Args:
        scale: Scales, `num_scales` elements.
        shape: Shape of the matrix, `[rows, depth]`.
        step: Rows after which tiles restart, and with them atoms; None: nowhere. If `step` is a multiple of
            an atom's rows, nothing is copied.
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
