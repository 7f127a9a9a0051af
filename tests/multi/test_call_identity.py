"""Portable calls carry their identity: what differs between ranks is right, or named on every one of them."""

import contextlib
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm import epilogues
from overlap_gemm.backends import portable_arithmetic as arithmetic
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.spec import OPS
from tests.support.chosen import in_turn
from tests.support.ops import EVERY

BACKENDS = ("auto", "torch", "sequential", "decomposed")
ROWS, WIDTH = 12, 6


def call(op, backend, group, factor=1.0, rows=ROWS, dtype=torch.float32):
    x, depth = torch.full((rows, WIDTH), factor, dtype=dtype), WIDTH
    if OPS[op].reshards_k:  # the weight of every rank has all of K
        depth *= dist.get_world_size(group)
    weight = torch.ones(WIDTH, depth, dtype=dtype)
    return getattr(overlap_gemm, op)(x, weight, backend=backend, group=group)


def named_on_every_rank(group, function, words):
    """The same words on every rank."""
    with pytest.raises(DisagreementError, match=words) as caught:
        function()
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, str(caught.value).partition(": ")[2], group=group)
    assert len(set(everyone)) == 1, everyone


def another_order(rank, size, backend, first, second):
    group = dist.new_group()
    for op in (first, second):
        call(op, backend, group)  # which all ranks know
    order = (first, second) if rank == 0 else (second, first)
    for op in order:
        named_on_every_rank(group, lambda op=op: call(op, backend, group), "disagree on op: rank 0 has ")
    assert torch.equal(call("gemm_all_reduce", backend, group), torch.full((ROWS, WIDTH), 1.0 * WIDTH * size))


PAIRS = [
    ("gemm_all_reduce", "gemm_reduce_scatter"),
    ("all_gather_gemm", "gemm_all_gather"),
    ("gemm_all_to_all", "all_to_all_gemm"),
]


@pytest.mark.parametrize(
    ("first", "second", "backend", "world"),
    in_turn([(*pair, backend) for pair in PAIRS for backend in BACKENDS], [2, 3]),
)
def test_calls_in_another_order_are_named_on_every_rank(ranks, first, second, backend, world):
    ranks(world).run(another_order, backend, first, second)


def rows_and_types(rank, size, op, backend):
    group = dist.new_group()
    kinds = {"rows": {"rows": 2 * ROWS}, "dtype": {"dtype": torch.float64}}
    for other in ({}, *kinds.values()):
        call(op, backend, group, **other)
    for what, other in kinds.items():
        mine = other if rank == size - 1 else {}
        named_on_every_rank(
            group, lambda mine=mine: call(op, backend, group, **mine), f"disagree on {what}: "
        )


@pytest.mark.parametrize(("op", "world", "backend"), in_turn(product(EVERY, [2, 3]), BACKENDS))
def test_known_kinds_of_other_rows_or_types_are_named_on_every_rank(ranks, op, backend, world):
    ranks(world).run(rows_and_types, op, backend)


def no_memory(*_, **__):
    raise MemoryError("planted")


FAULTS = {
    "arguments": (ValueError, "K=6", ()),
    "memory": (
        MemoryError,
        "planted",
        ((torch, "mm"), (torch.Tensor, "new_empty")),
    ),
}
"""What raises on one rank, its words, and where it is planted."""


def refused(rank, size, op, backend, fault):
    group = dist.new_group()
    call(op, backend, group)
    error, words, places = FAULTS[fault]
    if rank == 1:
        with pytest.raises(error, match=words), contextlib.ExitStack() as planted:
            for place in places:
                planted.enter_context(mock.patch.object(*place, no_memory))
            width = WIDTH if places else WIDTH - 1
            x, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, width)
            getattr(overlap_gemm, op)(x, weight, backend=backend, group=group)
    count = "disagree on the number of calls that raised before their first transfer: .*rank 1 has "
    for layer in range(3):  # like layers of a model, which differ in their numbers alone
        words = f"{count}{layer + 1} .the last: {op}: {error.__name__}: "
        named_on_every_rank(group, lambda layer=layer: call(op, backend, group, layer), words)


@pytest.mark.parametrize(
    ("op", "fault", "backend", "world"),
    in_turn(
        product(["gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_gather", "gemm_all_to_all"], FAULTS),
        BACKENDS,
        [2, 3],
    ),
)
def test_a_call_that_one_rank_refused_is_not_taken_for_the_next(ranks, op, backend, fault, world):
    ranks(world).run(refused, op, backend, fault)


def refused_outside_of_prepared_calls(rank, size, kind):
    group = dist.new_group()
    x, weight, op = torch.ones(4, 1, WIDTH), torch.ones(8, WIDTH), overlap_gemm.gemm_all_reduce
    applied = {
        "name": (epilogues.apply_silu, epilogues.apply_silu()),
        "input": (epilogues.add_bias(bias=None), epilogues.add_bias(bias=weight[:, 0])),
        "gradient": (epilogues.scale_rows(scale=None), epilogues.scale_rows(scale=torch.ones(4, 1))),
        "rows": [epilogues.scale_gathered_rows(scale=torch.ones(rows, 1)) for rows in (3, 4)],
    }.get(kind)
    if kind == "rows":
        op = overlap_gemm.all_gather_gemm
    weight.requires_grad_(kind == "gradient")
    modes = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "profiler": torch.profiler.profile}

    def call(is_refused=False):
        how = {} if applied is None else {"epilogue": applied[not is_refused]}
        with modes.get(kind, contextlib.nullcontext)():
            return op(x, weight[:, 1:] if is_refused and not how else weight, group=group, **how)

    call()
    if rank == 1:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(is_refused=True)
    named_on_every_rank(
        group, call, "number of calls that raised before their first transfer: .*rank 1 has 1"
    )
    with overlap_gemm.retry(caught.value) if rank == 1 else contextlib.nullcontext():
        call()
    call()


@pytest.mark.parametrize("kind", ["autocast", "profiler", "name", "input", "gradient", "rows"])
def test_arguments_that_one_rank_refuses_are_counted_on_every_path(ranks, kind):
    ranks(2).run(refused_outside_of_prepared_calls, kind)


def broken_in_the_middle(rank, size):
    """Between the two transfers of an all-reduce in rank order."""
    group = dist.new_group()
    call("gemm_all_reduce", "sequential", group)
    if rank == 1:
        with (
            mock.patch.object(arithmetic, "sum_in_rank_order", no_memory),
            pytest.raises(MemoryError),
        ):
            call("gemm_all_reduce", "sequential", group)
    words = "disagree on transfer: .*rank 1 has all-to-all of torch.float32"
    named_on_every_rank(group, lambda: call("gemm_all_reduce", "sequential", group), words)


@pytest.mark.parametrize("world", [2, 3])
def test_a_call_that_one_rank_left_in_the_middle_is_named(ranks, world):
    ranks(world).run(broken_in_the_middle)


def raised_by_all(rank, size, backend):
    """What raises on all ranks differs in nothing."""
    group = dist.new_group()
    for _ in range(2):
        with pytest.raises(ValueError, match="K=6"):
            overlap_gemm.gemm_all_reduce(torch.ones(2, 6), torch.ones(2, 5), backend=backend, group=group)
        result = call("gemm_all_reduce", backend, group)
        assert torch.equal(result, torch.full((ROWS, WIDTH), 1.0 * WIDTH * size))


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_all_ranks_refuse_differ_in_nothing(ranks, backend):
    ranks(2).run(raised_by_all, backend)


def gradients(rank, size, backend):
    """The moves of a backward pass are compared, too: one rank leaves its out."""
    group = dist.new_group()
    x, weight = torch.ones(ROWS, WIDTH, requires_grad=True), torch.ones(WIDTH, WIDTH, requires_grad=True)

    def pass_through():
        out = overlap_gemm.all_gather_gemm(x, weight, backend=backend, group=group)
        if rank:
            out.sum().backward()

    if size > 1:
        named_on_every_rank(
            group,
            lambda: [pass_through() for _ in range(2)],
            "disagree on op: rank 0 has all_gather_gemm, rank 1 has ",
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_pass_that_one_rank_leaves_out_is_named(ranks, backend):
    ranks(2).run(gradients, backend)
