"""torch's vocabulary of scaled products: a call of `F.scaled_mm` becomes one of an op, word for word."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

import overlap_gemm
from overlap_gemm import gemm_reduce_scatter, quantize_rows, swizzle_scales
from overlap_gemm.integrations.torch_scaled_mm import scaled_mm
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS
from overlap_gemm.tuning.settings import settings
from tests.support.ops import SHARDED

E4M3 = torch.float8_e4m3fn


def given(m=16, n=32, k=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    (a, scale_a), (b, scale_b) = (quantize_rows(torch.randn(r, k, generator=generator)) for r in (m, n))
    return a, b, scale_a, scale_b


def alone():
    """Every way to say it, in torch's own words to both."""
    a, b, rows, columns = given()
    one = torch.full((1,), 0.5)
    bias = torch.randn(32, dtype=torch.bfloat16)
    for op in SHARDED:
        for scale_a, recipe_a in ((rows, ScalingType.RowWise), (one, ScalingType.TensorWise)):
            scale_b = columns.t() if recipe_a == ScalingType.RowWise else one
            words = (a, b.t(), scale_a, recipe_a, scale_b, recipe_a)
            listed = (a, b.t(), [scale_a], [recipe_a], [scale_b], [recipe_a])
            for how in (
                {},
                {"bias": bias},
                {"output_dtype": torch.float32},
                {"swizzle_a": SwizzleType.NO_SWIZZLE, "swizzle_b": SwizzleType.NO_SWIZZLE},
            ):
                expected = F.scaled_mm(*words, **how)
                for spelled in (words, listed):
                    found = scaled_mm(getattr(overlap_gemm, op), *spelled, **how)
                    assert found.dtype == expected.dtype
                    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-5)


def sums(rank, ranks):
    alone() if ranks == 1 else None
    parts = [given(seed=r) for r in range(ranks)]
    a, b, scale_a, scale_b = parts[rank]
    row = ScalingType.RowWise
    found = scaled_mm(gemm_reduce_scatter, a, b.t(), scale_a, row, scale_b.t(), row, backend="sequential")
    whole = sum(F.scaled_mm(x, w.t(), s, row, t.t(), row, output_dtype=torch.float32) for x, w, s, t in parts)
    mine = LAYOUTS["gemm_reduce_scatter"].part(whole, 0, rank, ranks)
    torch.testing.assert_close(found, mine.to(torch.bfloat16), rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("world", [1, 2])
def test_is_torchs_product_of_every_rank_summed(ranks, world):
    ranks(world).run(sums)


MX, SWIZZLED = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4


def mx_types(rank, ranks):
    """Against float64 of the dequantised operands: torch has no such product on CPUs."""
    m, n, k = 9, 40, 32 * 5 * ranks
    generator = torch.Generator().manual_seed(0)
    x, w = (
        quantize_rows(torch.randn(r, k, generator=generator), block=32, power_of_two=True) for r in (m, n)
    )
    wide_x, wide_w = (q.values.double() * q.scale.double().repeat_interleave(32, 1) for q in (x, w))
    exact = wide_x @ wide_w.t()
    for name in SHARDED:
        layout = LAYOUTS[name]
        part = lambda whole, dim: layout.part(whole, dim, rank, ranks)  # noqa: B023, E731
        values = [part(q.values.view(torch.uint8), d) for q, d in ((x, layout.x), (w, layout.weight))]
        a, b = (one.view(E4M3) for one in values)
        scale_a, scale_b = (swizzle_scales(part(q.scale, d)) for q, d in ((x, layout.x), (w, layout.weight)))
        for backend in ("sequential", "decomposed"):
            found = scaled_mm(
                getattr(overlap_gemm, name), a, b.t(), scale_a, MX, scale_b.view(-1, 16), MX, SWIZZLED,
                SWIZZLED, output_dtype=torch.float32, backend=backend,
                **OPS[name].arguments(m, n, k, least=True),
            )  # fmt: skip
            torch.testing.assert_close(found.double(), part(exact, layout.out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_mx_types_are_dequantised_where_no_tensor_core_takes_them(ranks, world):
    ranks(world).run(mx_types)


def test_fast_accumulation_is_asked_for_as_torch_asks():
    seen = []

    def gemm_all_reduce(*_, **__):
        seen.append(dict(settings().fields).get("fast_accum"))

    a, b, scale_a, scale_b = given()
    row = ScalingType.RowWise
    for fast in (True, False):
        scaled_mm(gemm_all_reduce, a, b.t(), scale_a, row, scale_b.t(), row, use_fast_accum=fast)
    assert seen == [True, None]


@pytest.mark.parametrize("depth", [528, 112])
def test_torchs_scales_of_blocks_are_the_ops(depth):
    """In torch's layout (ScaledBlas.cpp): columns of a, columns of b with rows up to a multiple of 4."""
    generator = torch.Generator().manual_seed(depth)
    a, b = (torch.randn(rows, depth, generator=generator).to(E4M3) for rows in (24, 136))
    along = -(-depth // 128)
    scale_a = torch.rand(along, 24, generator=generator).t() + 0.5
    scale_b = torch.rand(2, -(-along // 4) * 4, generator=generator).t() + 0.5
    blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    wide = scale_b.repeat_interleave(128, 0)[:depth].repeat_interleave(128, 1)[:, :136]
    exact = (a.double() * scale_a.repeat_interleave(128, 1)[:, :depth]) @ (b.double().t() * wide)
    for given in (scale_b, scale_b[:along]):
        found = scaled_mm(gemm_reduce_scatter, a, b.t(), scale_a, blocks[0], given, blocks[1])
        torch.testing.assert_close(found.double(), exact, rtol=2.0**-7, atol=2.0**-5)


ROW, TENSOR = ScalingType.RowWise, ScalingType.TensorWise
REFUSED = {
    "blocks": ({"scale_recipe_a": ScalingType.BlockWise1x128}, ValueError, "RowWise.*, got BlockWise1x128"),
    "blocks of rows": (
        {"scale_recipe_a": ScalingType.BlockWise1x128, "scale_recipe_b": ScalingType.BlockWise128x128},
        ValueError,
        r"scale_b must be \[1, 1\], or of 4 rows, got \[1, 32\]",
    ),
    "swizzled": ({"swizzle_b": SwizzleType.SWIZZLE_32_4_4}, ValueError, "swizzle_b .* SWIZZLE_32_4_4"),
    "two levels": ({"scale_recipe_b": [ROW, TENSOR]}, ValueError, "scales must have one level"),
    "unswizzled": (
        {"scale_recipe_a": MX, "scale_recipe_b": MX},
        ValueError,
        "swizzle_a must be SWIZZLE_32_4_4 with BlockWise1x32, got None",
    ),
    "one of MX types": ({"scale_recipe_a": MX}, ValueError, "or twice BlockWise1x32"),
    "rows": ({"scale_recipe_a": TENSOR}, ValueError, r"one element \(TensorWise\), got \[16, 1\]"),
    "columns": ({"scale_b": torch.ones(32, 1)}, ValueError, r"scale_b must be \[1, 32\] .* got \[32, 1\]"),
    "contraction": ({"contraction_dim": (0, 1)}, ValueError, "contraction_dim must be empty"),
    "result": ({"output_dtype": E4M3}, TypeError, "output_dtype must be one of torch.bfloat16"),
    "no result type": ({"output_dtype": None}, TypeError, "got None"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_ops_do_not_take_is_an_error_with_the_rule(what):
    change, error, words = REFUSED[what]
    a, b, scale_a, scale_b = given()
    named = {"scale_a": scale_a, "scale_recipe_a": ROW, "scale_b": scale_b.t(), "scale_recipe_b": ROW}
    with pytest.raises(error, match=words):
        scaled_mm(gemm_reduce_scatter, a, b.t(), **{**named, **change})


def test_no_other_function_is_an_op():
    with pytest.raises(ValueError, match="op must be one of"):
        scaled_mm(torch.mm, *given()[:2], 1, ROW, 1, ROW)
