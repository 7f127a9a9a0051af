"""Programs of calls, one for each rank, that need not be the same: what runs of them may come to.

Whatever ranks do, a run ends in right results or in an error by name; and what a rank's call has finished
before that is right.
"""

from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator, EmulatorError
from overlap_gemm.backends import gather, plans
from overlap_gemm.kernels.geometry import EPOCH_OFFSET
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.runtime.workspace import (
    CommTimeoutError,
    MismatchedCallsError,
    OverlappingCallsError,
    workspaces,
)
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from overlap_gemm.testing.emulated import poisoned_allocations
from overlap_gemm.tuning.settings import configured

NAMED = (CommTimeoutError, MismatchedCallsError, OverlappingCallsError)


class Call(NamedTuple):
    """A call that the ranks make."""

    case: Case
    settings: tuple[tuple[str, object], ...] = ()


class Step(NamedTuple):
    """What a rank does: makes a call, raises before its launch, or does not come to it."""

    call: int
    how: str = "call"
    settings: tuple[tuple[str, object], ...] = ()
    stream: int = 0


class Outcome(NamedTuple):
    """Of a run.

    Attributes:
        error: what it raised, None for nothing.
        wrong: results that were finished and are not right: (rank, call, largest error).
        finished: how many were.
    """

    error: Exception | None
    wrong: list[tuple[int, int, float]]
    finished: int


def reference(case, rank, ranks):
    """(exact result of a rank, what its error may be)."""
    given, layout = operands(case), LAYOUTS[case.op]
    exact, size = (
        given.x.double() @ given.weight.double().t(),
        given.x.double().abs() @ given.weight.double().abs().t(),
    )
    if given.bias is not None:
        exact = exact + given.bias.double()
    mine = [layout.part(whole, layout.out, rank, ranks) for whole in (exact, size)]
    return mine[0], mine[1] * ranks * 2.0**-8 + mine[0].abs() * 2.0**-7 + 1e-3


class Programs:
    """Runs ranks' programs.

    Args:
        arch: of the kernels.
        calls: what they may make.
        programs: a list of steps for each rank.
        dead: a rank whose kernels never begin, or None.
        **options: of the emulator.
    """

    def __init__(self, arch, calls, programs, *, fields, dead=None, **options):
        self.arch, self.calls, self.programs = arch, calls, programs
        self.fields, self.dead, self.options = fields, dead, options

    def run(self) -> Outcome:
        """Queues all ranks' steps, runs them together, looks at what is finished."""
        ranks, error, made = len(self.programs), None, []
        given = [operands(call.case) for call in self.calls]
        with ExitStack() as stack:
            stack.enter_context(configured(**self.fields))
            emulator = stack.enter_context(Emulator(self.arch, ranks, **self.options))
            world = stack.enter_context(VirtualWorld(ranks, emulator=emulator))
            stack.enter_context(poisoned_allocations())
            for rank, program in enumerate(self.programs):
                made += self._make(world, rank, program, given)
            if self.dead is not None:
                emulator.faults.kill(self.dead)
            try:
                world.synchronize()
            except NAMED as failure:
                error = failure
            except EmulatorError as failure:
                error = failure
            epochs = {
                (held.group.rank, held.memory.local.data_ptr()): held.memory.local[EPOCH_OFFSET:][:8]
                .view(torch.int64)
                .item()
                for held in workspaces()
            }
            wrong, finished, counted = [], 0, {}
            for rank, call, out, place in made:
                counted[rank, place] = counted.get((rank, place), 0) + 1
                if counted[rank, place] <= epochs[rank, place]:
                    exact, bound = reference(self.calls[call].case, rank, ranks)
                    off, finished = (out.double() - exact).abs(), finished + 1
                    if not (off <= bound).all():
                        wrong.append((rank, call, off.max().item()))
        return Outcome(error, wrong, finished)

    def _make(self, world, rank, program, given):
        """(rank, call, result, workspace) of each call that the rank launches."""
        made, ranks = [], len(self.programs)
        for step in program:
            case, layout = self.calls[step.call].case, LAYOUTS[self.calls[step.call].case.op]
            if step.how == "never":
                continue
            world.executor(rank).streams.handle = step.stream
            x = layout.part(given[step.call].x, layout.x, rank, ranks)
            weight = layout.part(given[step.call].weight, layout.weight, rank, ranks)
            bias = layout.part(given[step.call].bias, layout.bias, rank, ranks)
            extents = {"gemm_all_gather": {"columns": case.n}, "all_gather_gemm": {"rows": case.m}}.get(
                case.op, {}
            )
            how = {"backend": "fused", "deterministic": False, "group": world.names[rank], **extents}
            with (
                configured(**dict(self.calls[step.call].settings), **dict(step.settings)),
                launches(step.how == "skip") as places,
            ):
                try:
                    out = getattr(overlap_gemm, case.op)(x, weight, bias=bias, **how)
                except MemoryError:
                    assert step.how == "skip"
                    continue
            made.append((rank, step.call, out, places[0]))
        return made


class launches:  # noqa: N801
    """In the block each launch notes its workspace, or raises before it is made."""

    def __init__(self, fails):
        self.fails, self.places, self.patch = fails, [], pytest.MonkeyPatch()

    def __enter__(self):
        for kind in (plans.Plan, gather.GatherPlan):
            self.patch.setattr(kind, "launch", self._noting(kind.launch))
        return self.places

    def _noting(self, launch):
        def noted(plan, *given):
            if self.fails:
                raise MemoryError("no room for the output")
            self.places.append(plan.workspace.memory.local.data_ptr())
            return launch(plan, *given)

        return noted

    def __exit__(self, *_):
        self.patch.undo()


__all__ = ["NAMED", "Call", "Outcome", "Programs", "Step"]
