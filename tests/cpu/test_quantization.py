"""Rows rounded to 8 bits: how exact, and what becomes of rows that have no scale."""

import math
import sys
from functools import partial

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode

from overlap_gemm import quantize_rows, swizzle_scales
from overlap_gemm.api import quantization as api
from overlap_gemm.api.quantization import LEAST_SCALE
from overlap_gemm.backends.scales.scale_layouts import LAYOUTS
from overlap_gemm.backends.triton_kernels import launchable
from overlap_gemm.config.scale_blocks import PROMOTED

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BITS = {E4M3: 4, E5M2: 3}
SUBNORMAL = {E4M3: 2.0**-9, E5M2: 2.0**-16}


def dequantized(values, scale, block=None):
    values = values.double()
    if block is not None:
        scale = scale.repeat_interleave(block, -1)[..., : values.shape[-1]]
    return values * scale.double()


def rows(*shape, dtype=torch.float32):
    given = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=given) * 2.0 ** torch.randint(
        -20, 20, (*shape[:-1], 1), generator=given
    )
    return x.to(dtype)


@pytest.mark.parametrize("block", [None, 128, 32, 40])
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 200), (7, 16), (1,), (3, 0), (0, 64)])
def test_every_element_comes_back_to_half_a_unit_of_its_last_place(shape, dtype, power, block):
    x = rows(*shape)
    values, scale = quantize_rows(x, dtype, block=block, power_of_two=power)
    blocks = 1 if block is None else max(-(-shape[-1] // block), 1)
    assert values.shape == x.shape and values.dtype == dtype and values.is_contiguous()
    assert scale.shape == (*x.shape[:-1], blocks) and scale.dtype == torch.float32
    back = dequantized(values, scale, block)
    each = scale if block is None else scale.repeat_interleave(block, -1)[..., : shape[-1]]
    slack = 1 + 2.0**-20  # of the scale and the quotient, which are rounded to float32
    bound = torch.maximum(x.double().abs() * 2.0 ** -BITS[dtype], each.double() * SUBNORMAL[dtype] / 2)
    assert bool(((back - x.double()).abs() <= bound * slack).all())
    if shape[-1] and not power and x.numel():  # the whole range is used
        most = (
            values.double()
            .abs()
            .unflatten(-1, (-1, shape[-1] if block is None or shape[-1] % block else block))
        )
        assert bool((most.amax(-1) == torch.finfo(dtype).max).any())


@pytest.mark.parametrize("shape", [(8, 256), (6, 200), (3, 5, 300), (2, 0, 256)])
def test_scales_of_blocks_lie_along_the_rows(shape):
    x = rows(*shape)
    _, scale = quantize_rows(x, block=128)
    count, most = math.prod(shape[:-1]), x.double().abs()
    if count:
        matrix = scale.view(count, -1)  # which is no copy
        assert matrix.stride() == (1, -(-count // 4) * 4)
        exact = [part.amax(-1) / 448 for part in most.view(count, -1).split(128, -1)]
        torch.testing.assert_close(matrix.double(), torch.stack(exact, 1), rtol=2e-7, atol=0)
    assert scale.shape == (*shape[:-1], -(-shape[-1] // 128))
    _, whole = quantize_rows(x)
    assert whole.is_contiguous()


def test_torchs_product_takes_them_as_they_are():
    (x, scale_x), (weight, _) = (quantize_rows(rows(count, 512), block=128) for count in (8, 256))
    layout, scale_w = LAYOUTS[PROMOTED[0]], torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    of_x, of_w = layout.for_torch(x, weight, scale_x, scale_w)
    assert of_x.data_ptr() == scale_x.data_ptr() and of_x.stride() == (1, 8)
    assert of_w.stride() == (1, 4) and torch.equal(of_w, scale_w.t())
    _, six = quantize_rows(rows(6, 512), block=128)
    padded, _ = layout.for_torch(x[:6], weight, six, scale_w)
    assert padded.stride() == (1, 8) and torch.equal(padded[:6], six)


@pytest.mark.parametrize("shape", [(128, 128), (128, 256), (37, 160)])
def test_swizzled_they_are_those_of_contiguous_scales(shape):
    _, scale = quantize_rows(rows(*shape), block=32, power_of_two=True)
    assert scale.stride(0) == 1
    assert torch.equal(swizzle_scales(scale).float(), swizzle_scales(scale.contiguous()).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_16_bits_are_quantized_as_what_they_stand_for(dtype):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one, other in zip(quantize_rows(x, block=32), quantize_rows(x.float(), block=32), strict=True):
        assert torch.equal(one.float(), other.float())


def test_scales_that_are_powers_of_two_are_the_least_that_suffice():
    x = torch.tensor([[448.0], [449.0], [3.5], [447.0], [0.0], [2.0**-70]])
    values, scale = quantize_rows(x, power_of_two=True)
    assert scale.flatten().tolist() == [1.0, 2.0, 2.0**-7, 1.0, LEAST_SCALE, LEAST_SCALE]
    assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)
    assert values.float().flatten().tolist() == [448.0, 224.0, 448.0, 448.0, 0.0, 0.0]


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("dtype", BITS)
def test_rows_without_a_scale(dtype, power):
    x = torch.tensor([[0.0, 0.0], [1.0, math.nan], [1.0, math.inf], [-math.inf, 0.0], [1.0, -2.0]])
    values, scale = quantize_rows(x, dtype, power_of_two=power)
    back = values.float() * scale
    assert values[0].float().tolist() == [0.0, 0.0] and scale[0].item() == LEAST_SCALE
    assert float(scale[0] * scale[0]) >= torch.finfo(torch.float32).tiny
    assert bool(back[1:4].isnan().all()) and back[4].tolist() == [1.0, -2.0]


def test_largest_values_of_the_widest_type_are_kept():
    x = torch.tensor([[torch.finfo(torch.float32).max, 1.0]])
    for dtype in BITS:
        values, scale = quantize_rows(x, dtype)
        assert values[0, 0].float() == torch.finfo(dtype).max and bool(scale.isfinite().all())


def test_compiled_it_is_the_same_and_breaks_no_graph():
    x = rows(33, 200)
    for how in ({}, {"block": 128}, {"power_of_two": True, "dtype": E5M2}):
        compiled = torch.compile(quantize_rows, backend="aot_eager", fullgraph=True)
        for one, other in zip(compiled(x, **how), quantize_rows(x, **how), strict=True):
            assert torch.equal(one.float(), other.float())
    on_meta = quantize_rows(x.to("meta"), block=128)
    assert on_meta.values.shape == (33, 200) and on_meta.scale.shape == (33, 2)


def test_what_torch_records_is_torchs_operations(monkeypatch):
    """No kernel of ours is asked for: what compilers, transforms and fake tensors see is all that is done."""

    def never(*_):
        raise AssertionError("a kernel was asked for")

    x, expected = rows(4, 33, 200), quantize_rows(rows(4, 33, 200), block=128)
    blocks = partial(quantize_rows, block=128)
    monkeypatch.setattr(api, "has_kernel", never)
    for call in (torch.compile(blocks, backend="aot_eager", fullgraph=True), torch.func.vmap(blocks)):
        for one, other in zip(call(x), expected, strict=True):
            assert torch.equal(one.float(), other.float())
    with FakeTensorMode() as mode:
        assert blocks(mode.from_tensor(x)).scale.shape == (4, 33, 2)
    with pytest.raises(AssertionError, match="asked for"):
        blocks(x)


def test_a_triton_that_does_not_work_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launchable, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(RuntimeWarning, match="Triton does not work here"):
        assert not launchable.is_launchable.__wrapped__(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert not launchable.is_launchable.__wrapped__(torch.device("cuda", 0))  # and nothing is said


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(("width", "block"), [(259, 128), (145, 32)])
def test_inductor_writes_a_last_block_that_is_shorter(width, block):
    x = rows(10, width)
    torch._dynamo.reset()
    for call in (torch.compile(quantize_rows), quantize_rows):
        values, scale = call(x, block=block)
        scale = scale.double().repeat_interleave(block, 1)[:, :width]
        error, exact = (values.double() * scale - x.double()).abs(), x.double().abs()
        assert bool((error <= torch.maximum(2.0**-4 * exact, 2.0**-10 * scale)).all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_inductor_makes_one_kernel_of_it_and_of_a_norm_in_front():
    def after_norm(x):
        return quantize_rows(torch.nn.functional.rms_norm(x, x.shape[-1:]))

    for function in (quantize_rows, partial(quantize_rows, block=128, power_of_two=True), after_norm):
        torch._dynamo.reset()
        _, (code,) = run_and_get_code(torch.compile(function), rows(64, 256))
        assert code.count("async_compile.cpp_pybinding") == 1


def test_bad_input_is_an_error_with_the_rule():
    x = torch.ones(2, 16)
    for given, how, error, words in (
        (x, {"dtype": torch.float16}, TypeError, "dtype must be one of torch.float8_e4m3fn"),
        (x.double(), {}, TypeError, "x must be float32, bfloat16 or float16, got torch.float64"),
        (x.to(E4M3), {}, TypeError, "got torch.float8_e4m3fn"),
        (x, {"block": 0}, ValueError, "block positive, got .* block=0"),
        (torch.ones(()), {}, ValueError, r"x must be \[..., K\]"),
    ):
        with pytest.raises(error, match=words):
            quantize_rows(given, **how)


def test_no_gradient_passes():
    x = torch.ones(2, 16, requires_grad=True)
    assert not any(part.requires_grad for part in quantize_rows(x))
