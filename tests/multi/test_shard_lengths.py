"""Lengths of the others' shards, equal, said, or asked for; and what ranks learn where they differ."""

import re
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.dispatch import lowering
from overlap_gemm.runtime import agree
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.group import find
from tests.support.chosen import in_turn

BACKENDS = ("sequential", "decomposed", "torch")
E4M3 = torch.float8_e4m3fn


def check_in_step(rank, size):
    out = overlap_gemm.all_gather_gemm(torch.full((2, 3), float(rank)), torch.ones(4, 3))
    assert torch.equal(out, 3.0 * torch.arange(size).repeat_interleave(2).view(-1, 1).expand(-1, 4))


def same_on_all(error, size):
    told = [None] * size
    dist.all_gather_object(told, str(error.value).partition(":")[2])
    assert len(set(told)) == 1, told


def with_length(op, length, kind):
    """A call whose shard is that long, of zeros: of rows, or of columns."""
    x, weight, options = torch.zeros(2, 8), torch.zeros(length, 8), {}
    if op == "all_gather_gemm":
        x, weight = torch.zeros(length, 8), torch.zeros(2, 8)
    if kind == "float8":
        x, weight, one = x.to(E4M3), weight.to(E4M3), torch.ones(())
        options = {"scale_x": one, "scale_w": one}
    if kind == "batch" and op == "all_gather_gemm":
        x, options = x.repeat(3, 1, 1), {"dim": 1}
    return partial(getattr(overlap_gemm, op), x, weight, **options)


WATCHED = {
    "profiled": torch.autograd.profiler.profile,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}
"""What has calls go through torch's dispatcher."""


def unequal(rank, size, op, what, kind, checking):
    many, few = [4096] + [16] * (size - 1), [3] * (size - 1) + [2]
    expected = re.escape(f"the ranks hold {many} {what}; without {what}= all must hold as many. Pass {what}=")
    for backend in BACKENDS:
        with mock.patch.object(agree, "_checking", checking), WATCHED.get(kind, nullcontext)():
            call = with_length(op, many[rank], kind)
            for _ in range(2):  # what was refused is not known
                with pytest.raises(ValueError, match=expected + r"\d+, split as by torch.chunk: ") as error:
                    call(backend=backend)
                same_on_all(error, size)
            call = with_length(op, few[rank], kind)
            with pytest.raises(ValueError, match=f"Pass {what}={sum(few)}; or {what}='exchange'"):
                call(backend=backend)
            for length in (sum(few), "exchange"):
                assert sum(few) in call(backend=backend, **{what: length}).shape
        check_in_step(rank, size)


EXTENTS = [("all_gather_gemm", "rows"), ("gemm_all_gather", "columns")]


@pytest.mark.parametrize(
    ("kind", "op", "what", "checking"),
    in_turn(
        [(kind, *one) for kind in ("plain", "batch", "float8", "profiled", "autocast") for one in EXTENTS],
        [False, True],
    ),
)
def test_4096_next_to_16(ranks, op, what, kind, checking):
    ranks(2).run(unequal, op, what, kind, checking)


def test_of_three_ranks_too(ranks):
    ranks(3).run(unequal, "all_gather_gemm", "rows", "plain", False)


def changes(rank, size, op, what, backend, kind, known):
    """Rank 1 calls with another length than before, which the others do not expect."""
    if known:
        with_length(op, 6, kind)(backend=backend)
    call = with_length(op, 4, kind)
    for _ in range(49):
        call(backend=backend)
    if rank == 1:
        call = with_length(op, 6, kind)
    unit = 3 if kind == "batch" and op == "all_gather_gemm" else 1
    found = rf"disagree on {what}: .*rank 1 has {6 * size * unit}"
    with pytest.raises(DisagreementError, match=found) as error:
        call(backend=backend)
    assert f"rank 0{' 2' * (size == 3)} has {4 * size * unit}" in str(error.value)
    same_on_all(error, size)
    check_in_step(rank, size)


@pytest.mark.parametrize(
    ("kind", "op", "what", "backend", "known"),
    in_turn(
        [(kind, *one) for kind in ("plain", "batch", "float8") for one in EXTENTS],
        ["sequential", "decomposed"],
        [False, True],
    ),
)
def test_a_rank_that_changes_its_rows_at_call_50(ranks, op, what, backend, kind, known):
    ranks(3 if known else 2).run(changes, op, what, backend, kind, known)


def otherwise(rank, size, said, checking):
    """Ranks that say it in different ways do not wait for each other."""
    for number, backend in enumerate(BACKENDS):
        x, weight = torch.ones(4, 5 + number), torch.ones(4, 5 + number)
        options = {"rows": said} if rank == 1 else {}
        words = r"disagree on how the lengths of shards are determined: .*rank 0 2 has no rows=, compared"
        with (
            mock.patch.object(agree, "_checking", checking),
            pytest.raises(DisagreementError, match=words) as error,
        ):
            overlap_gemm.all_gather_gemm(x, weight, backend=backend, **options)
        same_on_all(error, size)
        check_in_step(rank, size)


@pytest.mark.parametrize(("said", "checking"), in_turn([12, "equal", "exchange"], [False, True]))
def test_one_rank_says_its_rows(ranks, said, checking):
    ranks(3).run(otherwise, said, checking)


def empty(rank, size, backend):
    whole, weight = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)), torch.ones(4, 3)
    own = whole[rank : rank + 1]
    for rows in (2, "exchange"):
        out = overlap_gemm.all_gather_gemm(own, weight, rows=rows, backend=backend)
        torch.testing.assert_close(out, whole @ weight.t())
        out = overlap_gemm.gemm_all_gather(weight, own, columns=rows, backend=backend)
        torch.testing.assert_close(out, weight @ whole.t())
    with pytest.raises(ValueError, match=r"hold \[1, 1, 0\] rows; without rows= .* Pass rows=2; or"):
        overlap_gemm.all_gather_gemm(own, weight, backend=backend)
    nothing = overlap_gemm.all_gather_gemm(own[:0], weight, backend=backend)  # on all of them: as many
    assert nothing.shape == (0, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_shard(ranks, backend):
    ranks(3).run(empty, backend)


def in_a_graph(rank, size):
    torch._dynamo.reset()
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    call = partial(overlap_gemm.all_gather_gemm, rows="exchange")
    named = r"all_gather_gemm: rows='exchange' communicates with the other ranks in every call, which a graph"
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=named):
        torch.compile(lambda x, w: call(x, w), fullgraph=True, backend="aot_eager")(x, weight)
    call(x, weight)  # what is kept of it does not serve a capture
    with (
        mock.patch.object(lowering, "is_capturing", lambda device: True),
        mock.patch("overlap_gemm.dispatch.bound.is_capturing", lambda device: True),
    ):
        find(None).calls.clear()  # of a GPU's calls the key says that they are captured
        with pytest.raises(ValueError, match=named):
            call(x, weight)
    check_in_step(rank, size)


def test_no_exchange_in_a_graph(ranks):
    ranks(2).run(in_a_graph)


def captured_without_a_total(rank, size):
    """Calls that are known with uneven shards only: in a graph no number of rows would mean equal ones."""
    weight, x = torch.ones(4, 3), torch.ones(4 - rank, 3)
    ranks, call = find(None), partial(overlap_gemm.all_gather_gemm, weight=weight)
    for rows in (7, "exchange"):
        ranks.agreed.clear()
        call(x, rows=rows)
        with captured(ranks), pytest.raises(ValueError, match="no rows= means equal shards, but this rank's"):
            call(x)
    with captured(ranks):
        assert len(call(torch.ones(6, 3))) == 12
    assert len(call(torch.ones(4, 3))) == 8  # compared: equal
    with captured(ranks):
        assert len(call(torch.ones(4, 3))) == 8


@contextmanager
def captured(ranks):
    """Takes calls without a number of rows for captured ones."""
    ranks.calls.clear()
    with mock.patch.object(lowering, "is_capturing", lambda device: True):
        yield
    ranks.calls.clear()


def test_uneven_shards_without_a_total_are_refused_in_a_capture(ranks):
    ranks(2).run(captured_without_a_total)


def explained(rank, size):
    """By one rank alone: nobody is asked."""
    if rank == 0:
        for length in (None, "exchange"):
            choice = overlap_gemm.explain("all_gather_gemm", torch.ones(2, 3), torch.ones(4, 3), rows=length)
            assert choice.problem.m == 2 * size


def test_explain_asks_nobody(ranks):
    ranks(2).run(explained)
