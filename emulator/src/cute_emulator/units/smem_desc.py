"""Shared-memory matrix descriptors of wgmma (sm_90) and tcgen05 (sm_100), and the tiles they describe.

Both contain, in units of 16 bytes: start address [13:0], leading-dimension byte offset LBO [29:16],
stride-dimension byte offset SBO [45:32]. sm_100 adds version 1 in [47:46], and the swizzle moves from [63:62]
to [63:61] (PTX ISA 9.7.15.5.1 and 9.7.16.4.1). Let T be the elements in 16 bytes and S the elements in one
swizzled row; the byte address of element (row, k) before the swizzle is `start +`:

- K-major, swizzled:   (row // 8) * SBO + (row % 8) * row_bytes + k * size
- K-major, none:       (row // 8) * SBO + (row % 8) * 16 + (k // T) * LBO + (k % T) * size
- MN-major, swizzled:  (row // S) * LBO + (row % S) * size + (k // G) * SBO + (k % G) * row_bytes
- MN-major, none:      (row // T) * SBO + (row % T) * size + (k // 8) * LBO + (k % 8) * 16

A pattern has G = 8 rows, or 4 in the pattern with 32-byte base of 32-bit MN-major operands. The swizzle is
applied to the sum (`units.swizzle`). K advances inside a pattern by an offset of the start address.

An instruction of sm_103 takes 48 bytes of K, which may begin in one swizzled row and end in another. Bit 52
then marks LBO as an address instead of an offset: the tile of the remaining K starts there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers.arrays import I64
from cute_emulator.units import swizzle
from cute_emulator.units.swizzle import Swizzle

_UMMA_SWIZZLES = {
    0: swizzle.NONE,
    1: swizzle.SW128_BASE32,
    2: swizzle.SW128,
    4: swizzle.SW64,
    6: swizzle.SW32,
}
_WGMMA_SWIZZLES = (swizzle.NONE, swizzle.SW128, swizzle.SW64, swizzle.SW32)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class SmemDescriptor:
    """Decoded matrix descriptor; all fields in bytes.

    Attributes:
        start: Address within the CTA's shared window.
        leading: Leading-dimension byte offset (LBO).
        stride: Stride-dimension byte offset (SBO).
        swizzle: Swizzle mode.
        following: Address of the tile that continues this one at the end of a row, if the descriptor has one.
    """

    start: int
    leading: int
    stride: int
    swizzle: Swizzle
    following: int | None = None

    def pieces(self, k: int, element_bytes: int) -> list[tuple[SmemDescriptor, int]]:
        """Returns the one or two tiles that contain `k` elements along K, with the elements in each."""
        if self.following is None:
            return [(self, k)]
        row = self.swizzle.row_bytes
        room = (row - self.start % row) // element_bytes
        first = replace(self, following=None)
        if k <= room:
            return [(first, k)]
        return [(first, room), (replace(first, start=self.following), k - room)]

    def differs_in_start(self, other: SmemDescriptor) -> bool:
        """Returns whether the other descriptor describes the same tile, up to its start address."""
        return (self.leading, self.stride, self.swizzle) == (other.leading, other.stride, other.swizzle)

    def addresses(self, rows: int, k: int, element_bytes: int, mn_major: bool) -> I64:
        """Returns the byte address of every element within the CTA's shared window, `int64 [rows, k]`."""
        plan, base = _plan((self,), rows, k, element_bytes, mn_major)
        chunks = 16 * (plan + base)[:, :, None] + np.arange(0, 16, element_bytes, dtype=np.int64)
        if mn_major:  # [k, rows / T, T]
            return chunks.reshape(k, rows).T
        return chunks.reshape(rows, k)

    def chunk_addresses(self, rows: int, k: int, element_bytes: int, mn_major: bool) -> I64:
        """Returns the byte addresses of the 16-byte chunks that an operation reads of the tile, flat."""
        plan, base = _plan((self,), rows, k, element_bytes, mn_major)
        return 16 * (plan.reshape(-1) + base)

    def span(self, rows: int, k: int, element_bytes: int, mn_major: bool) -> tuple[int, int]:
        """Returns the range of chunk numbers (addresses / 16), first and end, of `chunk_addresses`."""
        mode = self.swizzle
        phase = self.start % mode.repeat
        first, end = _tile_span(self.leading, self.stride, mode, (phase,), rows, k, element_bytes, mn_major)
        base = (self.start - phase) >> 4
        return base + first, base + end

    def atoms(self, rows: int, k: int, element_bytes: int, mn_major: bool) -> slice:
        """Returns the chunk numbers of the complete swizzled rows that contain the tile.

        All K steps in the same rows have equal ones.
        """
        first, end = self.span(rows, k, element_bytes, mn_major)
        row = self.swizzle.row_bytes >> 4
        return slice(first // row * row, -(-end // row) * row)

    def gather(
        self, smem: NDArray[np.uint8], rows: int, k: int, element_bytes: int, mn_major: bool
    ) -> NDArray[np.unsignedinteger]:
        """Reads the tile's element patterns.

        Args:
            smem: Shared memory of the CTA from address 0 on; its length is a multiple of 16 bytes.
            rows: M or N extent of the tile.
            k: K extent; `k * element_bytes` must be a multiple of 16 for K-major tiles.
            element_bytes: 1, 2 or 4.
            mn_major: Whether rows rather than k are contiguous.

        Returns:
            Unsigned array `[rows, k]` (for MN-major tiles the transpose of a contiguous one).

        Raises:
            IndexError: The tile exceeds `smem`.
        """
        return gather_steps(smem, (self,), rows, k, element_bytes, mn_major)


def gather_steps(
    smem: NDArray[np.uint8],
    steps: tuple[SmemDescriptor, ...],
    rows: int,
    k: int,
    element_bytes: int,
    mn_major: bool,
) -> NDArray[np.unsignedinteger]:
    """Reads consecutive tiles along K that differ only in `start`: `[rows, len(steps) * k]`.

    Arguments and errors as for `SmemDescriptor.gather`.
    """
    plan, base = _plan(steps, rows, k, element_bytes, mn_major)
    chunks = smem.view(np.complex128)[plan + base]
    tile = chunks.view(_UNSIGNED[element_bytes])
    return tile.T if mn_major else tile


def _plan(
    steps: tuple[SmemDescriptor, ...], rows: int, k: int, element_bytes: int, mn_major: bool
) -> tuple[I64, int]:
    """Returns numbers of the tiles' 16-byte chunks relative to a base, and the base."""
    first = steps[0]
    origin = first.start - first.start % first.swizzle.repeat
    starts = tuple([step.start - origin for step in steps])
    plan = _tile_plan(first.leading, first.stride, first.swizzle, starts, rows, k, element_bytes, mn_major)
    return plan, origin >> 4


@lru_cache(maxsize=512)
def _tile_plan(
    leading: int,
    stride: int,
    mode: Swizzle,
    starts: tuple[int, ...],
    rows: int,
    k: int,
    size: int,
    mn_major: bool,
) -> I64:
    """Returns chunk numbers from the start of a swizzle repeat.

    The shape is `[rows, steps * k / T]`, or `[steps * k, rows / T]` for MN-major tiles.
    """
    per_chunk = 16 // size
    contiguous, other = (rows, k) if mn_major else (k, rows)
    if contiguous % per_chunk:
        raise ValueError(
            f"{contiguous} contiguous elements of {size} bytes are not a multiple of a 16-byte chunk"
        )
    c = np.arange(contiguous // per_chunk, dtype=np.int64)[None, :]
    o = np.arange(other, dtype=np.int64)[:, None]
    in_row = mode.row_bytes // 16
    group = 4 if mode.base == 5 else 8
    if mode.bits == 0:
        across, along = (leading, stride) if mn_major else (stride, leading)
        linear = o // 8 * across + o % 8 * 16 + c * along
    elif mn_major:
        linear = c // in_row * leading + c % in_row * 16 + o // group * stride + o % group * mode.row_bytes
    else:
        linear = o // 8 * stride + o % 8 * mode.row_bytes + c * 16
    return np.concatenate([mode.apply(linear + start) >> 4 for start in starts], axis=0 if mn_major else 1)


@lru_cache(maxsize=512)
def _tile_span(*tile: Any) -> tuple[int, int]:
    plan = _tile_plan(*tile)
    return int(plan.min()), int(plan.max()) + 1


@lru_cache(maxsize=4096)
def decode_umma(descriptor: int) -> SmemDescriptor:
    """Decodes a tcgen05 (sm_100) shared-memory descriptor.

    Raises:
        ValueError: A field has a value that is reserved or not modelled.
    """
    version, layout = descriptor >> 46 & 3, descriptor >> 61
    if version != 1:
        raise ValueError(f"tcgen05 shared-memory descriptor {descriptor:#018x} has version {version}, not 1")
    if layout not in _UMMA_SWIZZLES:
        raise ValueError(f"tcgen05 shared-memory descriptor {descriptor:#018x} has reserved layout {layout}")
    decoded = _decode(descriptor, _UMMA_SWIZZLES[layout])
    if not descriptor >> 52 & 1:
        return decoded
    if decoded.swizzle is not swizzle.SW128:
        raise ValueError(
            f"tcgen05 shared-memory descriptor {descriptor:#018x}: an absolute LBO without the 128-byte "
            "swizzle is not modelled"
        )
    return replace(decoded, leading=0, following=decoded.leading)


@lru_cache(maxsize=4096)
def decode_wgmma(descriptor: int) -> SmemDescriptor:
    """Decodes a wgmma (sm_90) shared-memory descriptor.

    Raises:
        ValueError: A field has a value that is not modelled.
    """
    return _decode(descriptor, _WGMMA_SWIZZLES[descriptor >> 62])


def _decode(descriptor: int, mode: Swizzle) -> SmemDescriptor:
    if descriptor >> 49 & 7:
        raise ValueError(
            f"shared-memory descriptor {descriptor:#018x} has a base offset, which is not modelled"
        )
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return SmemDescriptor(start, leading, stride, mode)
