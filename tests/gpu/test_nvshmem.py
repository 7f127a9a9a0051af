"""GEMM reduce-scatter by NVSHMEM puts to peers within reach: over NVLink, with a GPU per rank.

The GEMM stages its tiles, the relay kernel puts them (`put_signal`), and the flags that NVSHMEM raises are
what receivers wait for. NVSHMEM's memory is used; its device code must be one that CuTe DSL links.
"""

import importlib.util
import os
from contextlib import suppress
from itertools import cycle, islice

import pytest
import torch

import overlap_gemm
from overlap_gemm.device.failure import Op, Role
from overlap_gemm.runtime.symmetric import why_no_puts
from overlap_gemm.runtime.workspace import CommTimeoutError, raise_if_failed
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import poisoned_allocations
from overlap_gemm.testing.ranks import Ranks
from overlap_gemm.testing.shares import assert_right, parts
from overlap_gemm.tuning.settings import configured


def why_not():
    """Why there are no puts here; None if there are."""
    if importlib.util.find_spec("nvshmem") is None:
        return "nvshmem4py is not installed"
    return why_no_puts()


WORLDS = [size for size in (2, 4) if size <= torch.cuda.device_count()]
pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.parametrize("world", WORLDS),
]

SHAPES = {
    "even": (1024, 512, 512),
    "ragged": (200, 136, 72),
    "fewer-rows-than-ranks": (1, 64, 64),
    "many-tiles": (4096, 4096, 2048),
}
PUTS = {"transport": "nvshmem"}
SMALL = {"mma": "pingpong", "tile": (64, 128)}
"""One kernel for most of what follows, and so one compilation."""


def cases(*shapes, count, bias=True):
    """`count` cases of these shapes in turn, each with data of its own."""
    turns = enumerate(islice(cycle(shapes), count))
    return [Case("gemm_reduce_scatter", *shape, torch.bfloat16, bias, seed) for seed, shape in turns]


# --- what each rank does ---


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def call(x, weight, bias, backend="fused"):
    return overlap_gemm.gemm_reduce_scatter(x, weight, bias=bias, backend=backend)


def sequence(rank, size, cases, ways, late=None, backend="fused"):
    """Queues the calls, by these ways in turn, with rank `late` behind now and then, and judges them all."""
    os.environ["OVERLAP_GEMM_SYMMETRIC"] = "nvshmem"
    queued = []
    with poisoned_allocations():
        for number, (case, way) in enumerate(zip(cases, cycle(ways), strict=False)):
            given, tensors = parts(case, rank, size)
            if rank == late and number % 3 == 0 and given.x.is_cuda:
                torch.cuda._sleep(10_000_000)
            with configured(**way):
                queued.append((case, given, call(*tensors, backend)))
    synchronize()
    for case, given, out in queued:
        assert_right(case, given, out)
    overlap_gemm.close_workspaces()
    del os.environ["OVERLAP_GEMM_SYMMETRIC"]


def replays(rank, size, cases, way, count):
    """A graph of several calls, replayed on changing data."""
    os.environ["OVERLAP_GEMM_SYMMETRIC"] = "nvshmem"
    given = [parts(case, rank, size)[1] for case in cases]
    with configured(**way):
        for tensors in given:
            call(*tensors)  # compiles and allocates
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = [call(*tensors) for tensors in given]
    for launch in range(count):
        fresh = [case.with_seed(100 * launch + case.seed) for case in cases]
        wholes = []
        for case, tensors in zip(fresh, given, strict=True):
            whole, values = parts(case, rank, size)
            wholes.append(whole)
            for tensor, value in zip(tensors, values, strict=True):
                if tensor is not None:
                    tensor.copy_(value)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for case, whole, out in zip(fresh, wholes, outs, strict=True):
            assert_right(case, whole, out)
    overlap_gemm.close_workspaces()
    del os.environ["OVERLAP_GEMM_SYMMETRIC"]


kept = []


def call_without(rank, size, missing):
    """All call once, then all but one; what they report. It costs the processes their CUDA contexts."""
    os.environ.update(OVERLAP_GEMM_SYMMETRIC="nvshmem", OVERLAP_GEMM_TIMEOUT="2")
    given, tensors = parts(*cases(SHAPES["ragged"], count=1), rank, size)
    with configured(**PUTS, **SMALL):
        out = call(*tensors)
        torch.cuda.synchronize()
        kept.extend((given, tensors, out))
        if rank == missing:
            return None
        kept.append(call(*tensors))
    with suppress(RuntimeError):  # the kernel's trap
        torch.cuda.synchronize()
    try:
        raise_if_failed()
    except CommTimeoutError as error:
        return str(error), error.failure
    return "nothing was reported", None


def refusals(rank, size):
    """What is refused by name, before anything is allocated."""
    _, (x, weight, bias) = parts(*cases(SHAPES["even"], count=1), rank, size)
    with configured(**PUTS):
        with pytest.raises(RuntimeError, match="OVERLAP_GEMM_SYMMETRIC=nvshmem"):
            call(x, weight, bias)
        with pytest.raises(ValueError, match="only for gemm_reduce_scatter"):
            overlap_gemm.gemm_all_reduce(x, weight, backend="fused")
    assert not overlap_gemm.workspace_bytes()


# --- the tests ---


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(ranks, shape, world):
    way = PUTS if shape == "many-tiles" else {**PUTS, **SMALL}
    ranks(world).run(sequence, cases(SHAPES[shape], count=5), [way])


@pytest.mark.parametrize("late", [0, 1])
def test_fifty_launches_with_a_lagging_rank(ranks, late, world):
    ranks(world).run(sequence, cases((520, 264, 200), count=50), [{**PUTS, **SMALL}], late)


@pytest.mark.parametrize("late", [None, 1])
def test_sequences_of_shapes_and_of_puts_and_stores(ranks, late, world):
    shapes = [(1, 64, 64), (2048, 256, 200), (200, 136, 72), (130, 264, 64), (768, 64, 136)]
    ways = [{**PUTS, **SMALL}, SMALL, {**PUTS, **SMALL}]
    ranks(world).run(sequence, cases(*shapes, count=40), ways, late)


def test_graph_replays(ranks, world):
    three = cases((520, 264, 200), (200, 136, 72), (1024, 256, 128), count=3, bias=False)
    ranks(world).run(replays, three, {**PUTS, **SMALL}, 20)


def test_refusals(ranks, world):
    ranks(world).run(refusals)


def test_a_dead_pe_is_named(world):
    missing = world - 1
    with Ranks(world, device="cuda", timeout=20) as throwaway:
        found = throwaway.run(call_without, missing)
    assert found.pop(missing) is None
    for text, failure in found:
        assert failure is not None, text
        assert (failure.op, failure.source) == (Op.GEMM_REDUCE_SCATTER, missing), text
        assert failure.role in (Role.RECEIVE_PARTIAL, Role.CALL_ENTERED)
        assert (failure.expected, failure.seen) == (2, 1)
        assert f"Rank {missing} is dead, stalled" in text
