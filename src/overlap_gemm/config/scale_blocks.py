"""Blocks of 8-bit operands that may share a scale, and the rules of their kernels.

Imports neither the DSL nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from overlap_gemm.config.naming import by

if TYPE_CHECKING:
    from overlap_gemm.config.gemm_config import GemmConfig

Blocks = tuple[int, int, int]
"""(Rows of A, rows of B, elements of K) that share a scale."""

PROMOTED: tuple[Blocks, ...] = ((1, 128, 128), (1, 32, 32))
"""Blocks of `mainloop.blocks`: fp32 scales that multiply sums as they are promoted.

They are for kernels that promote: 8-bit operands on sm_90a without fast_accum, not swap_ab."""

MX: Blocks = (1, 1, 32)
"""Blocks of `mainloop.mx`: e8m0 scales by which the MMA multiplies its operands.

They are for 8-bit operands on sm_100a and sm_103a, CTA tiles of 128 rows and a multiple of 128 columns, not
swap_ab."""

BLOCKS = (*PROMOTED, MX)

ATOM_ROWS = 128
"""Rows of an atom: the scales of 128 rows and 128 elements of K, `ATOM_BYTES` together."""

ATOM_BYTES = 512

NUM_MATRICES = 2
"""Number of matrices of block scales, the first of a kernel's ``extras``: A's and B's."""

TMA_SCALES = 4
"""Least scales of `PROMOTED` of a TMA box along K: 16 bytes."""

STAGE_ALIGNMENT = 128
"""Alignment in bytes of the destination of a TMA load."""


class OperandTypes(NamedTuple):
    """Types of a kernel's A and B, by which configurations and their times are selected.

    Attributes:
        dtype: Type of A and B, as `GemmConfig.in_dtype`.
        blocks: Blocks of the scales of 8-bit operands; None: scales per row.
    """

    dtype: str
    blocks: Blocks | None = None

    @property
    def column_unit(self) -> int:
        """Returns the number of columns that share a scale."""
        return self.blocks[1] if self.blocks else 1


def in_words(blocks: Blocks | None) -> str:
    """Returns a description of blocks, for messages."""
    return "rows" if blocks is None else f"blocks of {blocks[1]} x {blocks[2]}"


def check_blocks(config: GemmConfig) -> None:
    """Raises ValueError, naming the rule, for blocks that a configuration has no kernel for."""
    if config.blocks not in (None, *BLOCKS):
        raise ValueError(f"blocks must be one of {', '.join(map(str, BLOCKS))}; got {config.blocks}")
    if config.blocks == MX:
        on_mma = config.has_bytes and config.on.multiplies_scales and config.cta_tile[0] == ATOM_ROWS
        if not on_mma or config.is_swap_ab or config.tile[1] % ATOM_ROWS:
            raise ValueError(
                f"blocks={MX} are for 8-bit types where the MMA multiplies scales, in tiles of "
                f"{ATOM_ROWS} rows a CTA and multiples of {ATOM_ROWS} columns, not swapped; got "
                f"tile={by(config.tile)}, mma={config.mma!r} on {config.arch}, in_dtype={config.in_dtype!r}"
            )
    if config.blocks in PROMOTED and (not config.promotes or config.is_swap_ab):
        raise ValueError(
            f"blocks={config.blocks} are for kernels that promote, and not swap_ab; got "
            f"mma={config.mma!r} on {config.arch}, in_dtype={config.in_dtype!r}, "
            f"fast_accum={config.fast_accum}"
        )
