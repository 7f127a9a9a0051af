"""`invariant=` on the portable backends: bits that depend neither on the batch nor on the number of ranks."""

import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends import portable_arithmetic as arithmetic
from overlap_gemm.backends.op_call import OpCall
from overlap_gemm.dispatch import gradient_products
from overlap_gemm.epilogues import add_residual
from overlap_gemm.runtime.group import group_name
from overlap_gemm.testing.cases import LAYOUTS, Case
from tests.support.chosen import in_turn
from tests.support.gradients import forward_and_backward
from tests.support.invariance import adversarial, differing, shares, wholes
from tests.support.ops import EVERY, SHARDED

WORLDS = (1, 2, 4)
DTYPES = [torch.float32, torch.bfloat16]


def random_case(op: str, dtype: torch.dtype, seed: int, leaves: int = 8) -> Case:
    """Shapes whose summed extents have leaves, of any size otherwise."""
    dice = random.Random(f"{op} {seed}")
    m = dice.choice((4, 8, 20, 44, 76))
    if EVERY[op].weight is None:  # the gradient of the weight is summed over the rows
        m = leaves * dice.randrange(1, 8)
    n, k = (leaves * dice.randrange(2, 24) for _ in "nk")
    return Case(op, m, n, k, dtype, bias=dice.random() < 0.7, seed=seed)


# --- ranks ---


@pytest.mark.parametrize(("op", "dtype", "seed"), in_turn(product(EVERY, DTYPES), range(3)), ids=str)
def test_bits_do_not_depend_on_the_number_of_ranks(op, dtype, seed, ranks):
    case = random_case(op, dtype, seed)
    backends = ("sequential", "decomposed")
    found = [
        wholes(ranks(world).run(shares, case, backend, "ranks")) for world in WORLDS for backend in backends
    ]
    for other in found[1:]:
        assert differing(found[0], other) == {}


def shares_with_residual(rank, size, case, backend):
    inputs, layout, out = adversarial(case), LAYOUTS[case.op], LAYOUTS[case.op].out
    x, weight = layout.part(inputs.x, 1, rank, size), layout.part(inputs.weight, 1, rank, size)
    grad, residual = (one if out is None else layout.part(one, 0, rank, size) for one in [inputs.grad] * 2)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, residual)]
    epilogue = add_residual(residual=leaves[2])
    how = {"backend": backend, "invariant": "ranks", "epilogue": epilogue}
    made = getattr(overlap_gemm, case.op)(leaves[0], leaves[1], bias=inputs.bias, **how)
    of_x, of_weight, of_residual = torch.autograd.grad(made, leaves, grad)
    of_columns = ("x", of_x, 1), ("weight", of_weight, 1)
    return [("out", made.detach(), out), ("residual", of_residual, out), *of_columns]


@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_bits_with_a_residual_do_not_depend_on_the_number_of_ranks(op, ranks):
    case = random_case(op, torch.bfloat16, 3)
    results = [
        wholes(ranks(world).run(shares_with_residual, case, backend))
        for world, backend in zip(WORLDS, ("sequential", "decomposed", "auto"), strict=True)
    ]
    for other in results[1:]:
        assert differing(results[0], other) == {}


def test_without_the_promise_these_operands_give_other_bits_on_more_ranks(ranks):
    case = random_case("gemm_all_reduce", torch.float32, 0)
    one, two, four = (wholes(ranks(world).run(shares, case, "sequential", None)) for world in WORLDS)
    assert differing(one, two)["out"] > 0.1
    assert differing(two, four)["out"] > 0.1
    assert wholes(ranks(1).run(shares, case, "sequential", "ranks"))  # which are served


def with_another_order(rank, size, case, name):
    """A rank's results of an op in which one order of summation has been changed."""

    def in_rank_order(leaves):
        total = leaves[0]
        for leaf in leaves[1:]:
            total = total + leaf
        return total

    def from_the_other_end(leaves):
        return arithmetic_sum(tuple(leaves)[1:] + tuple(leaves)[:1])

    def plain(x, weight):
        return arithmetic.wide_product(x, weight)

    def in_16_bits(self, x):
        return x.dtype if x.dtype.itemsize == 2 else torch.bfloat16

    arithmetic_sum = arithmetic.sum_in_tree
    changed = {
        "ranks in rank order": mock.patch.object(arithmetic, "sum_in_tree", in_rank_order),
        "leaves paired otherwise": mock.patch.object(arithmetic, "sum_in_tree", from_the_other_end),
        "products as torch makes them": mock.patch.object(arithmetic, "ordered_product", plain),
        "partial sums in 16 bits": mock.patch.object(arithmetic.Ordered, "type_of", in_16_bits),
    }
    with changed[name]:
        return shares(rank, size, case, "sequential", "ranks")


@pytest.mark.parametrize(
    "change",
    [
        "ranks in rank order",
        "leaves paired otherwise",
        "products as torch makes them",
        "partial sums in 16 bits",
    ],
)
def test_one_changed_order_is_noticed(change, ranks):
    case = Case("gemm_all_reduce", 3, 40, 8 * 37, torch.float32, bias=False, seed=5)
    found = [wholes(ranks(world).run(with_another_order, case, change)) for world in WORLDS]
    assert any(differing(found[0], other) for other in found[1:])
    honest = wholes(ranks(2).run(shares, case, "sequential", "ranks"))
    assert differing(honest, wholes(ranks(4).run(shares, case, "sequential", "ranks"))) == {}


def gradients_alongside(rank, size):
    """Returns how many elements of a weight's gradient are not those of the ordered product.

    The gathered rows are copied alongside the product, as on GPUs with copy engines.
    """
    x, grad, weight = torch.randn(132, 64), torch.randn(132, 3), torch.randn(3, 64)
    call = OpCall(group=group_name(None), rows=132, chunk=132, columns=3, k=64, invariant="batch")
    copies = SimpleNamespace(alongside=lambda own, scattered, *_: nullcontext((scattered(), own)))
    with (
        mock.patch.object(gradient_products, "chosen", lambda *_: ("fused", lambda *_: x)),
        mock.patch.object(gradient_products, "pays_alongside", lambda *_: True),
        mock.patch.object(gradient_products, "copies_for", lambda *_: copies),
    ):
        run = gradient_products._bind_all_gather_gemm_gradients(x, [grad], [weight], *call)
        _, gradient = run(x, [grad], [weight])
    ordered = arithmetic.ordered_product(grad.t(), x.t())
    return int((gradient != ordered).sum()), int((grad.t() @ x != ordered).sum())


def test_weight_gradients_next_to_copies_are_ordered_products(ranks):
    ((number, of_torchs),) = ranks(1).run(gradients_alongside)
    assert number == 0 < of_torchs


# --- batch ---


def rows_of_a_batch(rank, size, case, backend, invariant, kept):
    """A rank's results of all rows, and those of some of them: (name, tensor, sharded dimension)."""
    whole = adversarial(case)
    part = type(whole)(whole.x[kept], whole.weight, whole.bias, whole.grad[kept])
    found = []
    with overlap_gemm.promising(invariant=invariant):
        for of in (whole, part):
            results = forward_and_backward(case.op, of, rank, size, backend)
            rows = [one for one in results if one.name in ("out", "x")]
            found.append([(one.name, one.value, one.dim) for one in rows])
    return found


def differing_rows(ranks, case, backend, invariant, kept):
    both = ranks(2).run(rows_of_a_batch, case, backend, invariant, kept)
    everything, some = (wholes([of_rank[i] for of_rank in both]) for i in (0, 1))
    return differing({name: tensor[kept] for name, tensor in everything.items()}, some)


@pytest.mark.parametrize(
    ("op", "dtype", "backend"),
    in_turn(product(SHARDED, DTYPES), ["auto", "sequential", "decomposed"]),
    ids=str,
)
def test_rows_do_not_depend_on_the_batch(op, dtype, backend, ranks):
    for seed, kept in enumerate(([0], [5], [2, 9, 10], list(range(3, 40)))):
        case = replace(random_case(op, dtype, 10 + seed), m=44)
        assert differing_rows(ranks, case, backend, "batch", kept) == {}


def test_without_the_promise_a_row_alone_has_other_bits(ranks):
    case = Case("gemm_all_reduce", 44, 64, 512, torch.float32, False, 3)
    assert differing_rows(ranks, case, "sequential", None, [5])["out"] > 0.1


def differing_rows_of_bytes(rank, size, op, block, backend, kept):
    """Returns how many elements of a rank's rows differ from those of a call of some, and their spread."""
    m, n, k = 44, 136, 320
    generator = torch.Generator().manual_seed(rank)
    x, weight = (
        torch.randn(rows, k, generator=generator)
        * 4.0 ** torch.randint(-2, 3, (rows, k), generator=generator)
        for rows in (m, n)
    )
    bytes_x, bytes_weight = (one.to(torch.float8_e4m3fn) for one in (x, weight))
    along = {None: 1, "mx": k // 32}.get(block, 3)
    scale_x = 2.0 ** torch.randint(-3, 4, (m, along), generator=generator)
    scale_w = 2.0 ** torch.randint(-3, 4, ({128: 2}.get(block, n), along), generator=generator)
    outs = []
    for rows in (list(range(m)), kept):
        scales = scale_x[rows], scale_w
        if block == "mx":
            scales = tuple(overlap_gemm.swizzle_scales(scale) for scale in scales)
        out = getattr(overlap_gemm, op)(
            bytes_x.view(torch.uint8)[rows].view(bytes_x.dtype), bytes_weight, scale_x=scales[0],
            scale_w=scales[1], block=block, backend=backend, invariant="batch", out_dtype=torch.float32,
        )  # fmt: skip
        outs.append(out[rank * len(rows) :][: len(rows)] if op == "all_gather_gemm" else out)
    return int((outs[0][kept] != outs[1]).sum()), outs[0].std().item()


@pytest.mark.parametrize(("block", "backend"), in_turn([None, 128, "mx"], ["auto", "decomposed"]))
def test_rows_of_bytes_do_not_depend_on_the_batch(block, backend, ranks):
    for op, kept in (("gemm_all_reduce", [5]), ("all_gather_gemm", [2, 9, 10]), ("gemm_all_gather", [7])):
        for count, spread in ranks(2).run(differing_rows_of_bytes, op, block, backend, kept):
            assert count == 0
            assert spread > 1


# --- partials ---


def sums_with_partials(rank, size, case, backend, partials):
    layout, whole = LAYOUTS[case.op], adversarial(case)
    x, weight = (
        layout.part(one, dim, rank, size) for one, dim in ((whole.x, layout.x), (whole.weight, layout.weight))
    )
    out = getattr(overlap_gemm, case.op)(x, weight, bias=whole.bias, backend=backend, partials=partials)
    return [("out", out, layout.out)]


@pytest.mark.parametrize("op", [name for name, spec in SHARDED.items() if spec.sums])
@pytest.mark.parametrize("backend", ["torch", "sequential", "decomposed"])
def test_float32_partial_sums_are_rounded_once(op, backend, ranks):
    case = Case(op, 13, 48, 96, torch.bfloat16, True, 2)
    whole = adversarial(case)
    exact = whole.x.double() @ whole.weight.double().t() + whole.bias.double()
    terms = whole.x.double().abs() @ whole.weight.double().abs().t() + whole.bias.double().abs()
    errors = {}
    for partials in (None, "float32"):
        out = wholes(ranks(2).run(sums_with_partials, case, backend, partials))["out"].double()
        errors[partials] = ((out - exact).abs() - exact.abs() * 2.0**-8) / terms
    assert errors["float32"].max() < 2.0**-20 < 2.0**-14 < errors[None].max()


# --- what cannot be promised ---


def refuse(rank, size, message, op, shapes, dtype, options):
    x, weight = (torch.ones(shape, dtype=dtype) for shape in shapes)
    with pytest.raises(overlap_gemm.InvarianceError, match=message):
        getattr(overlap_gemm, op)(x, weight, **options)


@pytest.mark.parametrize(
    ("world", "message", "depth", "options"),
    [
        (3, "8 leaves, which 3 ranks do not divide", 16, {"invariant": "ranks"}),
        (4, "2 leaves, which 4 ranks do not divide", 16, {"invariant": "ranks:2"}),
        (2, "equal parts of K=20 on 2 ranks; this rank has 12", 12, {"invariant": "ranks", "k": 20}),
        (2, "8 does not divide 28; invariant='ranks:4' is possible", 14, {"invariant": "ranks"}),
    ],
)
def test_what_no_backend_can_promise_is_refused(world, message, depth, options, ranks):
    shapes = [(6, depth), (8, depth)]
    ranks(world).run(refuse, message, "gemm_reduce_scatter", shapes, torch.float32, options)


def test_types_whose_products_depend_on_the_place_are_refused(ranks):
    given = "depend on their place", "gemm_all_reduce", [(6, 40), (8, 40)], torch.float64
    ranks(2).run(refuse, *given, {"invariant": "batch"})


def sum_with_depths(rank, size, backend, depths, error):
    x, weight = (torch.ones(rows, depths[rank], dtype=torch.float64) for rows in (6, 8))
    expectation = nullcontext() if error is None else pytest.raises(error, match="depend on their place")
    with expectation:
        overlap_gemm.gemm_all_reduce(x, weight, backend=backend, invariant="batch")
    if depths[rank] == 40:
        with pytest.raises(overlap_gemm.InvarianceError, match="depend on their place"):
            overlap_gemm.explain("gemm_all_reduce", x, weight, backend=backend, invariant="batch")


@pytest.mark.parametrize("backend", ["sequential", "decomposed"])
def test_a_depth_of_one_rank_without_an_order_is_refused_on_all_ranks(backend, ranks):
    one, all_ranks = overlap_gemm.DisagreementError, overlap_gemm.InvarianceError
    for depths, error in (((40, 40), all_ranks), ((1, 40), one), ((1, 1), None), ((40, 1), one)):
        ranks(2).run(sum_with_depths, backend, depths, error)


def test_a_backend_that_sums_in_another_order_cannot_be_named(ranks):
    x, weight = torch.ones(4, 16), torch.ones(8, 16)
    with pytest.raises(ValueError, match="invariant='batch' and backend='torch'"):
        overlap_gemm.gemm_all_reduce(x, weight, invariant="batch", backend="torch")
    with pytest.raises(ValueError, match="invariant must be one of None, 'batch'"):
        overlap_gemm.gemm_all_reduce(x, weight, invariant="rows")
    with pytest.raises(ValueError, match="partials must be one of None, 'float32'"):
        overlap_gemm.promising(partials="bf16").__enter__()


def test_explain_says_what_a_promise_costs(ranks):
    x, weight = torch.ones(8, 64).bfloat16(), torch.ones(8, 64).bfloat16()
    printed = str(overlap_gemm.explain("gemm_reduce_scatter", x, weight, invariant="ranks"))
    assert "invariant='ranks': no time decides between backends" in printed
    assert "K is summed in 8 leaves, 8 a rank" in printed
    assert "partial sums are float32: 2 times the bytes of torch.bfloat16" in printed
    assert "float32" not in str(overlap_gemm.explain("gemm_reduce_scatter", x, weight, invariant="batch"))
    assert "invariant" not in str(overlap_gemm.explain("gemm_reduce_scatter", x, weight))


def disagree(rank, size):
    x, weight = torch.ones(4, 16), torch.ones(8, 16)
    for options in ({"invariant": "batch" if rank else None}, {"partials": "float32" if rank else None}):
        (name,) = options
        with pytest.raises(overlap_gemm.DisagreementError, match=f"disagree on {name}"):
            overlap_gemm.gemm_all_reduce(x, weight, backend="sequential", deterministic=True, **options)


def test_ranks_that_promise_different_things_learn_it(ranks):
    ranks(2).run(disagree)
