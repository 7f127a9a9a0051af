"""Rows to 8 bits, with scales: two Triton kernels, which read each element from memory once if they can.

`of_tiles` holds whole rows, or whole blocks of rows, in registers between finding a scale and applying it.
`of_long_rows` is for rows that are too long, or not contiguous: it reads them twice, and where they are
contiguous the second time from the L2 cache, which is much larger than the rows under way.

Results are those of torch's expressions (`api.quantization`) bit for bit, but for what a NaN looks like:
products and the reciprocal are rounded as IEEE 754 says, the conversion to the nearest even. Of magnitudes
the bits are compared, as integers, among which a NaN is the largest.

`backends.scales.row_quantization` imports this when it launches them: torch's builds for CPUs have no
Triton.
"""

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
MANTISSA = tl.constexpr(0x007FFFFF)
INFINITE = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=("rows", "scales_block"))
def of_tiles(
    x, values, scales, rows, width, x_row, x_column, scales_block,
    UNIT: tl.constexpr, LEAST: tl.constexpr, POWER: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program quantises a tile of ROWS rows and BLOCKS blocks of BLOCK elements, each with a scale.

    Args:
        x: `[rows, width]`, of strides x_row and x_column.
        values: `[rows, width]`, 8 bits, contiguous.
        scales: Float32, `[rows, ceil(width / BLOCK)]`, of strides 1 and scales_block.
        rows: Of x.
        width: Of x; of blocks that are whole rows not more than BLOCK.
        x_row: Elements.
        x_column: Elements.
        scales_block: Elements.
        UNIT: One over the largest value of 8 bits.
        LEAST: Scale.
        POWER: Whether scales are powers of two.
        ROWS: Of a tile, a power of two.
        BLOCKS: Of a tile, a power of two.
        BLOCK: Elements, a power of two.
    """
    across = tl.cdiv(width, BLOCKS * BLOCK)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = program % across * BLOCKS + tl.arange(0, BLOCKS)
    column = program % across * (BLOCKS * BLOCK) + tl.arange(0, BLOCKS * BLOCK)
    wide = _load(x, row, column, rows, width, x_row, x_column)
    wide = tl.reshape(wide, (ROWS, BLOCKS, BLOCK))
    scale = _scale(tl.max(_magnitude(wide), 2), UNIT, LEAST, POWER)
    quotient = wide * tl.div_rn(1.0, scale)[:, :, None]
    _store(values, tl.reshape(quotient, (ROWS, BLOCKS * BLOCK)), row, column, rows, width)
    inside = (row < rows)[:, None] & (block * BLOCK < width)[None, :]
    tl.store(scales + row[:, None] + block[None, :].to(tl.int64) * scales_block, scale, inside)


@triton.jit(do_not_specialize=("rows",))
def of_long_rows(
    x, values, scales, rows, width, x_row, x_column,
    UNIT: tl.constexpr, LEAST: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program quantises ROWS rows, each with a scale, COLUMNS elements at a time.

    Args:
        x: `[rows, width]`, of strides x_row and x_column.
        values: `[rows, width]`, 8 bits, contiguous.
        scales: Float32, `[rows]`.
        rows: Of x.
        width: Of x.
        x_row: Elements.
        x_column: Elements.
        UNIT: One over the largest value of 8 bits.
        LEAST: Scale.
        POWER: Whether scales are powers of two.
        ROWS: Of a program, a power of two.
        COLUMNS: At a time, a power of two.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        most = tl.maximum(most, _magnitude(_load(x, row, column, rows, width, x_row, x_column)))
    scale = _scale(tl.max(most, 1), UNIT, LEAST, POWER)
    factor = tl.div_rn(1.0, scale)[:, None]
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        wide = _load(x, row, column, rows, width, x_row, x_column)
        _store(values, wide * factor, row, column, rows, width)
    tl.store(scales + row, scale, row < rows)


@triton.jit
def _load(x, row, column, rows, width, x_row, x_column):
    """Elements `[row, column]` in float32, zeros outside."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * x_row + column[None, :].to(tl.int64) * x_column
    return tl.load(x + places, inside, 0.0).to(tl.float32)


@triton.jit
def _store(values, quotient, row, column, rows, width):
    """Rounds to 8 bits."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * width + column[None, :]
    tl.store(values + places, quotient.to(values.dtype.element_ty), inside)


@triton.jit
def _magnitude(wide):
    """The bits of an absolute value, which as integers are in its order."""
    return wide.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def _scale(most, UNIT: tl.constexpr, LEAST: tl.constexpr, POWER: tl.constexpr):
    """Of values whose largest magnitude has these bits."""
    scale = most.to(tl.float32, bitcast=True) * UNIT
    scale = tl.where(scale < LEAST, LEAST, scale)  # false of NaN
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(bits < INFINITE, (bits + MANTISSA) & INFINITE, bits).to(tl.float32, bitcast=True)
    return scale
