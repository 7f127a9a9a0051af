"""An op from outside of the package: what it gets for its registration, on several ranks."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import overlap_gemm
from overlap_gemm.spec import OPS, PATTERNS
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from tests.support.chosen import in_turn
from tests.support.gradients import forward_and_backward
from tests.support.references import reference
from tests.support.tolerances import assert_as_good_as

BACKENDS = "sequential", "decomposed", "torch"
AXES = {
    "rows_to_columns": ("m", None, "n"),
    "columns_to_rows": ("k", None, "m"),
    "divided_and_gathered": (None, None, None),
}
DUALS = {"rows_to_columns": "columns_to_rows", "columns_to_rows": "rows_to_columns"}
CASES = {
    "even": (24, 24, 48, 4, torch.float32),
    "alone": (23, 13, 29, 1, torch.float32),
    "uneven": (23, 13, 29, 3, torch.float32),
    "empty": (2, 5, 7, 4, torch.float32),
    "bfloat16": (23, 13, 29, 2, torch.bfloat16),
}
"""M, N, K, ranks and dtype."""


def registered():
    """Registers the ops in this process, once."""
    for code, (name, (x, weight, out)) in enumerate(AXES.items(), start=31):
        if not hasattr(overlap_gemm, name):
            spec = overlap_gemm.OpSpec(name, code, name, x, weight, out, dual=DUALS.get(name, name))
            assert overlap_gemm.register(spec) is getattr(overlap_gemm, name)


def matches_the_whole(rank, size, case, backend):
    registered()
    whole_operands, layout = operands(case), LAYOUTS[case.op]
    exact, baseline = reference(whole_operands), reference(whole_operands, case.dtype)
    for name, result, dim, roundings in forward_and_backward(case.op, whole_operands, rank, size, backend):
        wanted, truth = (layout.part(getattr(of, name), dim, rank, size) for of in (baseline, exact))
        assert_as_good_as(result, wanted, truth, what=name, roundings=max(roundings, size))


@pytest.mark.parametrize(("case", "op", "backend"), in_turn(product(CASES, AXES), BACKENDS))
def test_a_registered_op_matches_the_whole_product_with_its_gradients(ranks, op, backend, case):
    m, n, k, world, dtype = CASES[case]
    ranks(world).run(matches_the_whole, Case(op, m, n, k, dtype), backend)


def explained(rank, size):
    registered()
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    report = str(overlap_gemm.explain(overlap_gemm.rows_to_columns, x, weight))
    assert "fused: no, no fused kernel of rows_to_columns is registered" in report
    assert "backward: columns_to_rows runs as 'torch'" in report
    overlap_gemm.warmup("rows_to_columns", (6, 4, 8), dtype=torch.float32, backward=True, bias=True)
    overlap_gemm.rows_to_columns(x, weight)
    made = overlap_gemm.stats()
    assert "rows_to_columns" in str(made)
    assert overlap_gemm.reserve("rows_to_columns", max_rows=8, columns=8) == 0


def test_a_registered_op_is_explained_warmed_up_and_counted(ranks):
    ranks(2).run(explained)


def compiled(rank, size):
    registered()
    x, own_columns = torch.randn(3, 8, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(6, 8)
    for function, operand in (
        (lambda x: overlap_gemm.rows_to_columns(x, weight, rows=6).sin(), x),
        (lambda x: overlap_gemm.columns_to_rows(x, weight).sin(), own_columns),
    ):
        made = torch.compile(function, backend="aot_eager", fullgraph=True)(operand)
        torch.testing.assert_close(made, function(operand))
        (of_graph,), (wanted,) = (
            torch.autograd.grad(out.sum(), operand) for out in (made, function(operand))
        )
        torch.testing.assert_close(of_graph, wanted)


def test_a_registered_op_is_a_node_of_compiled_graphs(ranks):
    ranks(2).run(compiled)


def refused(rank, size):
    registered()
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    with pytest.raises(TypeError, match="rows_to_columns: no keyword columns; it has rows, dim, backend"):
        overlap_gemm.rows_to_columns(x, weight, columns=6)
    with pytest.raises(ValueError, match="of K=8 of weight .6, 8. rank . of 2 owns 4 .* but x has 8"):
        overlap_gemm.columns_to_rows(x, weight)
    spec = overlap_gemm.OpSpec
    for wrong, why in (
        (("rows_to_columns", 40, "", "m", None, "n"), "needs a name, and a number of 1 or more, of its own"),
        (("another", 31, "", "m", None, "n"), "needs a name, and a number of 1 or more, of its own"),
        (("another", 0, "", "m", None, "n"), "needs a name, and a number of 1 or more, of its own"),
        (("another", 40, "", "m", "n", "n"), "must have weight=None"),
        (("another", 40, "", "m", None, "m"), "send x or its result by one collective"),
        (("another", 40, "", "k", None, "n"), "it does: all_to_all and all_to_all"),
        (("another", 40, "", "m", None, "n", "rows_to_columns"), "the dual of another has"),
    ):
        with pytest.raises(ValueError, match=why):
            overlap_gemm.register(spec(*wrong))
    with pytest.raises(ValueError, match="x must be sharded along 'm' or 'k' or None, got 'n'"):
        spec("another", 40, "", "n", None, "n")
    pattern = overlap_gemm.PatternSpec("tiles", "rows_to_columns", None, False, False, "a:b")
    with pytest.raises(ValueError, match="patterns .'tiles'. are of another op than another"):
        overlap_gemm.register(spec("another", 40, "", "m", None, "n"), pattern)
    for wrong, error, why in (
        ([replace(pattern, op="another", name="one_shot")], ValueError, "'one_shot' is there already"),
        ([replace(pattern, op="another")] * 2, ValueError, "'tiles' is there already"),
        (["tiles"], TypeError, "patterns of type PatternSpec, got str"),
    ):
        with pytest.raises(error, match=why):
            overlap_gemm.register(spec("another", 40, "", "m", None, "n"), *wrong)
    for name in ("configured", "reserve", "api", "cli", "all_gather_rows", "name", "__init__"):
        with pytest.raises(ValueError, match=f"op {name} needs a name of its own"):
            overlap_gemm.register(spec(name, 40, "", "m", None, "n"))
    for name in ("class", "gemm-rs", "größe", 5):
        with pytest.raises(ValueError, match="name of an op must be an identifier of ASCII characters"):
            spec(name, 40, "", "m", None, "n")
    assert not {"another", "tiles", "configured", "api"} & {*OPS, *PATTERNS}
    with pytest.raises(AttributeError):
        overlap_gemm.another  # noqa: B018


def test_what_cannot_be_registered_is_refused_and_leaves_nothing(ranks):
    ranks(2).run(refused)


def without_dual(rank, size):
    if not hasattr(overlap_gemm, "dealt"):
        overlap_gemm.register(overlap_gemm.OpSpec("dealt", 50, "D", "m", None, "n", dual="not_there"))
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(6, 8)
    out = overlap_gemm.dealt(x, weight)
    with pytest.raises(RuntimeError, match="no op dual='not_there' is registered; register one"):
        out.sum().backward()


def test_an_op_without_its_dual_has_no_gradient(ranks):
    ranks(2).run(without_dual)


def disagreeing(rank, size):
    registered()
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    with pytest.raises(overlap_gemm.DisagreementError):
        if rank:
            overlap_gemm.rows_to_columns(x, weight, rows=6)
        else:
            overlap_gemm.columns_to_rows(torch.randn(6, 4), weight)


def test_ranks_that_call_different_ops_are_told(ranks):
    ranks(2).run(disagreeing)
