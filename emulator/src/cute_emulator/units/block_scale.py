"""Scale factors of a block-scaled `tcgen05.mma`: their layout in tensor memory (PTX ISA 9.7.16.3.2).

One 32-bit cell holds up to four factors of one row of A, or of B (a column of D). They are the factors of
consecutive blocks along K, the first in byte `data id` of the instruction descriptor. The cell of row r is in
lane r % 32, column r // 32; each quarter of the lanes holds a copy.

An instruction may need more factors than the cell's four, such as K = 96 of sm_103. The next cell then
follows the columns of all rows, rounded up to blocks of 128 rows. `tcgen05.cp` writes this layout; it was
seen in kernels with 128 and 256 rows.

With two CTAs each CTA holds the factors of its rows of A and those of all of B. For M = 128, where lanes
split D's columns, the factors of B are in the lanes of their columns of D.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers import formats
from cute_emulator.numbers.arrays import F32

BLOCKS = {"scale_vec::1X": 32, "scale_vec::2X": 32, "scale_vec::4X": 16, "block32": 32, "block16": 16}
"""Elements of K that share a factor, by the instruction's modifier; 32 without a modifier."""


def _next_cell(rows: int) -> int:
    """Returns the number of columns from the cells of `rows` rows to the cells of the next blocks of K."""
    return 4 * -(-rows // 128)


@dataclass(frozen=True)
class Scaling:
    """Block scaling of the operands.

    Attributes:
        block: Elements of K per factor.
        kind: Format of the factors, `ue8m0` or `e4m3` (unsigned: the sign is 0).
        a: Data id of A's factors.
        b: Data id of B's factors.
    """

    block: int
    kind: str
    a: int
    b: int

    def columns(self, rows: int, k: int, data_id: int) -> int:
        """Returns the number of columns of tensor memory that the factors of `rows` rows occupy."""
        further = (data_id + k // self.block - 1) // 4
        return further * _next_cell(rows) + -(-rows // 32)

    def factors(
        self,
        tmem: NDArray[np.uint32],
        address: int,
        rows: int,
        k: int,
        data_id: int,
        quarters: tuple[int, ...],
    ) -> F32:
        """Returns the factors of every row and block, `float32 [rows, k // block]`.

        Args:
            tmem: Tensor memory of the CTA.
            address: Address of the factors; its lane is 0, its two top bits are ignored.
            rows: Rows of A, or of B.
            k: K extent of the instruction.
            data_id: Byte of the first block's factor.
            quarters: Quarters of the lanes that hold a copy each.

        Raises:
            ValueError: The factors exceed tensor memory, the data id is invalid, or the copies differ.
        """
        column, blocks = address & 0xFFFF, k // self.block
        count, cells = self.columns(rows, k, data_id), (data_id + blocks + 3) // 4
        if address >> 16 & 0x3FFF or column + count > tmem.shape[1]:
            raise ValueError(f"tcgen05.mma: scale factors at tensor memory {address:#x} do not fit")
        if data_id + blocks > 4 and blocks not in (3, 6):  # those of K = 96
            raise ValueError(f"tcgen05.mma: {blocks} scale factors of a row from byte {data_id} of a cell on")
        copies = [tmem[32 * q : 32 * q + 32, column : column + count] for q in quarters]
        if not all(np.array_equal(copies[0], other) for other in copies[1:]):
            raise ValueError(
                f"tcgen05.mma: scale factors at tensor memory {address:#x} are not the same in quarters "
                f"{', '.join(map(str, quarters))} of its lanes"
            )
        step, width = _next_cell(rows), -(-rows // 32)
        each = [copies[0][:, n * step : n * step + width].T.reshape(-1)[:rows] for n in range(cells)]
        held = np.stack(each, axis=1)
        codes = held.view(np.uint8)[:, data_id : data_id + blocks]
        return formats.ue8m0_to_f32(codes) if self.kind == "ue8m0" else formats.widen(codes, self.kind)

    def apply(self, operand: F32, factors: F32) -> NDArray[np.floating]:
        """Multiplies an operand `[rows, k]` by its factors, in `float64` if their range requires it."""
        magnitude = np.abs(factors)
        if np.nanmax(magnitude, initial=1.0) > 2.0**50 or np.nanmin(magnitude, initial=1.0) < 2.0**-50:
            operand = operand.astype(np.float64)
        scaled: NDArray[np.floating] = operand * np.repeat(factors, self.block, axis=1)
        return scaled
