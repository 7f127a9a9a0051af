"""Ranks that call different things: the same named error on every one, and the group stays in step."""

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.backends.base import OPS

X, WEIGHT = (8, 6), (10, 6)


def called(rank, op, what):
    """What a rank calls: rank 1 something else than the others, in `what`."""
    x, weight, dtype, options = X, WEIGHT, torch.float32, {}
    if rank == 1:
        if what == "rows":
            x = (12, 6)
        elif what == "width":
            x, weight = ((8, 7), (10, 7)) if op in ("all_gather_gemm", "gemm_all_gather") else (X, (11, 6))
        elif what == "dtype":
            dtype = torch.bfloat16
        elif what == "bias":
            options["bias"] = torch.ones(weight[0])
        elif what == "op":
            op = OPS[(OPS.index(op) + 1) % len(OPS)]
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


NAMES = {"rows": "rows|the ranks hold", "width": "features"}


def disagree(rank, size, op, what, backend):
    name, x, weight, options = called(rank, op, what)
    errors = [None] * size
    fields = {"tile": (128, 64 if rank == 1 else 128)} if what == "configured" else {}
    with (
        pytest.raises((RuntimeError, ValueError), match=NAMES.get(what, what)) as error,
        overlap_gemm.configured(reserve_sms=rank, **fields),  # the first may differ
    ):
        getattr(overlap_gemm, name)(x, weight, **{"backend": backend, **options})
    dist.all_gather_object(errors, str(error.value).split(": ", 1)[1])
    assert len(set(errors)) == 1, errors
    out = overlap_gemm.gemm_all_reduce(torch.ones(2, 3), torch.ones(4, 3))
    assert torch.equal(out, torch.full((2, 4), 3.0 * size))


@pytest.mark.parametrize(
    "what", ["rows", "width", "dtype", "bias", "op", "backend", "deterministic", "dim", "configured"]
)
@pytest.mark.parametrize("op", OPS)
def test_every_rank_learns_what_they_disagree_on(ranks, op, what):
    if what == "dim" and op not in ("all_gather_gemm", "gemm_reduce_scatter"):
        what = "rows"
    for backend in ("sequential", "decomposed"):
        ranks(3).run(disagree, op, what, backend)


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
    """What has been agreed on is not asked again; lengths are: a peer's may change while ours does not."""
    for op, messages in (("gemm_reduce_scatter", 0), ("gemm_all_reduce", 0), ("all_gather_gemm", size - 1)):
        call = getattr(overlap_gemm, op)
        call(torch.ones(4, 3), torch.ones(5, 3))
        # A rank whose operands lie otherwise prepares anew, but alone: it must not ask the others.
        x = torch.ones(3, 4).t() if rank == 0 else torch.ones(4, 3)
        sent, real = [], dist.isend
        dist.isend = lambda *a, **k: sent.append(1) or real(*a, **k)  # noqa: B023
        try:
            call(x, torch.ones(5, 3))
        finally:
            dist.isend = real
        assert len(sent) == messages, op
    overlap_gemm.all_gather_gemm(torch.ones(2 if rank < size - 1 else 1, 3), torch.ones(5, 3))
    out = overlap_gemm.all_gather_gemm(torch.ones(2, 3), torch.ones(5, 3))
    assert out.shape == (2 * size, 5)


def test_what_is_agreed_is_not_asked_again(ranks):
    ranks(3).run(asked_once)
