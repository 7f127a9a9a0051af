"""Triton source of epilogues after an op: run as Python on tensors it computes what torch's operations do."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import overlap_gemm
from overlap_gemm import epilogue, epilogues
from overlap_gemm.backends.epilogues import Applying, new_results, result_dtype
from overlap_gemm.backends.triton_kernels import epilogue_rows
from overlap_gemm.epilogues import Applied
from overlap_gemm.epilogues.triton_source import HEADER, kernel_of
from overlap_gemm.nn import ParallelMLP
from tests.support.rows_after import KINDS, ULP, operands


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
        values = values.nan_to_num(-math.inf) if values.is_floating_point() else values
        return values.amax(axis)

    def reshape(self, values, shape):
        return values.reshape(shape)


LIBDEVICE = SimpleNamespace(rsqrt=torch.rsqrt, tanh=torch.tanh, erf=torch.erf, fast_dividef=torch.div)


def storage_of(tensor):
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def run(one, sums, inputs, columns):
    """Returns what the kernel writes, by a program for each row, and what torch computes."""
    parts = sums if isinstance(sums, tuple) else (sums,)
    bands = one.pairs and len(parts) == 1
    source = kernel_of(one, bands).replace(".to(tl.int32, bitcast=True)", ".view(torch.int32)")
    source = source.replace(".to(tl.float32, bitcast=True)", ".view(torch.float32)").removeprefix(HEADER)
    rows, width = len(parts[0]), parts[0].shape[1] // (2 if bands else 1)
    applying = Applying(one, tuple(tensor.dtype for tensor in inputs), parts[0].dtype)
    written, is_narrow = new_results(one, parts[0].dtype, parts[0], rows, width), one.result is not None
    if is_narrow:  # torch saturates on CPUs by itself
        written[0] = written[0].float()
    kinds = [kind for _, kind in one.inputs]
    strides = [part.stride(0) for part in parts]
    strides += [one.stride(0) for one, kind in zip(inputs, kinds, strict=True) if kind == "element"]
    of_scales = [written[1].stride(1)] if one.block else []
    tensors = [storage_of(tensor) for tensor in (*parts, *inputs, *written)]
    for row in range(rows):
        names = {"tl": Language(row), "libdevice": LIBDEVICE, "torch": torch}
        exec(source, names)
        names["apply_epilogue"](*map(Pointer, tensors), *of_scales, width, *strides, columns)
    if is_narrow:
        assert (written[0].isnan() | (written[0].abs() <= 448)).all()
        written[0] = written[0].to(result_dtype(one, parts[0].dtype))
    return written, applying.on_sums(sums, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("one", KINDS, ids=lambda one: one.name)
def test_the_source_computes_what_torch_does(one, dtype):
    step = 128 if one.block else 1
    for rows, width, columns, wide in (
        (4, 70, 128, 0),
        (5, 300, 128, 24),
        (1, 128, 128, 0),
        (3, 500, 256, 0),
    ):
        width = -(-width // step) * step
        for bands in (False, True) if one.pairs and width % 32 == 0 else (False,):
            made, expected = run(one, *operands(one, rows, width, dtype, wide, bands), columns)
            for actual, wanted in zip(made, expected, strict=True):
                assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
                tolerance = ULP.get(actual.dtype, 2e-6)
                torch.testing.assert_close(
                    actual.float(), wanted.float(), rtol=tolerance, atol=1e-6, equal_nan=True
                )


def test_kernels_are_for_what_torch_has_no_single_operation_for():
    assert all(map(epilogue_rows.has_kernel, KINDS))
    for one in (epilogues.add_residual, epilogues.scale_rows, epilogues.apply_silu):
        assert not epilogue_rows.has_kernel(one)


def test_without_a_gpu_torch_computes():
    one = epilogues.add_residual_squared
    sums, inputs = operands(one, 4, 70, torch.float32)
    assert epilogue_rows.readable(one, sums, inputs) is None
    applying = Applying(one, (torch.float32,), torch.float32)
    for actual, wanted in zip(
        applying.in_one_pass(sums, inputs), applying.on_sums(sums, inputs), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@epilogue(inputs={"r": "rows", "s": "scalar"}, result="e4m3", block=128)
def of_rows_in_blocks(x: Any, r: Any, s: Any) -> Any:
    return epilogues.exp(r) * s + 1.0


@epilogue(inputs={"r": "rows"}, result="e4m3")
def of_rows_in_8_bits(x: Any, r: Any) -> Any:
    return r


@epilogue(inputs={"r": "rows", "c": "columns"}, result="e4m3")
def of_columns_in_8_bits(x: Any, r: Any, c: Any) -> Any:
    return r + epilogues.relu(c)


@epilogue(inputs={"r": "rows"})
def of_rows(x: Any, r: Any) -> Any:
    return r


def test_values_of_rows_are_rounded_to_8_bits_by_torch():
    """Checks that there is no kernel: Triton 3.6 would store wrong bytes."""
    for one in (of_rows_in_blocks, of_rows_in_8_bits):
        assert not epilogue_rows.has_kernel(one)
    for one in (of_columns_in_8_bits, of_rows):
        assert epilogue_rows.has_kernel(one)


def test_a_loop_step_of_complete_rows_is_a_row_where_that_fits():
    assert epilogue_rows.ELEMENTS.of_width(14336) == (4096, 8)
    assert epilogue_rows.ELEMENTS.of_width(1000) == (1024, 2)
    assert epilogue_rows.COMPLETE_ROWS.of_width(8192) == (8192, 16)
    assert epilogue_rows.COMPLETE_ROWS.of_width(4096) == (4096, 16)
    assert epilogue_rows.COMPLETE_ROWS.of_width(16384) == (8192, 16)
    for step in (epilogue_rows.ELEMENTS, epilogue_rows.COMPLETE_ROWS):
        assert step.of_width(3) == (128, 1)


@pytest.fixture
def kernel(monkeypatch):
    """Yields a list of the shapes of sums that a kernel was requested for, whose results are 7."""
    requested = []

    def by_kernel(self, sums, inputs):
        parts = sums if isinstance(sums, tuple) else (sums,)
        requested.append([tuple(part.shape) for part in parts])
        return [torch.full_like(parts[0], 7.0) for _ in range(1 + len(self.epilogue.returned))]

    monkeypatch.setattr(Applying, "by_kernel", by_kernel)
    return requested


def call_normed(x, weight, residual):
    def after(out):
        return F.rms_norm(out + residual, weight.shape[:1]), out + residual

    inputs = residual, torch.ones_like(weight[:, 0]), 1e-6
    applied = Applied(epilogues.add_residual_rms_norm, inputs, after)
    return overlap_gemm.gemm_all_reduce(x, weight, epilogue=applied, backend="torch")


def test_a_kernel_takes_the_place_of_what_replaces_an_epilogue_unless_others_watch(kernel):
    x, weight, residual = torch.randn(5, 2, 16), torch.randn(32, 16), torch.randn(5, 2, 32)
    normed, stream = call_normed(x, weight, residual)
    assert kernel == [[(10, 32)]] and normed.shape == stream.shape == residual.shape
    assert (normed == 7).all() and (stream == 7).all()
    expected = x @ weight.t() + residual

    with_gradient = call_normed(x.requires_grad_(), weight, residual)
    torch.testing.assert_close(with_gradient[1], expected)
    with torch.no_grad():
        call_normed(x, weight, residual)
        compiled = torch.compile(call_normed, backend="aot_eager", fullgraph=True)(x, weight, residual)
        torch.testing.assert_close(compiled[1], expected)
    assert kernel == [[(10, 32)]] * 2


def test_a_kernel_gates_local_products_in_inference(kernel):
    x = torch.randn(5, 2, 8)
    mlp = ParallelMLP(8, 16)
    mlp(x)
    with torch.no_grad():
        for other in (ParallelMLP(8, 16, fuse=False), ParallelMLP(8, 16, invariant="batch")):
            other(x)
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)(x)
        assert not kernel
        expected = (F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)) @ mlp.down_proj.weight.t()
        torch.testing.assert_close(compiled, expected)
        torch.testing.assert_close(mlp(x), 7 * mlp.down_proj.weight.sum(1).expand(5, 2, 8))
    assert kernel == [[(10, 16), (10, 16)]]


def test_without_a_kernel_what_replaces_an_epilogue_is_applied(monkeypatch):
    monkeypatch.setattr(Applying, "by_kernel", lambda *args: None)
    x, weight, residual = torch.randn(5, 2, 16), torch.randn(32, 16), torch.randn(5, 2, 32)
    torch.testing.assert_close(call_normed(x, weight, residual)[1], x @ weight.t() + residual)
