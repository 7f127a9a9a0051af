"""The registry of ops says of each what its definition, carried out rank by rank, comes to."""

import pytest
import torch

from overlap_gemm.api import ahead
from overlap_gemm.exchange.geometry import ExchangeShape
from overlap_gemm.spec import OPS, PATTERNS, OpSpec, op_coded, op_named, patterns_of
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.cases import LAYOUTS, Case, operands

M, N, K, RANKS = 12, 20, 28, 4


def carried_out(spec: OpSpec) -> tuple[list[torch.Tensor], float]:
    """Every rank's result, computed from its shapes alone, and the elements that a rank had to send."""
    given, layout = operands(Case(spec.name, M, N, K, torch.float64)), LAYOUTS[spec.name]
    xs = [layout.part(given.x, layout.x, rank, RANKS) for rank in range(RANKS)]
    weights = [layout.part(given.weight, layout.weight, rank, RANKS) for rank in range(RANKS)]
    for rank in range(RANKS):
        own = Shards.owned_by(RANKS, rank)
        assert (tuple(xs[rank].shape), tuple(weights[rank].shape)) == spec.shapes(M, N, K, own)
    travelled = xs if spec.operand_is_sent else None
    if spec.gathers_operand:
        xs = [torch.cat(xs)] * RANKS
    elif spec.operand_is_sent:
        xs = list(torch.cat(xs, 1).chunk(RANKS))
    products = [x @ weight.t() for x, weight in zip(xs, weights, strict=True)]
    assert spec.product(M, N, K, RANKS) == (*products[0].shape, xs[0].shape[1])
    travelled = travelled or products
    wholes = [sum(products)] * RANKS if spec.sums else products
    if spec.gathers_output:
        wholes = [torch.cat(products, 1)] * RANKS
    if spec.result_move == ("all_to_all", "m", "n"):
        wholes = list(torch.cat(products).chunk(RANKS, 1))
    outs = [
        layout.part(whole, layout.out, rank, RANKS) if spec.sums else whole
        for rank, whole in enumerate(wholes)
    ]
    if spec.sums:  # each rank's partials of all rows or columns but its own; again where sums return
        sent = travelled[0].numel() * (RANKS - 1) / RANKS * (2 if layout.out is None else 1)
    elif spec.weight is None:  # each rank a part of what a rank has
        sent = travelled[0].numel() * (RANKS - 1) / RANKS
    else:
        sent = travelled[0].numel() * (RANKS - 1)
    return outs, sent


@pytest.mark.parametrize("op", OPS)
def test_shapes_bytes_and_result_follow_from_the_sharded_axes(op):
    spec, given, layout = OPS[op], operands(Case(op, M, N, K, torch.float64)), LAYOUTS[op]
    outs, sent = carried_out(spec)
    assert spec.elements_out(M, N, K, RANKS) == sent
    exact = given.x @ given.weight.t()
    for rank, out in enumerate(outs):
        assert torch.allclose(out, layout.part(exact, layout.out, rank, RANKS))
    collectives = {True: spec.collectives(in_rank_order=True), False: spec.collectives(in_rank_order=False)}
    assert ("all_gather" in collectives[False]) is (not spec.sums and spec.weight is not None)
    assert ("all_to_all" in collectives[False]) is (spec.weight is None)
    assert ("sum" in collectives[True]) is spec.sums


def test_what_callers_may_say_and_what_ranks_must_ask():
    said = {op: (spec.arguments(1, 2, 3), spec.arguments(1, 2, 3, least=True)) for op, spec in OPS.items()}
    assert said == {
        "all_gather_gemm": ({"rows": 1, "columns": 2}, {"rows": 1}),
        "gemm_reduce_scatter": ({"k": 3}, {}),
        "gemm_all_reduce": ({"k": 3}, {}),
        "gemm_all_gather": ({"columns": 2}, {"columns": 2}),
        "gemm_all_to_all": ({"rows": 1}, {"rows": 1}),
        "all_to_all_gemm": ({}, {}),
    }


def test_a_dual_takes_what_its_op_gives_and_a_whole_gives_all_of_it():
    for spec in OPS.values():
        if spec.dual:
            dual = OPS[spec.dual]
            places = {None: None, "m": "m", "n": "k", "k": "n"}  # the gradient's K is this op's N
            assert (dual.x, dual.out) == (places[spec.out], places[spec.x]) and dual.dual == spec.name
        if spec.unsharded:
            whole = OPS[spec.unsharded]
            assert (whole.x, whole.weight, whole.out) == (spec.x, spec.weight, None)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_name_kernels_and_slots_hold_what_travels(name):
    from importlib import import_module

    pattern = PATTERNS[name]
    module, _, kernel = pattern.kernel.partition(":")
    assert hasattr(import_module(module), kernel)
    assert name in patterns_of(pattern.op) and pattern.label.startswith(OPS[pattern.op].label)
    shape = ExchangeShape.even(300, 500, 3, name)
    rows, columns = shape.block
    assert shape.shard * shape.world >= (500 if pattern.cut == "columns" else 300)
    assert {None: (300, 500), "rows": (shape.shard, 500), "columns": (300, shape.shard)}[pattern.cut] == (
        rows,
        columns,
    )


def test_every_op_has_a_pattern_and_a_name_in_failure_records():
    assert all(patterns_of(op) for op in OPS)
    assert [op_coded(op.code) for op in OPS.values()] == list(OPS) and op_coded(0) == "a kernel"


@pytest.mark.parametrize("name", ["gemm", None, 3, ["gemm_all_reduce"]])
def test_an_op_that_there_is_not_is_named_beside_those_that_there_are(name):
    with pytest.raises(ValueError, match="op must be one of all_gather_gemm, gemm_reduce_scatter"):
        op_named(name)
    with pytest.raises(ValueError, match="op must be one of"):
        ahead.reserve(name, max_rows=8, columns=8)
