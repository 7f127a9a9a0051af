"""wgmma.mma_async: m64nNkK on a warpgroup, D (and optionally A) in registers.

Warp w of the warpgroup has rows 16 w .. 16 w + 15 of A and D, in the fragment layouts of `units.mma` (PTX ISA
9.7.15.5.1). The rows of the four warps are one matrix, which is multiplied at once. K is 32 bytes: 16
elements for f16 and bf16, 8 for tf32, 32 for types of a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers import formats, tensor_cores
from cute_emulator.numbers.arrays import F32, U32
from cute_emulator.units import mma
from cute_emulator.units.smem_desc import SmemDescriptor, decode_wgmma, gather_steps

WARP_ROWS = 16
_K_BYTES = 32


class Operands(NamedTuple):
    """Operands of a wgmma in shared memory, decoded from descriptors.

    Attributes:
        a: Descriptor of A, `None` if A is in registers.
        b: Descriptor of B.
        spans: Ranges of chunk numbers, first and end, that contain each operand.
        atoms: Ranges of the complete swizzle atoms that contain each operand, the same for all K steps in
            them.
    """

    a: SmemDescriptor | None
    b: SmemDescriptor
    spans: list[tuple[int, int]]
    atoms: tuple[tuple[int, int], ...]

    def continues(self, first: Operands) -> bool:
        """Returns whether the operands have the same layout as others, up to their start addresses."""
        if self.a is None or first.a is None:
            return False
        return self.a.differs_in_start(first.a) and self.b.differs_in_start(first.b)


@dataclass(frozen=True)
class Wgmma:
    """Static part of a wgmma instruction.

    Attributes:
        n: Columns of D, a multiple of 8 up to 256.
        a_type: Element type of A: `f16`, `bf16`, `tf32`, `e4m3`, `e5m2`, `s8` or `u8`.
        b_type: Element type of B.
        d_type: `f32`, `f16` or `s32`.
        a_mn_major: `imm-trans-a`: rows of A are contiguous in shared memory.
        b_mn_major: `imm-trans-b`.
        negate_a: Whether `imm-scale-a` is -1.
        negate_b: Whether `imm-scale-b` is -1.
        saturate: Whether an integer D saturates.
    """

    n: int
    a_type: str
    b_type: str
    d_type: str = "f32"
    a_mn_major: bool = False
    b_mn_major: bool = False
    negate_a: bool = False
    negate_b: bool = False
    saturate: bool = False

    def __post_init__(self) -> None:
        if self.n % 8 or not 8 <= self.n <= 256:
            raise ValueError(f"wgmma with n={self.n}: must be a multiple of 8 up to 256")
        if self.d_type == "s32" and self.n > 32 and self.n % 16:
            raise ValueError(f"wgmma of integers with n={self.n}: beyond 32 a multiple of 16")
        if (self.a_mn_major or self.b_mn_major) and formats.ELEMENT_BYTES[self.a_type] != 2:
            raise ValueError(f"wgmma transposes 16-bit operands only, not {self.a_type}")

    @cached_property
    def k(self) -> int:
        """Returns the K extent of one instruction."""
        return _K_BYTES // formats.ELEMENT_BYTES[self.a_type]

    @property
    def d_registers(self) -> int:
        """Returns the number of registers of D per lane."""
        return self.n // 4 if self.d_type == "f16" else self.n // 2

    def operand_b(self, smem: NDArray[np.uint8], *steps: SmemDescriptor) -> F32:
        """Returns B of K steps as `float32 [n, steps * k]`; the same for all warps of the warpgroup."""
        size = formats.ELEMENT_BYTES[self.b_type]
        b = formats.widen(gather_steps(smem, steps, self.n, self.k, size, self.b_mn_major), self.b_type)
        return -b if self.negate_b else b

    def operand_a(self, smem: NDArray[np.uint8], *steps: SmemDescriptor) -> F32:
        """Returns A of K steps as `float32 [64, steps * k]`; warp w uses rows 16 w and up."""
        size = formats.ELEMENT_BYTES[self.a_type]
        rows = 4 * WARP_ROWS
        a = formats.widen(gather_steps(smem, steps, rows, self.k, size, self.a_mn_major), self.a_type)
        return -a if self.negate_a else a

    def operand_a_registers(self, registers: U32) -> F32:
        """Returns one warp's A as `float32 [16, k]` from its four registers `[4, 32]`."""
        a = formats.widen(mma.a_matrix(registers, formats.ELEMENT_BYTES[self.a_type]), self.a_type)
        return -a if self.negate_a else a

    def multiply(self, a: F32, b: F32, d: U32 | None) -> U32:
        """Returns one warp's D registers `[d_registers, 32]`.

        Args:
            a: Rows of A of the warp, `[16, k]`.
            b: B, `[n, k]`.
            d: Registers of D before, or `None` if `scale-d` is 0.
        """
        with np.errstate(all="ignore"):
            total = self.accumulate(a, b, None if d is None else mma.c_matrix(d, self.d_type))
        return mma.c_registers(total, self.d_type)

    def accumulate(self, a: F32, b: F32, d: mma.Matrix | None, sums: str = "device") -> mma.Matrix:
        """Returns `d`, or zero if `d` is `None`, plus `a @ b.T`, for any number of rows.

        Types of a byte accumulate with the device's number of bits (`numbers.tensor_cores`): a kernel that
        omits the necessary additions of parts of K in registers is then wrong. Wider types, with 25 bits, are
        added in fp32 in NumPy's order. With `sums` `exact` all types are added so, with `bitwise` none.
        """
        widths = {"device": (1,), "exact": (), "bitwise": (1, 2)}[sums]
        if formats.ELEMENT_BYTES[self.a_type] in widths and self.d_type == "f32":
            old = np.zeros((len(a), len(b)), np.float32) if d is None else np.asarray(d, np.float32)
            return tensor_cores.aligned_sum(a, b, old, tensor_cores.HOPPER[self.a_type])
        total = mma.add(a @ b.T, d, self.d_type, self.saturate)
        return total.astype(np.float16).astype(np.float32) if self.d_type == "f16" else total

    def decode(self, a: int | None, b: int) -> Operands:
        """Decodes the descriptors of the operands; `a` is `None` for A in registers.

        Raises:
            ValueError: A field has a value that is not modelled.
        """
        left, right = None if a is None else decode_wgmma(a), decode_wgmma(b)
        tiles = self.smem_tiles(left, right)
        atoms = [tile.atoms(*form) for tile, form in tiles]
        edges = tuple([(each.start, each.stop) for each in atoms])
        return Operands(left, right, [tile.span(*form) for tile, form in tiles], edges)

    def smem_tiles(
        self, a: SmemDescriptor | None, b: SmemDescriptor
    ) -> list[tuple[SmemDescriptor, tuple[int, int, int, bool]]]:
        """Returns the tiles read; `a` is `None` for A in registers.

        A tile is its descriptor, and rows, k, bytes of an element, whether MN-major.
        """
        tiles = [(b, (self.n, self.k, formats.ELEMENT_BYTES[self.b_type], self.b_mn_major))]
        if a is not None:
            tiles.append((a, (4 * WARP_ROWS, self.k, formats.ELEMENT_BYTES[self.a_type], self.a_mn_major)))
        return tiles
