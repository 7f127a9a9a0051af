"""8-bit operands with scales on every portable backend, against float64 of the dequantised operands."""

from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends.scales import scaling
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.group import group_name, resolve
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS
from overlap_gemm.testing.workload import Workload
from overlap_gemm_tools.baselines import baselines
from tests.support.chosen import in_turn
from tests.support.ops import SHARDED

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BACKENDS = ("sequential", "decomposed", "torch")
SHAPES = {
    "even": (24, 24, 192),
    "uneven": (23, 13, 192),
    "no rows on some": (2, 5, 192),
    "any K": (7, 13, 101),
}


def whole(op, m, n, k, ranks, dtype):
    """All ranks' operands; of the summing ops each rank has scales of its own."""
    given = torch.Generator().manual_seed(m * n + k)
    x, weight = (torch.randn(rows, k, generator=given).to(dtype) for rows in (m, n))
    sets = ranks if OPS[op].sums else 1
    scale_x, scale_w = (2 ** (6 * torch.rand(sets, r, 1, generator=given) - 3) for r in (m, n))
    return x, weight, scale_x, scale_w, torch.randn(n, generator=given)


def part(op, which, matrix, rank, ranks):
    dim = getattr(LAYOUTS[op], which)
    return LAYOUTS[op].part(matrix, dim, rank, ranks)


def call(rank, ranks, op, shape, backend, *, dtype=E4M3, out_dtype=torch.bfloat16, tensorwise=False, **more):
    """(the rank's result, what it should be in float64, sum |x w| there)."""
    x, weight, scale_x, scale_w, bias = whole(op, *shape, ranks, dtype)
    if tensorwise:
        scale_x, scale_w = scale_x[:, :1], scale_w[:, :1]
    own = rank if OPS[op].sums else 0
    own_x, own_w = scale_x[own], scale_w[own]
    if not OPS[op].sums and not tensorwise:  # scales go with their rows
        own_x, own_w = part(op, "x", own_x, rank, ranks), part(op, "weight", own_w, rank, ranks)
    bias = bias.to(out_dtype)
    more = OPS[op].arguments(*shape, least=True) | more
    out = getattr(overlap_gemm, op)(
        part(op, "x", x, rank, ranks), part(op, "weight", weight, rank, ranks), backend=backend,
        bias=part(op, "bias", bias, rank, ranks), scale_x=own_x, scale_w=own_w, out_dtype=out_dtype, **more,
    )  # fmt: skip
    exact = magnitude = torch.zeros((), dtype=torch.float64)
    for peer in range(ranks if OPS[op].sums else 1):
        a, b = x.double() * scale_x[peer], weight.double() * scale_w[peer]
        if OPS[op].sums:
            a, b = part(op, "x", a, peer, ranks), part(op, "weight", b, peer, ranks)
        exact, magnitude = exact + a @ b.t(), magnitude + a.abs() @ b.abs().t()
    exact = exact + bias.double()
    return out, part(op, "out", exact, rank, ranks), part(op, "out", magnitude, rank, ranks)


def check(rank, ranks, op, shape, backend, **how):
    out, exact, magnitude = call(rank, ranks, op, shape, backend, **how)
    assert out.dtype == how.get("out_dtype", torch.bfloat16) and out.shape == exact.shape
    # Portable sums are in float32; torch's collective rounds every partial and every sum of two.
    roundings = 1 if backend != "torch" else 2 * ranks + 1
    unit = torch.finfo(out.dtype).eps / 2
    bound = roundings * unit * (exact.abs() + magnitude * (backend == "torch")) + 2.0**-20 * magnitude
    assert bool(((out.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    ("shape", "op", "backend", "world"), in_turn(product(SHAPES, SHARDED, BACKENDS), [2, 3, 4, 1])
)
def test_is_the_product_of_the_dequantised_operands(ranks, op, shape, backend, world):
    ranks(world).run(check, op, SHAPES[shape], backend)


def every_type(rank, ranks, op):
    for backend in BACKENDS:
        for dtype in (E4M3, E5M2):
            for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
                check(rank, ranks, op, (23, 13, 64), backend, dtype=dtype, out_dtype=out_dtype)
        check(rank, ranks, op, (23, 13, 64), backend, tensorwise=True)


@pytest.mark.parametrize("op", SHARDED)
def test_every_type_and_one_scale_for_all(ranks, op):
    ranks(2).run(every_type, op)


def of_blocks(rank, ranks, op, size):
    """Scales of blocks: rows, columns and K end inside of one; of a batch, too."""
    m, n, k = 24, 128 * ranks + 8 if OPS[op].weight != "n" else 128 * ranks, 2 * 272 - 3
    x, weight, *_, bias = whole(op, m, n, k, ranks, E4M3)
    x, weight = part(op, "x", x, rank, ranks), part(op, "weight", weight, rank, ranks)
    depth = -(-x.shape[1] // size)
    torch.manual_seed(rank)
    scale_x, scale_w = torch.rand(len(x), depth) + 0.5, torch.rand(-(-len(weight) // size), depth) + 0.5
    if size == 32:
        scale_x, scale_w = scale_x.to(torch.float8_e8m0fnu), scale_w.to(torch.float8_e8m0fnu)
    a = x.float() * scale_x.float().repeat_interleave(size, 1)[:, : x.shape[1]]
    wide = scale_w.float().repeat_interleave(size, 0).repeat_interleave(size, 1)
    b = weight.float() * wide[: len(weight), : x.shape[1]]
    call, scales = (
        getattr(overlap_gemm, op),
        {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": torch.float32, "block": size},
    )
    wanted = call(a, b, backend="sequential")
    for backend in ("sequential", "decomposed", "auto"):
        assert torch.equal(
            call(x, weight, backend=backend, **scales),
            call(a, b, backend=backend if backend != "auto" else "sequential"),
        )
    deep = scales | {"scale_x": scale_x.view(-1, 2, depth)}
    found = call(x.view(-1, 2, x.shape[1]), weight, backend="sequential", **deep)
    assert torch.allclose(found.reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [128, 32])
@pytest.mark.parametrize("op", SHARDED)
def test_scales_of_blocks(ranks, op, size):
    """Those of 32 are ue8m0."""
    ranks(2).run(of_blocks, op, size)


def uneven_cut(rank, ranks, op, kind, rows):
    """K of this rank has one block or several, or nothing; each rank has the whole sum, or its rows of it."""
    depths = (300, 100, 0)[:ranks]
    size, scaled = (128, partial(overlap_gemm.quantize_rows, block=128))
    if kind == "mx":
        depths, size = (64, 32, 0)[:ranks], 32
        scaled = partial(overlap_gemm.quantize_rows, block=32, power_of_two=True)
    parts = []
    for peer, depth in enumerate(depths):
        generator = torch.Generator().manual_seed(peer)
        x, weight = (torch.randn(n, depth, generator=generator) for n in (rows, 264))
        (x, scale_x), (weight, scale_w) = scaled(x), scaled(weight)
        if kind != "mx":
            scale_w = torch.rand(-(-264 // size), max(-(-depth // size), 1), generator=generator) + 0.5
        parts.append((x, weight, scale_x, scale_w))
    exact = torch.zeros(rows, 264, dtype=torch.float64)
    for x, weight, scale_x, scale_w in parts:
        high = 1 if kind == "mx" else size
        wide_x, wide_w = (
            scale.double().repeat_interleave(up, 0).repeat_interleave(size, 1)
            for scale, up in ((scale_x, 1), (scale_w, high))
        )
        depth = x.shape[1]
        exact += (x.double() * wide_x[:, :depth]) @ (weight.double() * wide_w[:264, :depth]).t()
    x, weight, scale_x, scale_w = parts[rank]
    if kind == "mx":
        scale_x, scale_w = (
            overlap_gemm.swizzle_scales(scale[:, : x.shape[1] // 32]) for scale in (scale_x, scale_w)
        )
    for backend in ("sequential", "decomposed", "auto"):
        out = getattr(overlap_gemm, op)(
            x, weight, scale_x=scale_x, scale_w=scale_w, block=kind, out_dtype=torch.float32, backend=backend
        )
        wanted = part(op, "out", exact, rank, ranks)
        assert torch.allclose(out.double(), wanted, rtol=1e-5, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [128, "mx"])
@pytest.mark.parametrize("op", [name for name, spec in SHARDED.items() if spec.sums])
def test_a_cut_of_k_into_several_blocks_and_one_and_none(ranks, op, kind, world):
    ranks(world).run(uneven_cut, op, kind, 9)


def other_kinds(rank, ranks):
    x, weight = torch.ones(4, 128).to(E4M3), torch.ones(128, 128).to(E4M3)
    scales = torch.ones(4, 1), torch.ones(1, 1) if rank == 0 else torch.ones(128, 1)
    with pytest.raises(DisagreementError, match="disagree on block: rank . has 128"):
        overlap_gemm.gemm_reduce_scatter(
            x, weight, scale_x=scales[0], scale_w=scales[1], block=128 if rank == 0 else None
        )


def test_ranks_that_differ_in_what_shares_a_scale_learn_it_by_name(ranks):
    ranks(2).run(other_kinds)


def as_on_hopper(
    a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype, use_fast_accum=False
):  # what torch 2.13 asks for there (ScaledBlas.cpp), in float32
    (m, k), n, blocks = a.shape, b.shape[1], -(-a.shape[1] // 128)
    four = -(-blocks // 4) * 4
    assert (recipe_a.name, recipe_b.name) == ("BlockWise1x128", "BlockWise128x128")
    assert a.is_contiguous() and b.t().is_contiguous() and m % 4 == k % 16 == 0 and not use_fast_accum
    assert scale_a.shape == (m, blocks) and scale_a.stride() == (1, m)
    assert scale_b.shape == (four, -(-n // 128)) and scale_b.stride() == (1, four)
    wide = scale_b.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    product = (a.float() * scale_a.repeat_interleave(128, 1)[:, :k]) @ (b.float() * wide)
    return product.to(output_dtype)


def blocks_by_torch(rank, ranks, op, m):
    """Backend `torch` where torch has the product, in whose place there is one that is strict."""
    k = 269 * ranks if OPS[op].sums else 269
    x, weight, *_, bias = whole(op, m, 128 * ranks, k, ranks, E4M3)
    x, weight, bias = (
        part(op, of, matrix, rank, ranks) for of, matrix in (("x", x), ("weight", weight), ("bias", bias))
    )
    torch.manual_seed(rank)
    scales = {"scale_x": torch.rand(len(x), 3) + 0.5, "scale_w": torch.rand(-(-len(weight) // 128), 3) + 0.5}
    scales |= {"out_dtype": torch.float32, "block": 128}
    call = partial(getattr(overlap_gemm, op), x, weight, bias=bias, **scales)
    with pytest.raises(ValueError, match=r"F.scaled_mm says on cpu|no F.scaled_mm"):
        call(backend="torch")
    scaling.why_no_product.cache_clear()
    with mock.patch.object(torch.nn.functional, "scaled_mm", as_on_hopper):
        found = call(backend="torch")
    scaling.why_no_product.cache_clear()
    assert torch.allclose(found, call(backend="sequential"), rtol=1e-5, atol=1e-3)
    short = slice(0, 100)  # of one block of K torch has the product of rows
    scales |= {"scale_x": scales["scale_x"][:, :1], "scale_w": scales["scale_w"][:, :1]}
    call = partial(getattr(overlap_gemm, op), x[:, short], weight[:, short], bias=bias, **scales)
    scaling.why_no_product.cache_clear()
    with mock.patch.object(torch.nn.functional, "scaled_mm", as_on_hopper):
        found = call(backend="torch")
    scaling.why_no_product.cache_clear()
    assert torch.allclose(found, call(backend="sequential"), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("op", SHARDED)
def test_scales_of_blocks_as_torch_has_them(ranks, op):
    ranks(2).run(blocks_by_torch, op, 1 if op == "gemm_all_gather" else 22)


def baselines_agree(rank, ranks, op):
    """What `bench` measures against computes the op's result."""
    for scales in ("rows", "tensor"):
        workload, group = Workload("", op, 24, 32, 64, E4M3, scales), resolve(group_name(None))
        operands = workload.operands(group, torch.device("cpu"))
        found = baselines(workload, operands, group)["torch"]()
        wanted = workload.by("sequential", operands, group)()
        assert torch.allclose(found.float(), wanted.float(), rtol=2**-6, atol=2**-5)
    blocks = Workload("", op, 24, 256, 272 * ranks, E4M3, "blocks")  # of which torch has no product here
    product = baselines(blocks, blocks.operands(group, torch.device("cpu")), group)["product"]()
    assert len(product) == 24 and product.isfinite().all()
    for m in (24, 128 * ranks):  # of MX types neither; a shard of x is whole atoms, or cannot be gathered
        kind = Workload("", op, m, 32, 64 * ranks, E4M3, "mx")
        operands = kind.operands(group, torch.device("cpu"))
        calls = baselines(kind, operands, group)
        assert calls["product"]().isfinite().all() and len(calls["product"]()) == m
        if OPS[op].gathers_operand and m < 128:
            with pytest.raises(ValueError, match="multiple of 128, got 12"):
                calls["torch"]()
        else:
            calls["collective"]()
            assert calls["torch"]().shape == kind.by("sequential", operands, group)().shape


@pytest.mark.parametrize("op", SHARDED)
def test_what_bench_measures_against_is_the_op(ranks, op):
    ranks(2).run(baselines_agree, op)


def several_weights(rank, ranks):
    """Two weights share a gather; one rank has one scale for all its rows, the other one for each."""
    torch.manual_seed(0)
    x, weights = torch.randn(8, 32).to(E4M3), [torch.randn(n, 32).to(E4M3) for n in (16, 24)]
    scale_x = torch.cat([torch.full((4, 1), 3.0), torch.rand(4, 1) + 1])
    scales = [torch.rand(16, 1) + 1, torch.rand(1, 24) + 1]
    own = slice(4 * rank, 4 * rank + 4)
    for backend in BACKENDS:
        outs, gathered = overlap_gemm.all_gather_gemm(
            x[own], weights, scale_x=scale_x[:1] if rank == 0 else scale_x[own], scale_w=scales,
            out_dtype=torch.float32, backend=backend, return_gathered=True,
        )  # fmt: skip
        assert gathered.dtype == E4M3 and torch.equal(gathered.view(torch.uint8), x.view(torch.uint8))
        for out, weight, scale in zip(outs, weights, scales, strict=True):
            exact = (x.double() * scale_x) @ (weight.double() * scale.view(-1, 1)).t()
            assert torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-4)


def test_weights_that_share_a_gather(ranks):
    ranks(2).run(several_weights)


def differing(rank, ranks):
    given = [torch.ones(8, 32).to(E4M3 if rank == 0 else E5M2), torch.ones(8, 32).to(E4M3)]
    one = torch.ones(())
    with pytest.raises(DisagreementError, match="disagree on dtype: rank . has torch.float8"):
        overlap_gemm.gemm_reduce_scatter(*given, scale_x=one, scale_w=one)
    with pytest.raises(DisagreementError, match="disagree on (weight_dtypes|out_dtype)"):
        if rank == 0:
            overlap_gemm.gemm_reduce_scatter(given[1], given[1], scale_x=one, scale_w=one)
        else:
            overlap_gemm.gemm_reduce_scatter(given[1], given[1].float().to(E5M2), scale_x=one, scale_w=one)


def test_ranks_that_differ_in_types_learn_it_by_name(ranks):
    ranks(2).run(differing)


def compiled(rank, ranks, k):
    x, weight, scale = torch.ones(6, k).to(E4M3), torch.ones(8, k).to(E4M3), torch.full((), 0.5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x, weight, scale):
        how = {"scale_x": scale, "scale_w": scale}
        rows = overlap_gemm.gemm_reduce_scatter(x, weight, **how)
        (columns,) = overlap_gemm.all_gather_gemm(x, [weight], scale_x=scale, scale_w=[scale], rows="equal")
        return rows + 1, columns

    rows, columns = both(x, weight, scale)
    assert rows.shape == (3, 8) and (rows == k * 0.25 * ranks + 1).all()
    assert columns.shape == (12, 8) and columns.dtype == torch.bfloat16 and (columns == k / 4).all()


@pytest.mark.parametrize("k", [32, 20])
def test_under_torch_compile(ranks, k):
    ranks(2).run(compiled, k)
