"""Triton kernels that quantize rows to 8 bits, with fp32 scales per row or per block of a row.

- `of_tiles` keeps full rows, or full blocks, in registers between the scale's computation and its use. It
  reads each element once.
- `of_long_rows` is for one scale per row, if rows are too long for that or not contiguous. It reads them
  twice; the second read of contiguous rows hits in L2.

A scale is the largest magnitude times UNIT, at least LEAST; then it is rounded up to a power of two if POWER.
Values are multiplied by its reciprocal and rounded to the nearest even. Results equal those of torch's
expressions in `api.quantization` bit for bit, except for the bits of a NaN: products and reciprocals are
rounded as IEEE 754 defines. Magnitudes are compared as integers, so a NaN is the largest: the scale of its
row or block is a NaN, and so are all values there.

Torch's builds for CPUs have no Triton, so `backends.triton_kernels.row_quantization` imports this module only
for a launch on a GPU.
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
    """Quantizes one tile of ROWS rows by BLOCKS blocks of BLOCK elements; one program.

    Args:
        x: `[rows, width]`, bf16, fp16 or fp32, with strides x_row and x_column.
        values: `[rows, width]`, 8-bit floats, contiguous; output.
        scales: fp32 `[rows, ceil(width / BLOCK)]` with strides 1 and scales_block; output.
        rows: Number of rows of x.
        width: Number of columns of x; at most BLOCK if a scale is for a full row.
        x_row: Elements from row to row of x.
        x_column: Elements from column to column of x.
        scales_block: Elements from column to column of scales.
        UNIT: One over the largest 8-bit value.
        LEAST: Least scale.
        POWER: Whether scales are rounded up to powers of two.
        ROWS: Rows of a tile, a power of two.
        BLOCKS: Blocks of a row in a tile, a power of two.
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
    """Quantizes ROWS rows with one scale each, COLUMNS elements at a time; one program.

    Args:
        x: `[rows, width]`, bf16, fp16 or fp32, with strides x_row and x_column.
        values: `[rows, width]`, 8-bit floats, contiguous; output.
        scales: fp32 `[rows]`, contiguous; output.
        rows: Number of rows of x.
        width: Number of columns of x.
        x_row: Elements from row to row of x.
        x_column: Elements from column to column of x.
        UNIT: One over the largest 8-bit value.
        LEAST: Least scale.
        POWER: Whether scales are rounded up to powers of two.
        ROWS: Rows of a program, a power of two.
        COLUMNS: Columns read at a time, a power of two.
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
    """Returns the elements at `[row, column]` as fp32; those outside x are 0."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * x_row + column[None, :].to(tl.int64) * x_column
    return tl.load(x + places, inside, 0.0).to(tl.float32)


@triton.jit
def _store(values, quotient, row, column, rows, width):
    """Rounds quotients to 8 bits and stores those inside values."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * width + column[None, :]
    tl.store(values + places, quotient.to(values.dtype.element_ty), inside)


@triton.jit
def _magnitude(wide):
    """Returns the bits of absolute values as int32, which have the order of the values."""
    return wide.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def _scale(most, UNIT: tl.constexpr, LEAST: tl.constexpr, POWER: tl.constexpr):
    """Returns the fp32 scale for a largest magnitude, which is passed as bits."""
    scale = most.to(tl.float32, bitcast=True) * UNIT
    scale = tl.where(scale < LEAST, LEAST, scale)  # false of NaN
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(bits < INFINITE, (bits + MANTISSA) & INFINITE, bits).to(tl.float32, bitcast=True)
    return scale
