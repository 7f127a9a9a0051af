"""What each rank's process does in tests with a device per rank: many calls queued at once, graphs replayed.

`Ranks` runs these functions on every rank, and loads this file by its path: so it imports by full names.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import overlap_gemm
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import poisoned_allocations
from overlap_gemm.tuning.settings import configured
from tests.support.shares import assert_right, parts

SLEEP_CYCLES = 10_000_000
"""How far a rank falls behind."""


def call(case: Case, operands: Sequence[Tensor | None], backend: str = "fused") -> Tensor:
    """One call of this rank, told those lengths of the whole that its operands do not tell."""
    lengths = OPS[case.op].arguments(case.m, case.n, case.k, least=True)
    x, weight, bias = operands
    out: Tensor = getattr(overlap_gemm, case.op)(x, weight, bias=bias, backend=backend, **lengths)
    return out


def sequence(
    rank: int,
    size: int,
    cases: Sequence[Case],
    ways: Sequence[dict[str, Any]],
    late: int | None = None,
    backend: str = "fused",
) -> None:
    """Queues the calls, with rank `late` after the others now and then, and judges them all.

    Args:
        rank: This one.
        size: Ranks.
        cases: A call each, on data of its own.
        ways: What `configured` is given for the calls, in turn.
        late: A rank, or None.
        backend: What carries them out.
    """
    queued = []
    with poisoned_allocations():
        for number, (case, way) in enumerate(zip(cases, cycle(ways), strict=False)):
            given, operands = parts(case, rank, size)
            if rank == late and number % 3 == 0 and given.x.is_cuda:
                torch.cuda._sleep(SLEEP_CYCLES)
            with configured(**way):
                queued.append((case, given, call(case, operands, backend)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for case, given, out in queued:
        assert_right(case, given, out)
    overlap_gemm.close_workspaces()


def replays(rank: int, size: int, cases: Sequence[Case], ways: Sequence[dict[str, Any]], count: int) -> None:
    """A graph of several calls, replayed `count` times on changing data; arguments as `sequence`'s.

    An odd number of calls on a workspace changes its parity from replay to replay.
    """
    given = [parts(case, rank, size)[1] for case in cases]

    def all_calls() -> list[Tensor]:
        outs = []
        for case, operands, way in zip(cases, given, cycle(ways), strict=False):
            with configured(**way):
                outs.append(call(case, operands))
        return outs

    all_calls()  # compiles and allocates
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = all_calls()
    for launch in range(count):
        fresh = [case.with_seed(100 * launch + number) for number, case in enumerate(cases)]
        wholes = []
        for case, operands in zip(fresh, given, strict=True):
            whole, values = parts(case, rank, size)
            wholes.append(whole)
            for old, new in zip(operands, values, strict=True):
                if old is not None and new is not None:
                    old.copy_(new)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for case, whole, out in zip(fresh, wholes, outs, strict=True):
            assert_right(case, whole, out)
    overlap_gemm.close_workspaces()
