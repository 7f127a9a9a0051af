"""Programs of calls, one for each rank, that need not be the same: what runs of them may come to.

Whatever ranks do, a run ends in right results or in an error by name; and what a rank's call has finished
before that is right.
"""

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator, EmulatorError
from cute_emulator.host.graphs import Capture
from overlap_gemm.backends.fused import gather_plans as gather
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.backends.fused.launch_plan import Plan
from overlap_gemm.exchange.geometry import (
    CONTROL_BYTES,
    ENTERED_OFFSET,
    EPOCH_OFFSET,
    NEXT_EPOCH_OFFSET,
    READ_OFFSET,
    RELAY_EPOCH_OFFSET,
)
from overlap_gemm.integrations.cute_emulator import SECOND_STREAM
from overlap_gemm.runtime.failures import CommTimeoutError, MismatchedCallsError, OverlappingCallsError
from overlap_gemm.runtime.group import find
from overlap_gemm.runtime.memory import workspace
from overlap_gemm.runtime.memory.virtual_ranks import VirtualRanks, VirtualSymmetric
from overlap_gemm.runtime.memory.workspace import workspaces
from overlap_gemm.runtime.peers import local_peers
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from overlap_gemm.testing.emulated import poisoned_allocations
from overlap_gemm.tuning.settings import configured

NAMED = (CommTimeoutError, MismatchedCallsError, OverlappingCallsError)
FIRST_GRAPH = 100
"""Handle of the stream that the first graph is captured on; those of programs are below."""


class Call(NamedTuple):
    """A call that ranks make.

    Attributes:
        case: of the group's ranks; calls of one kind differ in its seed, which is of x.
        settings: of all ranks.
        ranks: the group's, in its order; empty: all.
    """

    case: Case
    settings: tuple[tuple[str, object], ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def kind(self):
        """What calls are told apart by that differ in more than their data."""
        return self._replace(case=self.case.with_seed(0))


class Step(NamedTuple):
    """What a rank does.

    Attributes:
        call: with which of the calls.
        how: "call"; "replay", a graph of it; "never", nothing; "odd", makes it with settings with which it
            may raise; or a key of `FAILS`.
        settings: of this rank alone.
        stream: handle.
    """

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
        raised: calls that raised on their rank: (rank, call).
    """

    error: Exception | None
    wrong: list[tuple[int, int, float]]
    finished: int
    raised: list[tuple[int, int]]


class Made(NamedTuple):
    """A result to come: of which rank and call, in whose workspace, and a word that is 1 when it is there."""

    rank: int
    call: int
    out: torch.Tensor
    place: int
    there: torch.Tensor | None


def given_of(case):
    """A case's operands: those that a graph keeps, weight and bias, are the same for all seeds."""
    kept, given = operands(case.with_seed(0)), operands(case)
    return given.x, kept.weight, kept.bias


def reference(case, rank, ranks):
    """(exact result of a rank, what its error may be)."""
    (x, weight, bias), layout = given_of(case), LAYOUTS[case.op]
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact = exact + bias.double()
    mine = [layout.part(whole, layout.out, rank, ranks) for whole in (exact, size)]
    return mine[0], mine[1] * ranks * 2.0**-8 + mine[0].abs() * 2.0**-7 + 1e-3


# --- groups of some ranks ---


class SubWorld(VirtualWorld):
    """A group of some of a world's ranks, on the same devices."""

    def __init__(self, world, ranks):
        self.within, label = ranks, "-".join(map(str, ranks))
        names = [f"{world.names[rank]}-of-{label}" for rank in ranks]
        VirtualRanks.__init__(
            self, names, [world.executor(rank) for rank in ranks], world._emulator, world.without_p2p
        )

    has_nvshmem = False

    def _allocate(self, nbytes):
        everywhere = self._emulator.symmetric((nbytes,), torch.uint8)
        blocks = [everywhere[rank] for rank in self.within]
        addresses = [block.data_ptr() for block in blocks]
        return [VirtualSymmetric(block, torch.tensor(addresses), None) for block in blocks]


# --- what a rank may fail at ---


@contextmanager
def planted(owner, name, error):
    def fails(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        yield


FAILS: dict[str, list[tuple[Any, str, Exception]]] = {
    "skip": [(Plan, "launch", MemoryError("no launch"))],
    "memory": [(torch.Tensor, "new_empty", torch.OutOfMemoryError("no room for the output"))],
    "compile": [
        (plans, "compiled_kernel", RuntimeError("no compiler")),
        (gather, "compiled_gather", RuntimeError("no compiler")),
    ],
    "workspace": [(workspace, "_make", MemoryError("no room for a workspace"))],
}
"""What raises in a call, on one rank, before its launch."""


@contextmanager
def failing(how, group):
    """In the block the rank's call raises, if it comes to that; it may have prepared nothing before."""
    with ExitStack() as stack:
        if how == "compile":
            find(group).calls.clear()
            for side in local_peers(group):
                side.plans.clear()
        for place in FAILS.get(how, ()):
            stack.enter_context(planted(*place))
        yield


# --- ages ---


def grow_old(held, epoch, left=lambda flag: False):
    """As if calls like the last two had been made up to this one: of the words that these have written.

    Args:
        held: a workspace.
        epoch: of its last call then.
        left: which flags of tiles, by number, those calls did not raise.
    """
    words = held.memory.local[: held.size.zeroed].view(torch.int64)
    more = epoch - words[EPOCH_OFFSET // 8].item()
    assert words[EPOCH_OFFSET // 8] >= 2 and more % 2 == 0, "each parity has had a call"
    for offset in (EPOCH_OFFSET, RELAY_EPOCH_OFFSET, NEXT_EPOCH_OFFSET):
        words[offset // 8] += more * (words[offset // 8] != 0)
    entered = words[ENTERED_OFFSET // 8 : READ_OFFSET // 8]
    halves = (entered + more) & 0xFFFFFFFF | entered & ~0xFFFFFFFF
    entered.copy_(torch.where(entered != 0, halves, entered))
    flags = words[CONTROL_BYTES // 8 :]
    raised = torch.tensor([not left(flag) for flag in range(len(flags))]) & (flags != 0)
    flags += more * raised
    words[READ_OFFSET // 8 : CONTROL_BYTES // 8] += more * (words[READ_OFFSET // 8 : CONTROL_BYTES // 8] != 0)


# --- graphs ---


class Graph:
    """A call that one rank captured, to be replayed with any x."""

    def __init__(self, emulator, executor, number):
        self.emulator, self.executor = emulator, executor
        self.stream, self.capture = FIRST_GRAPH + number, Capture(0)
        self.x = self.out = self.place = None

    @contextmanager
    def capturing(self):
        """In the block what the rank queues is kept."""

        def kept(name):
            real = getattr(self.emulator, name)
            return lambda *given: self.capture.keep(partial(real, *given))

        def capture_of(stream):
            return self.stream if stream.cuda_stream % SECOND_STREAM == self.stream else 0

        rank, streams = self.executor.rank, self.executor.streams
        with pytest.MonkeyPatch.context() as patch:
            for name in ("copy", "wait_stream"):
                patch.setattr(self.emulator, name, kept(name))
            patch.setattr(streams, "is_capturing", lambda: True)
            patch.setattr(streams, "capture_of", capture_of)
            patch.setattr(streams, "handle", self.stream)
            patch.setitem(self.emulator.captures, rank, self.capture)
            yield

    def replay(self, stream, x):
        """Queues a replay on a stream, between the copies of its x and of its result; gives the latter."""
        rank, emulator = self.executor.rank, self.emulator
        self._copy(stream, self.x, x)
        emulator.wait_stream(rank, self.stream, stream)
        for item in self.capture._items:
            item()
        emulator.wait_stream(rank, stream, self.stream)
        out = torch.full_like(self.out, torch.nan)
        self._copy(stream, out, self.out)
        return out

    def _copy(self, stream, target, source):
        assert target.is_contiguous() and source.is_contiguous(), "a graph's operands are not padded"
        if source.numel():
            kept = [self.emulator.register(each, self.executor.rank) for each in (target, source)]
            addresses = [each.data_ptr() for each in kept]
            self.emulator.copy(self.executor.rank, stream, *addresses, source.numel() * source.element_size())


# --- runs ---


class Programs:
    """Runs ranks' programs.

    Args:
        arch: of the kernels.
        calls: what they may make.
        programs: a list of steps for each rank.
        fields: of the kernels' configuration.
        dead: a rank whose kernels never begin, or None.
        age: (epoch of the workspaces' last call, which flags it left alone: see `grow_old`), or None: new.
        ordered: whether replays wait for the calls before them, and calls for the replays, on other streams.
        **options: of the emulator; ``network`` among them.
    """

    def __init__(self, arch, calls, programs, *, fields, dead=None, age=None, ordered=True, **options):
        self.arch, self.calls, self.programs = arch, calls, programs
        self.fields, self.dead, self.age, self.ordered = fields, dead, age, ordered
        self.options = options
        self.marks = any(step.how == "replay" for program in programs for step in program)

    def run(self) -> Outcome:
        """Queues all ranks' steps, runs them together, looks at what is finished."""
        ranks, error = len(self.programs), None
        with ExitStack() as stack:
            stack.enter_context(configured(**self.fields))
            emulator = stack.enter_context(Emulator(self.arch, ranks, **self.options))
            beyond = self.options.get("network", False)
            world = stack.enter_context(VirtualWorld(ranks, emulator=emulator, without_p2p=beyond))
            self.worlds, self.emulator = {(): world}, emulator
            for some in {call.ranks for call in self.calls} - {()}:
                self.worlds[some] = stack.enter_context(SubWorld(world, some))
            stack.callback(self._let_go)
            stack.enter_context(poisoned_allocations())
            self.graphs, self.made, self.raised, self.last = {}, [], [], {}
            if self.age is not None:
                self._grow_old()
            for rank, program in enumerate(self.programs):
                for step in program:
                    if step.how == "replay":
                        self._capture(rank, step)
            born = self._epochs()
            for rank, program in enumerate(self.programs):
                for step in program:
                    self._make(rank, step)
            if self.dead is not None:
                emulator.faults.kill(self.dead)
            try:
                world.synchronize()
            except NAMED as failure:
                error = failure
            except EmulatorError as failure:
                error = failure
            made = {place: epoch - born.get(place, 0) for place, epoch in self._epochs().items()}
            wrong, finished, counted = [], 0, {}
            for rank, number, out, place, there in self.made:
                counted[place] = counted.get(place, 0) + 1
                if counted[place] <= made[place] if there is None else there.item():
                    finished += 1
                    call = self.calls[number]
                    within = call.ranks or range(ranks)
                    exact, bound = reference(call.case, list(within).index(rank), len(within))
                    off = (out.double() - exact).abs()
                    if not (off <= bound).all():
                        wrong.append((rank, number, off.max().item()))
        return Outcome(error, wrong, finished, self.raised)

    def _epochs(self):
        words = {held.memory.local.data_ptr(): held.memory.local[EPOCH_OFFSET:][:8] for held in workspaces()}
        return {place: word.view(torch.int64).item() for place, word in words.items()}

    def _let_go(self):
        """Of graphs that are not replayed any more."""
        for held in workspaces():
            held.captured = False

    def _grow_old(self):
        """Makes two calls of each kind, of few rows, as if they had been made for long."""
        epoch, left = self.age
        for call in dict.fromkeys(call.kind for call in self.calls):
            few = call._replace(case=Case(call.case.op, 1, call.case.n, call.case.k, call.case.dtype))
            for rank in call.ranks or range(len(self.programs)):
                for _ in range(2):
                    self._call(rank, few, Step(0))
        self.worlds[()].synchronize()
        for held in workspaces():
            made = held.memory.local[EPOCH_OFFSET:][:8].view(torch.int64).item()
            grow_old(held, epoch + (made - epoch) % 2, left)

    def _part(self, rank, call):
        """(name of the group, its rank, operands) of a rank's call."""
        within, layout = list(call.ranks or range(len(self.programs))), LAYOUTS[call.case.op]
        own, size = within.index(rank), len(within)
        where = (layout.x, layout.weight, layout.bias)
        parts = [
            layout.part(whole, dim, own, size) for whole, dim in zip(given_of(call.case), where, strict=True)
        ]
        return self.worlds[call.ranks].names[own], parts

    def _call(self, rank, call, step):
        """(result, operands, workspace), of a call that is queued."""
        group, (x, weight, bias) = self._part(rank, call)
        case = call.case
        extents = {"gemm_all_gather": {"columns": case.n}, "all_gather_gemm": {"rows": case.m}}.get(
            case.op, {}
        )
        how = {"backend": "fused", "deterministic": False, "group": group, **extents}
        with (
            configured(**{**dict(call.settings), **dict(step.settings)}),
            launches() as places,
            failing(step.how, group),
        ):
            out = getattr(overlap_gemm, case.op)(x, weight, bias=bias, **how)
        return out, x, places[0]

    def _capture(self, rank, step):
        call = self.calls[step.call].kind
        key = rank, call, step.settings
        if key not in self.graphs:
            executor = self.worlds[()].executor(rank)
            graph = self.graphs[key] = Graph(self.emulator, executor, len(self.graphs))
            with graph.capturing():
                graph.out, graph.x, graph.place = self._call(rank, call, step._replace(how="call"))

    def _make(self, rank, step):
        """Queues what a rank does."""
        if step.how == "never":
            return
        call, executor = self.calls[step.call], self.worlds[()].executor(rank)
        if self.marks and self.ordered and (before := self.last.get(rank, step.stream)) != step.stream:
            self.emulator.wait_stream(rank, step.stream, before)
        executor.streams.handle = self.last[rank] = step.stream
        if step.how == "replay":
            graph = self.graphs[rank, call.kind, step.settings]
            _, (x, *_) = self._part(rank, call)
            out, place = graph.replay(step.stream, x), graph.place
        else:
            try:
                out, _, place = self._call(rank, call, step)
            except Exception:
                if step.how == "call":
                    raise
                self.raised.append((rank, step.call))
                return
        there = None
        if self.marks:
            there = self.emulator.register(torch.zeros(1, dtype=torch.int64), rank)
            one = self.emulator.register(torch.ones(1, dtype=torch.int64), rank)
            self.emulator.copy(rank, step.stream, there.data_ptr(), one.data_ptr(), 8)
        self.made.append(Made(rank, step.call, out, place, there))


class launches:  # noqa: N801
    """In the block each launch notes its workspace."""

    def __init__(self):
        self.places, self.patch = [], pytest.MonkeyPatch()

    def __enter__(self):
        self.patch.setattr(Plan, "launch", self._noting(Plan.launch))
        return self.places

    def _noting(self, launch):
        def noted(plan, *given):
            self.places.append(plan.workspace.memory.local.data_ptr())
            return launch(plan, *given)

        return noted

    def __exit__(self, *_):
        self.patch.undo()


__all__ = ["FAILS", "NAMED", "Call", "Outcome", "Programs", "Step", "grow_old"]
