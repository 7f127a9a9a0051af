"""Tensor maps, and the addresses that a tiled TMA operation accesses.

The host encodes a tensor map as the 128 bytes that the hardware reads. CuTe DSL writes them without the
driver, so this module contains the codec. NVIDIA does not publish the layout: fields marked "inferred" were
not seen set in a map that CuTe DSL wrote.

- word 0: global address
- word 1: [3:0] 2 for tiled (0 in a map that a kernel made of zeros, such as Triton's)
- word 1: [6:4] rank - 1, [10:7] type, [12:11] interleave (inferred), [14:13] swizzle
- word 1: [15] out-of-bounds fill NaN (inferred), [16] f32 is read as tf32, [18:17] L2 promotion
- word 1: [20:19] swizzle unit, 0 for 16 bytes, 1 for 32
- word 1: [21] extent of at least 128 KiB (ignored), [63:32] stride 1 >> 4
- word 2: stride 2 >> 4, stride 3 >> 4
- word 3: stride 4 >> 4, then bits 39..36 of strides 1.. from [35:32] up
- words 4..6: extent - 1 of dimensions 0..4, 32 bits each
- word 6: [46:32] element stride - 1, 3 bits each (inferred), [63:56] box 0 - 1
- word 7: box 1..4 - 1, 8 bits each; words 8..15 are not read
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers.arrays import I64
from cute_emulator.units import swizzle
from cute_emulator.units.swizzle import Swizzle

# Hardware type code -> (name, bits). Signed and 8-bit float types are copied as unsigned ones of their size,
# except where a reduction depends on the type. The order is that of CuTe DSL's TmaDataFormat.
TYPES = {
    0: ("u8", 8),
    1: ("u16", 16),
    2: ("u32", 32),
    3: ("s32", 32),
    4: ("u64", 64),
    5: ("s64", 64),
    6: ("f16", 16),
    7: ("f32", 32),
    8: ("f32.ftz", 32),
    9: ("f64", 64),
    10: ("bf16", 16),
    11: ("b4x16", 4),
    12: ("b4x16_p64", 4),
    13: ("b6x16_p32", 6),
}
PADDED = ("b4x16_p64", "b6x16_p32")
"""Types whose 16 elements, packed in global memory, are padded to a chunk of 16 bytes in shared memory."""
CODES = {name: code for code, (name, _) in TYPES.items()}
# CUtensorMapSwizzle, in its order; the hardware splits the last one into mode 3 and a unit of 32 bytes.
SWIZZLES = (swizzle.NONE, swizzle.SW32, swizzle.SW64, swizzle.SW128, swizzle.SW128_BASE32)
FLOAT_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f32.ftz": 0x7FFFFFFF, "f64": (1 << 63) - 1}
_PLANS = 512  # cached plans: one per geometry, position relative to the edge and phase of the shared address

CHUNK_DTYPE = {16: np.complex128, 8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
"""NumPy type that copies a chunk fastest, bit for bit, by the chunk's bytes."""


class Plan(NamedTuple):
    """Memory that one tiled operation accesses, in chunks of `chunk` bytes (a power of two up to 16).

    A swizzled row is as wide in shared memory as the pattern (`Swizzle.row_bytes`), also for a narrower box.

    Attributes:
        origin: Byte address in global memory of the box, which may be outside the tensor.
        steps: `int64 [n]`, distance in chunks from the origin to each chunk.
        smem: Number of each chunk (its byte address within the CTA's shared window / `chunk`), ascending: a
            slice if they are contiguous, else `int64 [n]`.
        valid: `bool [n]`, whether the chunk is inside the tensor, or `None` if all are.
        chunk: Bytes per chunk.
        box_bytes: Bytes of the full box, which a load adds to the mbarrier's transaction count, valid or not.
        bounds: Lowest and highest of the valid global addresses; meaningless if there are none.
        smem_end: One past the highest byte of the chunks in shared memory.
    """

    origin: int
    steps: I64
    smem: slice | I64
    valid: NDArray[np.bool_] | None
    chunk: int
    box_bytes: int
    bounds: tuple[int, int]
    smem_end: int

    @property
    def global_addresses(self) -> I64:
        """Returns the byte address of each chunk, `int64 [n]`, aligned to `chunk`.

        Meaningless if not valid.
        """
        return self.steps * self.chunk + self.origin

    @property
    def smem_numbers(self) -> I64:
        """Returns `smem` as an array."""
        return np.arange(self.smem.start, self.smem.stop) if isinstance(self.smem, slice) else self.smem

    def inside(self) -> I64:
        """Returns `global_addresses` of the valid chunks only."""
        return self.global_addresses if self.valid is None else self.global_addresses[self.valid]

    def clipped(self) -> tuple[I64, slice | I64]:
        """Returns `inside()` and `smem` of the same chunks, which a store or a reduction accesses."""
        return self.inside(), self.smem if self.valid is None else self.smem_numbers[self.valid]


class _Geometry(NamedTuple):
    """Parameters of a plan's shape.

    Maps of one geometry share plans, whatever the address of their tensor.
    """

    element_bits: int
    padded: bool
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: Swizzle


@dataclass(frozen=True)
class TensorMap:
    """Decoded tiled tensor map; dimension 0 is the contiguous one.

    Attributes:
        address: Global byte address of element (0, ..).
        type: Element type, a name of `TYPES`.
        dims: Extent per dimension, in elements.
        strides: Byte strides of dimensions 1.., `len(dims) - 1` of them.
        box: Box extent per dimension, in elements of the tensor.
        element_strides: Traversal stride per dimension; the first is ignored, as in the driver API.
        swizzle: Swizzle mode of the shared memory.
        tf32: Whether f32 elements are rounded to tf32 on a load.
        fill_nan: Whether out-of-bounds elements of a float type read as NaN instead of zero.
        l2_promotion: Enumerator of the driver; no effect on data.
        interleave: Enumerator of the driver; `plan` refuses all but 0 (none).
    """

    address: int
    type: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: Swizzle = swizzle.NONE
    tf32: bool = False
    fill_nan: bool = False
    l2_promotion: int = 0
    interleave: int = 0

    @property
    def rank(self) -> int:
        """Returns the number of dimensions, 1 to 5."""
        return len(self.dims)

    @property
    def element_bits(self) -> int:
        """Returns the number of bits per element in global memory."""
        return TYPES[CODES[self.type]][1]

    @cached_property
    def box_bytes(self) -> int:
        """Returns the bytes that one operation copies, with out-of-bounds elements and without padding."""
        return self.element_bits * int(np.prod(self._box_counts)) // 8

    @property
    def _box_counts(self) -> tuple[int, ...]:
        return tuple(-(-extent // step) for extent, step in zip(self.box, self._steps, strict=True))

    @property
    def _steps(self) -> tuple[int, ...]:
        return (1, *self.element_strides[1:])

    @cached_property
    def _geometry(self) -> _Geometry:
        if self.interleave:
            raise ValueError(f"interleave mode {self.interleave} of a tensor map is not modelled")
        if self.address % 16:  # CUDA driver API, cuTensorMapEncodeTiled: globalAddress
            raise ValueError(
                f"the tensor map's global address {self.address:#x} is not a multiple of 16 bytes"
            )
        padded = self.type in PADDED
        return _Geometry(self.element_bits, padded, self._box_counts, self._steps, self.strides, self.swizzle)

    @cached_property
    def _room(self) -> tuple[int, ...]:
        """Returns the largest coordinates of a box that is inside the tensor."""
        return tuple(dim - box for dim, box in zip(self.dims, self.box, strict=True))

    @cached_property
    def _granule(self) -> int:
        """Returns the divisor of the innermost coordinate: 16 bytes, or 128 elements of padded types."""
        return 128 if self.type in PADDED else 128 // self.element_bits

    @cached_property
    def _inside(self) -> tuple[None, ...]:
        return (None,) * self.rank

    # -- codec -------------------------------------------------------------------------------------

    @staticmethod
    def decode(raw: bytes | NDArray[np.uint8]) -> TensorMap:
        """Decodes the 128 bytes of a hardware tensor map.

        Raises:
            ValueError: The map is not tiled (im2col, or all zero), or its type, rank or swizzle is not
                modelled. Interleave and the alignment of the address are checked by `plan`.
        """
        if len(raw) != 128:
            raise ValueError(f"a tensor map has 128 bytes, got {len(raw)}")
        return _decode(bytes(raw[:64]))

    def encode(self) -> bytes:
        """Returns the 128 bytes that the hardware reads; the inverse of `decode`."""
        w = [0] * 16
        w[0] = self.address
        strides = [*self.strides] + [0] * (4 - len(self.strides))
        w[1] = 2 | (self.rank - 1) << 4 | CODES[self.type] << 7 | self.interleave << 11
        mode = SWIZZLES.index(self.swizzle)
        mode, unit = (3, 1) if mode == 4 else (mode, 0)
        w[1] |= mode << 13 | self.fill_nan << 15 | self.tf32 << 16 | self.l2_promotion << 17 | unit << 19
        sizes = (self.element_bits / 8, *self.strides)
        extent = max(d * s for d, s in zip(self.dims, sizes, strict=True))
        w[1] |= (extent >= 1 << 17) << 21
        units = [s >> 4 for s in strides]
        low = [u & 0xFFFFFFFF for u in units]
        w[1] |= low[0] << 32
        w[2] = low[1] | low[2] << 32
        w[3] = low[3] | sum((u >> 32) << (32 + 4 * i) for i, u in enumerate(units))
        dims = [d - 1 for d in self.dims] + [0] * (5 - self.rank)
        w[4], w[5], w[6] = dims[0] | dims[1] << 32, dims[2] | dims[3] << 32, dims[4]
        for i, step in enumerate(self.element_strides):
            w[6] |= (step - 1) << (32 + 3 * i)
        w[6] |= (self.box[0] - 1) << 56
        for i, extent in enumerate(self.box[1:]):
            w[7] |= (extent - 1) << (8 * i)
        return np.array(w, np.uint64).tobytes()

    # -- addresses ---------------------------------------------------------------------------------

    def check_start(self, coordinate: int, writes: bool) -> None:
        """Checks an innermost coordinate by the rules measured on an H200 (`emulator/tests/data/README.md`).

        Raises:
            ValueError: The coordinate is not a multiple of 16 bytes (padded types: of 128 elements), or it is
                negative and global memory is written.
        """
        unit, bits = self._granule, self.element_bits
        if coordinate % unit:
            rule = f"a copy begins at a multiple of {unit} elements ({unit * bits // 8} bytes)"
        elif writes and coordinate < 0:
            rule = "a store or reduction begins at 0 or later"
        else:
            return
        at = f"{coordinate} of {self.type} ({bits} bits each) is byte {coordinate * bits / 8:g}"
        raise ValueError(f"innermost coordinate {at}: {rule}; else it is an illegal instruction (on an H200)")

    def plan(self, coordinates: Sequence[int], smem_address: int, writes: bool = False) -> Plan:
        """Plans the box at `coordinates` (innermost first, may be negative) to or from `smem_address`.

        Args:
            coordinates: `rank` element coordinates of the box's first element.
            smem_address: Byte address within the CTA's shared window; the swizzle applies to all its bits.
            writes: Whether global memory is written, by a store or a reduction.

        Raises:
            ValueError: Wrong number of coordinates, an invalid innermost coordinate (`check_start`), a
                misaligned shared address (128 bytes; PTX ISA 5.5.3), a misaligned global address of the map
                (16 bytes), or an interleaved map.
        """
        if len(coordinates) != self.rank:
            raise ValueError(f"{len(coordinates)} coordinates for a tensor map of rank {self.rank}")
        if smem_address % 128:
            raise ValueError(f"TMA shared-memory address {smem_address:#x} is not a multiple of 128 bytes")
        self.check_start(coordinates[0], writes)
        # The plan depends on the position only at an edge, through the overlap.
        overlap: tuple[tuple[int, int] | None, ...] = self._inside
        for c, room in zip(coordinates, self._room, strict=True):
            if not 0 <= c <= room:
                overlap = tuple(
                    (min(max(-c, 0), box), max(min(dim - c, box), 0)) if c < 0 or c + box > dim else None
                    for c, dim, box in zip(coordinates, self.dims, self.box, strict=True)
                )
                break
        phase = smem_address % max(self.swizzle.repeat, 128)
        steps, numbers, valid, chunk, (low, high) = _box_plan(self._geometry, overlap, phase)
        origin = self.address + coordinates[0] * self.element_bits // 8
        for c, stride in zip(coordinates[1:], self.strides, strict=True):
            origin += c * stride
        # Addresses wrap at 64 bits: maps of ragged tensors begin far from the memory of their boxes.
        origin = (origin + (1 << 63)) % (1 << 64) - (1 << 63)
        start = (smem_address - phase) // chunk
        if isinstance(numbers, slice):
            end = numbers.stop + start
            smem: slice | I64 = slice(numbers.start + start, end)
        else:
            smem = numbers + start
            end = int(smem[-1]) + 1
        bounds = (origin + low, origin + high)
        return Plan(origin, steps, smem, valid, chunk, self.box_bytes, bounds, chunk * end)

    def fill_pattern(self, chunk: int) -> NDArray[np.generic]:
        """Returns one chunk of out-of-bounds elements, as a 0-d array of `CHUNK_DTYPE[chunk]`."""
        value = FLOAT_NAN.get(self.type, 0) if self.fill_nan else 0
        size = max(1, self.element_bits // 8)
        element = value.to_bytes(size, "little")
        return np.frombuffer(element * (chunk // size), CHUNK_DTYPE[chunk]).reshape(())


@lru_cache(maxsize=256)
def _decode(raw: bytes) -> TensorMap:
    w = [int(x) for x in np.frombuffer(raw, np.uint64)]
    if w[1] & 0xF not in (0, 2) or not any(w):
        raise ValueError(
            f"not a tiled tensor map (an im2col one is not modelled), or none: word 1 is {w[1]:#018x}"
        )
    rank, code = (w[1] >> 4 & 7) + 1, w[1] >> 7 & 0xF
    mode, unit = w[1] >> 13 & 3, w[1] >> 19 & 3
    if unit > 1 or (unit == 1 and mode != 3):
        raise ValueError(
            f"tensor map with swizzle {mode} in units {unit} is not modelled: word 1 is {w[1]:#018x}"
        )
    if rank > 5 or code not in TYPES:
        raise ValueError(f"tensor map with rank {rank} and type code {code}: word 1 is {w[1]:#018x}")
    units = [w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF]
    strides = [(u | (w[3] >> (32 + 4 * i) & 0xF) << 32) << 4 for i, u in enumerate(units)]
    dims = [w[4] & 0xFFFFFFFF, w[4] >> 32, w[5] & 0xFFFFFFFF, w[5] >> 32, w[6] & 0xFFFFFFFF]
    box = [w[6] >> 56, *(w[7] >> (8 * i) & 0xFF for i in range(4))]
    steps = [w[6] >> (32 + 3 * i) & 7 for i in range(5)]
    return TensorMap(
        address=w[0],
        type=TYPES[code][0],
        dims=tuple(d + 1 for d in dims[:rank]),
        strides=tuple(strides[: rank - 1]),
        box=tuple(b + 1 for b in box[:rank]),
        element_strides=tuple(s + 1 for s in steps[:rank]),
        swizzle=SWIZZLES[4 if unit else mode],
        tf32=bool(w[1] >> 16 & 1),
        fill_nan=bool(w[1] >> 15 & 1),
        l2_promotion=w[1] >> 17 & 3,
        interleave=w[1] >> 11 & 3,
    )


@lru_cache(maxsize=_PLANS)
def _box_plan(
    geometry: _Geometry, overlap: tuple[tuple[int, int] | None, ...], phase: int
) -> tuple[I64, slice | I64, NDArray[np.bool_] | None, int, tuple[int, int]]:
    """Returns the fields of a `Plan` from `steps` on.

    Numbers are relative to the repeat's start, bounds to the origin.
    """
    bits, padded, counts, steps, strides, mode = geometry
    row = counts[0] * bits // 8
    edges = [] if overlap[0] is None else [e * bits // 8 for e in overlap[0]]
    group = 2 * bits if padded else 16  # bytes of global memory that stay together in shared memory
    chunk = next(c for c in (16, 8, 4, 2, 1) if all(x % c == 0 for x in (row, group, *edges)))
    # Innermost dimension in chunks, outer ones in traversal steps; dimension 0 is fastest in shared memory.
    axes = [np.arange(0, row, chunk, dtype=np.int64)]
    axes += [np.arange(n, dtype=np.int64) * s for n, s in zip(counts[1:], steps[1:], strict=True)]
    grid = np.meshgrid(*axes[::-1], indexing="ij")[::-1]
    relative = grid[0].copy()
    for axis, stride in zip(grid[1:], strides, strict=True):
        relative += axis * stride
    # A swizzled row is as wide as the pattern even if the box is narrower (CUDA programming guide,
    # "Swizzle pattern": shared memory must "accommodate the full swizzle width").
    width = row // group * 16 if padded else row
    pitch = max(width, mode.row_bytes) if mode.bits else width
    rows = np.arange(relative.size // axes[0].size, dtype=np.int64) * pitch
    in_row = axes[0] // group * 16 + axes[0] % group if padded else axes[0]
    linear = (rows[:, None] + in_row[None, :]).reshape(-1) + phase
    valid = None
    if any(o is not None for o in overlap):
        valid = np.ones(relative.shape, np.bool_)
        for n, (position, o) in enumerate(zip(grid, overlap, strict=True)):
            if o is not None:
                low, high = edges if n == 0 else o
                valid &= (position >= low) & (position < high)
    inside = relative.reshape(-1) if valid is None else relative[valid]
    bounds = (int(inside.min()), int(inside.max())) if len(inside) else (0, 0)
    numbers = mode.apply(linear) // chunk
    order = np.argsort(numbers)
    numbers, relative = numbers[order], relative.reshape(-1)[order]
    if valid is not None:
        valid = valid.reshape(-1)[order]
    first, end = int(numbers[0]), int(numbers[-1]) + 1
    smem = slice(first, end) if end - first == len(numbers) else numbers
    return relative // chunk, smem, valid, chunk, bounds
