"""Layout of tensor memory in a warp's registers (tcgen05.ld, tcgen05.st), and copies (tcgen05.cp).

Register j of lane t holds the 32-bit cell at (lane, column) relative to the address (PTX ISA 9.7.16.8):

- shape     registers  lane                       column
- 32x32b    N          t                          j
- 16x64b    N          t // 4 + 8 * (t % 2)       2 j + t // 2 % 2
- 16x128b   2 N        t // 4 + 8 * (j % 2)       4 * (j // 2) + t % 4
- 16x256b   4 N        t // 4 + 8 * (j // 2 % 2)  8 * (j // 4) + 2 * (t % 4) + j % 2
- 16x32bx2  N          t % 16                     j + (t // 16) * split

With `.pack::16b` (loads) or `.unpack::16b` (stores) a register holds the low halves of two neighbouring
cells, and the columns above count such pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers.arrays import I64, U32
from cute_emulator.units import operands
from cute_emulator.units.smem_desc import SmemDescriptor
from cute_emulator.units.tcgen05 import TMEM_COLUMNS, TMEM_LANES, Tmem

_REGISTERS_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def num_registers(shape: str, repeat: int) -> int:
    """Returns the number of registers per lane of `tcgen05.ld.{shape}.x{repeat}`."""
    if shape not in _REGISTERS_PER_REPEAT:
        raise ValueError(f"tcgen05.ld/st shape {shape!r} is not one of {', '.join(_REGISTERS_PER_REPEAT)}")
    return _REGISTERS_PER_REPEAT[shape] * repeat


def extent(shape: str, repeat: int, packed: bool = False, split: int = 0) -> tuple[int, int]:
    """Returns the number of lanes and columns that an access spans."""
    _, lanes, columns = _relative_index(shape, repeat, packed, split)
    return lanes, columns


def load(tmem: Tmem, address: int, shape: str, repeat: int, packed: bool = False, split: int = 0) -> U32:
    """Returns the registers of one warp that `tcgen05.ld` loads, `uint32 [registers, 32]`.

    Args:
        tmem: Tensor memory of the CTA.
        address: `lane << 16 | column` of the access.
        shape: Shape, such as `32x32b`.
        repeat: N of `.xN`.
        packed: Whether the instruction has `.pack::16b`.
        split: `immHalfSplitoff` of 16x32bx2, in columns.

    Raises:
        ValueError: The access exceeds tensor memory, or the shape may not start at the lane.
    """
    index = _index(address, shape, repeat, packed, split)
    cells = tmem.reshape(-1)[index]
    if packed:
        return (cells[0] & np.uint32(0xFFFF)) | (cells[1] << np.uint32(16))
    return cells


def store(
    tmem: Tmem, address: int, registers: U32, shape: str, repeat: int, unpacked: bool = False, split: int = 0
) -> None:
    """Writes `uint32 [registers, 32]` into tensor memory (`tcgen05.st`); arguments as for `load`."""
    index = _index(address, shape, repeat, unpacked, split)
    if unpacked:
        tmem.reshape(-1)[index] = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)])
    else:
        tmem.reshape(-1)[index] = registers


def _index(address: int, shape: str, repeat: int, packed: bool, split: int) -> I64:
    lane, column = address >> 16, address & 0xFFFF
    index, lanes, columns = _relative_index(shape, repeat, packed, split)
    if lane % lanes or lane + lanes > TMEM_LANES or column + columns > TMEM_COLUMNS:
        raise ValueError(
            f"tcgen05.ld/st {shape}.x{repeat} at tensor memory {address:#x}: touches {columns} columns of "
            f"{TMEM_COLUMNS} and {lanes} lanes, from a lane that is a multiple of {lanes}"
        )
    return index + (lane * TMEM_COLUMNS + column)


@lru_cache(maxsize=256)
def _relative_index(shape: str, repeat: int, packed: bool, split: int) -> tuple[I64, int, int]:
    """Returns the flat TMEM index of an access, and the lanes and columns that the access spans.

    The index is `[registers, 32]`, or `[2, registers, 32]` for packed registers.
    """
    t = np.arange(32, dtype=np.int64)[None, :]
    j = np.arange(num_registers(shape, repeat), dtype=np.int64)[:, None]
    if shape == "32x32b":
        row, column = t + 0 * j, j + 0 * t
    elif shape == "16x64b":
        row, column = t // 4 + 8 * (t % 2) + 0 * j, 2 * j + t // 2 % 2
    elif shape == "16x128b":
        row, column = t // 4 + 8 * (j % 2), 4 * (j // 2) + t % 4
    elif shape == "16x256b":
        row, column = t // 4 + 8 * (j // 2 % 2), 8 * (j // 4) + 2 * (t % 4) + j % 2
    else:  # 16x32bx2
        row, column = t % 16 + 0 * j, j + t // 16 * (split // 2 if packed else split)
    if packed:
        row, column = np.stack([row, row]), np.stack([2 * column, 2 * column + 1])
    return row * TMEM_COLUMNS + column, 32 if shape == "32x32b" else 16, int(column.max()) + 1


# tcgen05.cp: (rows read, bytes per row, lanes that receive row r); PTX ISA 9.7.16.9.2.
_COPIES: dict[str, tuple[int, int, Callable[[I64], list[I64]]]] = {
    "128x256b": (128, 32, lambda r: [r]),
    "4x256b": (4, 32, lambda r: [r + 32 * w for w in range(4)]),
    "128x128b": (128, 16, lambda r: [r]),
    "64x128b.warpx2::02_13": (64, 16, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 16, lambda r: [r % 32 + r // 32 * 64 + w for w in (0, 32)]),
    "32x128b.warpx4": (32, 16, lambda r: [r + 32 * w for w in range(4)]),
}


def copy_source(shape: str) -> tuple[int, int, int, bool]:
    """Returns the matrix that `tcgen05.cp` reads, as arguments of `SmemDescriptor.atoms`.

    They are rows, cells, 4 bytes, K-major.

    Raises:
        ValueError: The shape is unknown.
    """
    if shape not in _COPIES:
        raise ValueError(f"tcgen05.cp shape {shape!r} is not one of {', '.join(_COPIES)}")
    rows, row_bytes, _ = _COPIES[shape]
    return rows, row_bytes // 4, 4, False


def copy_from_smem(
    smem: NDArray[np.uint8],
    tmem: Tmem,
    descriptor: SmemDescriptor,
    address: int,
    shape: str,
    unpacks: int = 0,
) -> None:
    """Copies a K-major matrix of 32-bit cells to tensor memory (`tcgen05.cp`).

    Args:
        smem: Shared memory of the CTA.
        tmem: Tensor memory of the CTA; changed in place.
        descriptor: Source matrix.
        address: TMEM address of the destination; its lane must be 0.
        shape: Shape with multicast, such as `128x256b` or `32x128b.warpx4`.
        unpacks: Bits of the elements in padded chunks that are expanded to a byte each (4 or 6), or 0.

    Raises:
        ValueError: The shape is unknown, or the destination exceeds tensor memory.
    """
    rows, cells, size, mn_major = copy_source(shape)
    lanes_of, column = _COPIES[shape][2], address & 0xFFFF
    if address >> 16 or column + cells > TMEM_COLUMNS:
        raise ValueError(f"tcgen05.cp.{shape} to tensor memory {address:#x} does not fit")
    matrix = descriptor.gather(smem, rows, cells, size, mn_major)
    if unpacks:
        matrix = operands.hold(operands.split_chunks(matrix.view(np.uint8), unpacks), unpacks).view(np.uint32)
    for lanes in lanes_of(np.arange(rows, dtype=np.int64)):
        tmem[lanes, column : column + cells] = matrix
