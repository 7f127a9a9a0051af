"""Triton source of epilogues after an op: run as Python on tensors it computes what torch's operations do."""

import math
from types import SimpleNamespace

import pytest
import torch

from overlap_gemm import epilogues
from overlap_gemm.backends.epilogues import Applying, result_dtype
from overlap_gemm.backends.triton_kernels import epilogue_rows
from overlap_gemm.epilogues.triton_source import HEADER, kernel_of
from tests.support.rows_after import KINDS, operands


class Pointer:
    """Elements of a contiguous tensor, at offsets."""

    def __init__(self, tensor, offset=0):
        self.flat, self.offset = tensor.view(-1), offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset):
        return Pointer(self.flat, self.offset + offset)


class Language:
    """The part of `triton.language` that the source uses, of one program."""

    constexpr, float32, int32, int64 = object(), torch.float32, torch.int32, torch.int64
    PropagateNan = SimpleNamespace(ALL=True)
    exp, abs = staticmethod(torch.exp), staticmethod(torch.abs)
    sqrt_rn, div_rn = staticmethod(torch.sqrt), staticmethod(torch.div)

    def __init__(self, row):
        self.row = row

    def program_id(self, axis):
        return torch.tensor(self.row)

    def arange(self, first, end):
        return torch.arange(first, end)

    def full(self, shape, value, dtype):
        return torch.full(shape, float(value), dtype=dtype)

    def where(self, condition, value, other):
        return torch.where(condition, torch.as_tensor(value), torch.as_tensor(other))

    def load(self, pointer, inside=None, other=None):
        if inside is None:
            return pointer.flat[pointer.offset]
        return torch.where(inside, pointer.flat[pointer.offset.where(inside, torch.tensor(0))], other)

    def store(self, pointer, value, inside=None):
        if inside is None:
            pointer.flat[pointer.offset] = value
        else:
            value = value.expand(inside.shape)
            pointer.flat[pointer.offset[inside]] = value[inside]

    def maximum(self, one, other, propagate_nan):
        assert propagate_nan
        return torch.maximum(one, other)

    def minimum(self, one, other, propagate_nan):
        assert propagate_nan
        return torch.minimum(one, other)

    def sum(self, values, axis):
        return values.sum()

    def max(self, values, axis):  # which ignores NaN
        return values.nan_to_num(-math.inf).amax() if values.is_floating_point() else values.amax()


LIBDEVICE = SimpleNamespace(rsqrt=torch.rsqrt, tanh=torch.tanh, erf=torch.erf)


def run(one, sums, inputs, columns):
    """Returns what the kernel writes, by a program for each row."""
    source = kernel_of(one)
    compile(source, "kernel", "exec")
    rows, width = sums.shape
    applying = Applying(one, tuple(tensor.dtype for tensor in inputs), sums.dtype)
    kinds = ["element", *(kind for _, kind in one.returned)]
    dtypes = [sums.dtype if kind == "element" else torch.float32 for kind in kinds]
    is_narrow = one.result is not None
    dtypes[0] = torch.float32 if is_narrow else sums.dtype  # torch saturates on CPUs by itself
    shapes = [(rows, width) if kind == "element" else (rows,) for kind in kinds]
    written = [torch.zeros(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    strides = [
        tensor.stride(0) for (_, kind), tensor in zip(one.inputs, inputs, strict=True) if kind == "element"
    ]
    tensors = [
        tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        for tensor in (sums, *inputs, *written)
    ]
    for row in range(rows):
        names = {"tl": Language(row), "libdevice": LIBDEVICE}
        exec(source.removeprefix(HEADER), names)
        pointers = [Pointer(tensor) for tensor in tensors]
        names["apply_epilogue"](*pointers, width, sums.stride(0), *strides, columns)
    if is_narrow:
        assert (written[0].isnan() | (written[0].abs() <= 448)).all()
        written[0] = written[0].to(result_dtype(one, sums.dtype))
    return written, applying.on_sums(sums, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("one", KINDS, ids=lambda one: one.name)
def test_the_source_computes_what_torch_does(one, dtype):
    for rows, width, columns, wide in ((4, 70, 128, 0), (5, 300, 128, 24), (1, 128, 128, 0)):
        made, expected = run(one, *operands(one, rows, width, dtype, wide), columns)
        for actual, wanted in zip(made, expected, strict=True):
            assert actual.dtype == wanted.dtype
            torch.testing.assert_close(actual.float(), wanted.float(), rtol=2e-6, atol=1e-6, equal_nan=True)


def test_kernels_are_for_single_sums_that_torch_has_no_few_operations_for():
    assert all(map(epilogue_rows.one_pass, KINDS))
    for one in (epilogues.swiglu, epilogues.scale_rows, epilogues.to_e4m3_blocks):
        assert not epilogue_rows.one_pass(one)


def test_without_a_gpu_torch_computes():
    one = epilogues.add_residual_squared
    sums, inputs = operands(one, 4, 70, torch.float32)
    applying = Applying(one, (torch.float32,), torch.float32)
    assert epilogue_rows.launch(one, sums, inputs, (torch.float32, torch.float32)) is None
    for actual, wanted in zip(
        applying.in_one_pass(sums, inputs), applying.on_sums(sums, inputs), strict=True
    ):
        assert torch.equal(actual, wanted) or actual.isnan().any()
