"""The shared-memory swizzle that TMA, wgmma and tcgen05 share.

A swizzle permutes 16-byte chunks (32-byte ones for the 32-byte base) by XOR-ing address bits: bits 4.. of the
absolute shared-memory byte address take bits 7.. in. It is applied to absolute addresses, so a tile that does
not begin at a multiple of the pattern's repeat begins in the middle of the pattern (PTX ISA 5.5.6, "Swizzling
modes").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Address = TypeVar("Address", int, "NDArray[np.int64]")


@dataclass(frozen=True, eq=False)  # the constants below are all there are, and keys of caches
class Swizzle:
    """One swizzle mode.

    Attributes:
        name: the field's name for it.
        bits: how many address bits are XOR-ed; 0 is none.
        base: log2 of the unit that stays together, in bytes.
    """

    name: str
    bits: int
    base: int = 4

    @property
    def row_bytes(self) -> int:
        """Width of one row of the pattern in bytes: 32, 64 or 128 (16 without swizzle)."""
        return 16 << self.bits if self.base == 4 else 128

    @property
    def repeat(self) -> int:
        """Number of bytes after which the pattern repeats: an address matters only modulo this."""
        return 128 << self.bits if self.bits else 16

    def apply(self, address: Address) -> Address:
        """The place of the byte at logical address `address` (an int or an array of absolute addresses)."""
        return address ^ (((address >> 7) & ((1 << self.bits) - 1)) << self.base)


NONE = Swizzle("none", 0)
SW32 = Swizzle("32B", 1)
SW64 = Swizzle("64B", 2)
SW128 = Swizzle("128B", 3)
SW128_BASE32 = Swizzle("128B, 32B base", 2, 5)
