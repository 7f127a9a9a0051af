"""The fused ops by NVSHMEM puts to peers within reach: over NVLink, with a GPU per rank.

The GEMM stages what it sends, the relay kernel puts it (`put_signal`), and the flags that NVSHMEM raises are
what receivers wait for. NVSHMEM's memory is used; its device code must be one that CuTe DSL links. Linking
the relay takes each process some seconds, once: it serves every op and shape.
"""

import importlib.util
import os
import random
from contextlib import contextmanager, suppress
from itertools import cycle, islice

import pytest
import torch

import overlap_gemm
from overlap_gemm.device.failure import Role
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.runtime.memory.symmetric import why_no_puts
from overlap_gemm.runtime.memory.workspace import raise_if_failed
from overlap_gemm.spec import op_coded
from overlap_gemm.testing.cases import Case
from overlap_gemm.tuning.settings import configured
from tests.support import launches
from tests.support.ranks import Ranks
from tests.support.shares import parts


def why_not():
    """Why there are no puts here; None if there are."""
    if importlib.util.find_spec("nvshmem") is None:
        return "nvshmem4py is not installed"
    return why_no_puts()


WORLDS = [size for size in (2, 4) if size <= torch.cuda.device_count()]
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
worlds = pytest.mark.parametrize("world", WORLDS)

OPS = {
    "reduce-scatter": ("gemm_reduce_scatter", {}),
    "one-shot": ("gemm_all_reduce", {"algorithm": "one_shot"}),
    "two-shot": ("gemm_all_reduce", {"algorithm": "two_shot"}),
    "output-gather": ("gemm_all_gather", {}),
    "all-gather": ("all_gather_gemm", {}),
}
ops = pytest.mark.parametrize("op", OPS)
SHAPES = [(1024, 512, 512), (200, 128, 72), (1, 64, 64), (4096, 4096, 2048)]
"""Even; ragged; fewer rows than ranks; many tiles."""
PUTS = {"transport": "nvshmem"}
SMALL = {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)}
"""One kernel of each op for all that follows, and so one compilation."""


def way(op, *more):
    """What `configured` is given for puts of an op."""
    return {key: value for fields in (SMALL, OPS[op][1], *more) for key, value in fields.items()}


def cases(op, *shapes, count, bias=True):
    """`count` cases of these shapes in turn, each with data of its own."""
    turns = enumerate(islice(cycle(shapes), count))
    return [Case(OPS[op][0], *shape, torch.bfloat16, bias, seed) for seed, shape in turns]


def random_calls(seed, size, count=30):
    """(cases, ways): calls of any op and shape, two of three by puts, the others by stores."""
    draw = random.Random(seed)
    rows, drawn = [1, 2, size - 1, size, 64, 130, 256 * size, 2048], []
    for number in range(count):
        op = draw.choice(list(OPS))
        shape = (draw.choice(rows), draw.choice([8, 64, 512]) * size, draw.choice([64, 200]))
        drawn += zip(cases(op, shape, count=1), [way(op, PUTS if number % 3 else {})], strict=True)
    return [case.with_seed(i) for i, (case, _) in enumerate(drawn)], [way for _, way in drawn]


# --- what each rank does ---


@contextmanager
def memory_of_nvshmem():
    """Workspaces made within are."""
    os.environ["OVERLAP_GEMM_SYMMETRIC"] = "nvshmem"
    yield
    del os.environ["OVERLAP_GEMM_SYMMETRIC"]


def sequence(rank, size, *arguments):
    with memory_of_nvshmem():
        launches.sequence(rank, size, *arguments)


def replays(rank, size, *arguments):
    with memory_of_nvshmem():
        launches.replays(rank, size, *arguments)


kept = []


def call_without(rank, size, case, fields, missing):
    """All call once, then all but one; what they report. It costs the processes their CUDA contexts."""
    os.environ.update(OVERLAP_GEMM_SYMMETRIC="nvshmem", OVERLAP_GEMM_TIMEOUT="2")
    given, operands = parts(case, rank, size)
    with configured(**fields):
        out = launches.call(case, operands)
        torch.cuda.synchronize()
        kept.extend((given, operands, out))
        if rank == missing:
            return None
        kept.append(launches.call(case, operands))
    with suppress(RuntimeError):  # the kernel's trap
        torch.cuda.synchronize()
    try:
        raise_if_failed()
    except CommTimeoutError as error:
        return str(error), error.failure
    return "nothing was reported", None


def refusals(rank, size, cases):
    """Puts in memory that is not NVSHMEM's, before anything is allocated."""
    before = overlap_gemm.workspace_bytes()  # of the calls of other tests
    for case in cases:
        with configured(**PUTS), pytest.raises(RuntimeError, match="OVERLAP_GEMM_SYMMETRIC=nvshmem"):
            launches.call(case, parts(case, rank, size)[1])
    assert overlap_gemm.workspace_bytes() == before


# --- the tests ---


@worlds
@ops
def test_shapes(ranks, op, world):
    ranks(world).run(sequence, cases(op, *SHAPES, count=12), [way(op, PUTS)])


@worlds
@ops
def test_fifty_launches_with_a_lagging_rank(ranks, op, world):
    ranks(world).run(sequence, cases(op, (520, 256, 200), count=50), [way(op, PUTS)], 1)


@worlds
@pytest.mark.parametrize("late", [None, 0])
def test_sequences_of_ops_and_of_puts_and_stores(ranks, late, world):
    ranks(world).run(sequence, *random_calls(world, world), late)


@worlds
def test_graph_replays(ranks, world):
    """A graph of five calls: one of each."""
    five = [case for op in OPS for case in cases(op, (520, 256, 200), count=1, bias=False)]
    ranks(world).run(replays, five, [way(op, PUTS) for op in OPS], 10)


@worlds
def test_refusals(ranks, world):
    ranks(world).run(refusals, [case for op in OPS for case in cases(op, SHAPES[0], count=1)])


@pytest.mark.parametrize("world", WORLDS[-1:])
@ops
def test_a_dead_pe_is_named(op, world):
    missing, (case,) = world - 1, cases(op, (200, 128, 72), count=1)
    with Ranks(world, device="cuda", timeout=20) as throwaway:
        found = throwaway.run(call_without, case, way(op, PUTS), missing)
    assert found.pop(missing) is None
    for text, failure in found:
        assert failure is not None, text
        assert (op_coded(failure.op), failure.source) == (case.op, missing), text
        assert failure.role in (Role.RECEIVE_PARTIAL, Role.RECEIVE_RESULT, Role.LOAD_GATE, Role.CALL_ENTERED)
        assert (failure.expected, failure.seen) == (2, 1)
        assert f"Rank {missing} has exited, is stalled" in text
