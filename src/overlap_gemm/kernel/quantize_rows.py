"""Quantization of rows to 8 bits, with scales: two Triton kernels.

`of_tiles` holds full rows, or full blocks of rows, in registers from the computation of a scale to its use:
each element is read from memory once. `of_long_rows` is for rows that are too long, or not contiguous. It
reads them twice, contiguous ones the second time from the L2 cache, which is much larger than the rows in
flight.

Results are those of torch's expressions (`api.quantization`) bit for bit, except for the bits of a NaN:
products and the reciprocal are rounded as IEEE 754 defines, the conversion to the nearest even. Magnitudes
are compared by their bits, as integers, of which a NaN has the largest.

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
    """Quantizes a tile of ROWS rows and BLOCKS blocks of BLOCK elements, each with a scale; one program.

    Args:
        x: `[rows, width]`, of strides x_row and x_column.
        values: `[rows, width]`, 8 bits, contiguous.
        scales: Float32, `[rows, ceil(width / BLOCK)]`, of strides 1 and scales_block.
        rows: Rows of x.
        width: Columns of x; if blocks are full rows, at most BLOCK.
        x_row: Stride of x's rows in elements.
        x_column: Stride of x's columns in elements.
        scales_block: Stride of the scales' columns in elements.
        UNIT: One over the largest 8-bit value.
        LEAST: Smallest scale.
        POWER: Whether scales are powers of two.
        ROWS: Rows of a tile, a power of two.
        BLOCKS: Blocks of a tile, a power of two.
        BLOCK: Elements of a block, a power of two.
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
    """Quantizes ROWS rows, each with a scale, COLUMNS elements at a time; one program.

    Args:
        x: `[rows, width]`, of strides x_row and x_column.
        values: `[rows, width]`, 8 bits, contiguous.
        scales: Float32, `[rows]`.
        rows: Rows of x.
        width: Columns of x.
        x_row: Stride of x's rows in elements.
        x_column: Stride of x's columns in elements.
        UNIT: One over the largest 8-bit value.
        LEAST: Smallest scale.
        POWER: Whether scales are powers of two.
        ROWS: Rows of a program, a power of two.
        COLUMNS: Columns at a time, a power of two.
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
    """Returns elements `[row, column]` in float32, zeros outside."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * x_row + column[None, :].to(tl.int64) * x_column
    return tl.load(x + places, inside, 0.0).to(tl.float32)


@triton.jit
def _store(values, quotient, row, column, rows, width):
    """Rounds quotients to 8 bits and stores them."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * width + column[None, :]
    tl.store(values + places, quotient.to(values.dtype.element_ty), inside)


@triton.jit
def _magnitude(wide):
    """Returns the bits of absolute values; as integers they have the same order."""
    return wide.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def _scale(most, UNIT: tl.constexpr, LEAST: tl.constexpr, POWER: tl.constexpr):
    """Returns the scale of values whose largest magnitude has these bits."""
    scale = most.to(tl.float32, bitcast=True) * UNIT
    scale = tl.where(scale < LEAST, LEAST, scale)  # false of NaN
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(bits < INFINITE, (bits + MANTISSA) & INFINITE, bits).to(tl.float32, bitcast=True)
    return scale
