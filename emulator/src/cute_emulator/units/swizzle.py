"""Shared-memory swizzle of TMA, wgmma and tcgen05.

A swizzle permutes 16-byte chunks (32-byte ones for the 32-byte base) by XOR of bits of the absolute
shared-memory byte address. `n` bits from bit 4 (5 for the 32-byte base) are XOR-ed with the `n` bits from bit
7. `n` is 1, 2, 3 for 32, 64, 128 bytes, and 2 for the 32-byte base. So a tile that begins between two repeats
begins in the middle of the pattern (PTX ISA 5.5.6, "Swizzling modes").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Address = TypeVar("Address", int, "NDArray[np.int64]")


@dataclass(frozen=True, eq=False)  # the constants below are the only instances, and keys of caches
class Swizzle:
    """Swizzle mode.

    Attributes:
        name: Name of the mode.
        bits: Number of address bits that are XOR-ed; 0 is none.
        base: log2 of the size in bytes of the unit that is not permuted inside.
    """

    name: str
    bits: int
    base: int = 4

    @property
    def row_bytes(self) -> int:
        """Returns the width of one row of the pattern in bytes: 32, 64 or 128 (16 without swizzle)."""
        return 16 << self.bits if self.base == 4 else 128

    @property
    def repeat(self) -> int:
        """Returns the number of bytes after which the pattern repeats: only the address modulo it matters."""
        return 128 << self.bits if self.bits else 16

    def apply(self, address: Address) -> Address:
        """Returns the physical address of a byte.

        `address` is an int or an array of absolute logical addresses.
        """
        return address ^ (((address >> 7) & ((1 << self.bits) - 1)) << self.base)


NONE = Swizzle("none", 0)
SW32 = Swizzle("32B", 1)
SW64 = Swizzle("64B", 2)
SW128 = Swizzle("128B", 3)
SW128_BASE32 = Swizzle("128B, 32B base", 2, 5)
