"""Ranks that call different things: the same named error on every one, and the group stays in step."""

import contextlib
import random
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.dispatch import shard_ops
from overlap_gemm.runtime import agree
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.group import find
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS, Case
from overlap_gemm.tuning.settings import settings
from tests.support.chosen import in_turn
from tests.support.dispatching import Watch
from tests.support.ops import EVERY
from tests.support.shares import parts

X, WEIGHT = (8, 6), (10, 6)

DEALT_ROWS = [name for name, op in EVERY.items() if "m" in (op.x, op.out)]
"""Ops that have `dim`."""


def called(rank, size, op, what):
    """What a rank calls: rank 1 something else than the others, in `what`."""
    x, weight, dtype, options = X, WEIGHT, torch.float32, {}
    if rank == 1 and what == "op":
        op = list(EVERY)[(list(EVERY).index(op) + 1) % len(EVERY)]
    if OPS[op].reshards_k:  # the weight of every rank has all of K
        weight = (WEIGHT[0], WEIGHT[1] * size)
    if rank == 1:
        if what == "rows":
            x = (12, 6)
        elif what == "width":
            if op in ("all_gather_gemm", "gemm_all_gather"):
                x, weight = (8, 7), (10, 7)
            elif op == "all_to_all_gemm":
                x, weight = (8, 7), (10, 7 * size)
            else:
                weight = (11, 6)
        elif what == "dtype":
            dtype = torch.bfloat16
        elif what == "bias":
            options["bias"] = torch.ones(weight[0])
        elif what == "backend":
            options["backend"] = "torch"
        elif what == "deterministic":
            options["deterministic"] = True
    if what == "dim":
        x = (4, 4, 6)
        options["dim"] = int(rank == 1)
    if "bias" in options:
        options["bias"] = options["bias"].to(dtype)
    return op, torch.ones(x, dtype=dtype), torch.ones(weight, dtype=dtype), options


SETTINGS = {
    "configured": ({"tile": (128, 128)}, {"tile": (128, 64)}),
    "algorithm": ({}, {"algorithm": "one_shot"}),
    "transport": ({"transport": "peer_bulk"}, {"transport": "nvshmem"}),
    "shards": ({"shard_transport": "copy_engine"}, {"shard_transport": "peer_bulk"}),
    "tiles": ({}, {"tile_transport": "peer_bulk"}),
}
"""What `configured` is given on the others and on rank 1."""

NAMES = {
    "rows": "rows|the ranks hold",
    "width": "disagree on (k|columns|widths):",
    "op": f"op|{agree.LENGTHS}",
}


def disagree(rank, size, op, what, backend):
    name, x, weight, options = called(rank, size, op, what)
    errors, group = [None] * size, dist.new_group()  # a group that knows a call does not compare it again
    overlap_gemm.gemm_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=group)  # reads what was measured
    fields = SETTINGS[what][rank == 1] if what in SETTINGS else {}
    if what in SETTINGS:
        what = "configured"
    with (
        pytest.raises((RuntimeError, ValueError), match=NAMES.get(what, what)) as error,
        overlap_gemm.configured(reserve_sms=rank, **fields),  # the first may differ
    ):
        getattr(overlap_gemm, name)(x, weight, group=group, **{"backend": backend, **options})
    dist.all_gather_object(errors, str(error.value).split(": ", 1)[1])
    assert len(set(errors)) == 1, errors
    out = overlap_gemm.gemm_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=group)
    assert torch.equal(out, torch.full((2, 4), 3.0 * size))


@pytest.mark.parametrize(
    "what", ["rows", "width", "dtype", "bias", "op", "backend", "deterministic", "dim", "configured"]
)
@pytest.mark.parametrize("op", EVERY)
def test_every_rank_learns_what_they_disagree_on(ranks, op, what):
    if what == "dim" and op not in DEALT_ROWS:
        what = "rows"
    for backend in ("sequential", "decomposed", "auto"):
        ranks(3).run(disagree, op, what, backend)


def joins_another_total(rank, size):
    """Joins 2 rows of 4, and 1 of 3: without the comparison a row of no rank is in the result."""
    group = find(dist.new_group()).name
    with pytest.raises(DisagreementError, match="total"):
        shard_ops.join_shards(torch.ones(2 - rank, 3), 0, 4 - rank, group)


def test_ranks_that_join_shards_of_another_total_are_told(ranks):
    ranks(2).run(joins_another_total)


@pytest.mark.parametrize(
    ("op", "what"),
    [
        ("gemm_all_reduce", "algorithm"),
        ("gemm_reduce_scatter", "algorithm"),
        ("gemm_all_gather", "transport"),
        ("all_gather_gemm", "shards"),
        ("gemm_reduce_scatter", "tiles"),
    ],
)
def test_every_rank_learns_that_kernels_are_asked_for_otherwise(ranks, op, what):
    ranks(3).run(disagree, op, what, "sequential")


def drawn_settings(rank, size, seed):
    """A random sequence of calls under settings of which some differ: an error exactly where an op looks."""
    draw, mine = random.Random(seed), random.Random(f"{seed} {rank}")
    choices = {
        "algorithm": [None, "one_shot", "two_shot"],
        "shard_transport": [None, "copy_engine", "peer_bulk"],
        "tile_transport": [None, "peer_bulk", "ll"],
        "reserve_sms": [None, 1, 2],
    }
    raised = 0
    for _ in range(60):
        op, rows = draw.choice(list(EVERY)), draw.randrange(1, 9)
        asked = {name: draw.choice(values) for name, values in choices.items()}
        if draw.random() < 0.5:  # a rank's own
            name = draw.choice(list(choices))
            asked[name] = mine.choice(choices[name])
        with overlap_gemm.configured(**asked):
            everyone = [None] * size
            dist.all_gather_object(everyone, settings().agreed(OPS[op]))
            try:
                x, weight = torch.ones(rows, 3), torch.ones(5, 3 * size if OPS[op].reshards_k else 3)
                getattr(overlap_gemm, op)(x, weight, backend="sequential")
                failed = False
            except DisagreementError as error:
                assert "configured" in str(error)
                failed = True
        assert failed == (len(set(everyone)) > 1), (op, everyone)
        raised += failed
    assert raised


@pytest.mark.parametrize("seed", range(3))
def test_settings_that_differ_are_told_where_they_count(ranks, seed):
    ranks(3).run(drawn_settings, seed)


def drawn_calls(rank, size, backend, seed):
    """Calls that every rank has made before, in which now and then one rank makes another than the others.

    Without a word between the ranks these are garbage (a message is taken for another) or SIGABRT (gloo,
    where it is longer than what is awaited).
    """
    draw, wrong = random.Random(seed), 0
    kinds = [
        (op, rows, dtype, dim)
        for op in EVERY
        for rows, dtype in ((4, torch.float32), (8, torch.float32), (4, torch.bfloat16), (4, torch.float64))
        for dim in (0, 1)
        if dim == 0 or op in DEALT_ROWS
    ]

    def call(kind, seed):
        op, rows, dtype, dim = kind
        case = Case(op, rows * 2 * size, 20, 4 * size, dtype, bias=False, seed=seed)
        given, operands = parts(case, rank, size)
        x, weight, _ = operands
        options = {**OPS[op].arguments(case.m, case.n, case.k, least=True), "backend": backend}
        if dim == 1:  # [2, rows / 2 of them, K], of which the second is sharded
            x, options = x.view(2, -1, x.shape[-1]), {"backend": backend, "dim": 1}
            options |= {"rows": "equal"} if OPS[op].x == "m" else {}
        out = getattr(overlap_gemm, op)(x, weight, **options)
        if dim == 0:
            exact, largest = (
                LAYOUTS[op].part(a @ b.t(), LAYOUTS[op].out, rank, size)
                for a, b in (
                    (given.x.double(), given.weight.double()),
                    (given.x.double().abs(), given.weight.double().abs()),
                )
            )
            assert ((out - exact).abs() <= 2 * size * torch.finfo(dtype).eps * largest).all()

    for kind in kinds:
        call(kind, 0)
    for number in range(40):
        kind = other = draw.choice(kinds)
        odd = draw.randrange(size)
        if draw.random() < 0.4:
            other = draw.choice(kinds)
        if kind == other:
            call(kind, number)
            continue
        wrong += 1
        with pytest.raises(DisagreementError, match="the ranks of the group disagree on") as error:
            call(other if rank == odd else kind, number)
        told = [None] * size
        dist.all_gather_object(told, str(error.value).partition(":")[2])
        assert len(set(told)) == 1 and f"rank {odd} has" in told[0]
    assert wrong


@pytest.mark.parametrize(("seed", "backend"), in_turn(range(3), ["sequential", "decomposed", "torch"]))
def test_calls_that_ranks_know_and_mix_up_are_named_on_every_rank(ranks, backend, seed):
    ranks(2 if seed == 0 else 3).run(drawn_calls, backend, seed)


def unequal_in_a_graph(rank, size):
    """Shards of other lengths, without `rows`, where a graph takes equal ones for granted."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: overlap_gemm.all_gather_gemm(x, w), fullgraph=True, backend="aot_eager"
    )
    weight = torch.ones(4, 3)
    torch.testing.assert_close(compiled(torch.ones(2, 3), weight), torch.full((2 * size, 4), 3.0))
    with pytest.raises(RuntimeError, match=r"all_gather_gemm: the ranks of the group disagree on rows"):
        compiled(torch.ones(1 if rank == size - 1 else 5, 3), weight)
    torch.testing.assert_close(compiled(torch.ones(2, 3), weight), torch.full((2 * size, 4), 3.0))


def test_unequal_shards_in_a_graph_raise(ranks):
    ranks(3).run(unequal_in_a_graph)


def asked_once(rank, size):
    """What has been agreed on is not asked again, lengths only where callers want it."""
    for op, backend, options, messages in (
        ("gemm_reduce_scatter", "torch", {}, 1),  # in front of each transfer
        ("gemm_all_reduce", "torch", {}, 1),
        ("all_gather_gemm", "torch", {}, 1),
        ("gemm_all_gather", "torch", {}, 1),
        ("all_gather_gemm", "torch", {"rows": "exchange"}, 2),
        ("gemm_all_gather", "torch", {"columns": "exchange"}, 2),
        ("gemm_all_reduce", "sequential", {}, 2),
        ("all_gather_gemm", "sequential", {}, 1),
        ("gemm_all_reduce", "decomposed", {}, 1),
    ):
        call = partial(getattr(overlap_gemm, op), backend=backend, **options)
        call(torch.ones(4, 3), torch.ones(5, 3))
        # A rank whose operands lie otherwise prepares anew, but alone: it must not ask the others.
        x = torch.ones(3, 4).t() if rank == 0 else torch.ones(4, 3)
        sent, real = [], agree.exchange
        with mock.patch.object(agree, "exchange", lambda *given: sent.append(1) or real(*given)):  # noqa: B023
            call(x, torch.ones(5, 3))
            with Watch() if rank == 1 else contextlib.nullcontext():
                call(x, torch.ones(5, 3))
        assert len(sent) == 2 * messages, op
    ask = partial(overlap_gemm.all_gather_gemm, rows="exchange")  # a peer's may change while ours does not
    ask(torch.ones(2 if rank < size - 1 else 1, 3), torch.ones(5, 3))
    assert ask(torch.ones(2, 3), torch.ones(5, 3)).shape == (2 * size, 5)


def test_what_is_agreed_is_not_asked_again(ranks):
    ranks(3).run(asked_once)
