"""Autotuning for `backend="auto"`: the time model proposes candidates, and benchmarks select among them.

Candidates are benchmarked at the first call of a kind (`Problem.kind`) with `backend="auto"` under policy
"measure". Each candidate is called on all ranks, with copies of the caller's operands. Its time is the
maximum over the ranks, so that all ranks choose alike. The result is valid while the group exists, and is
stored in a file (`tuning.measured`) for later processes.

Nothing is measured during the capture of a CUDA graph. A kind whose first call in the group has used the time
model's choice stays with it. Rank 0 writes the file. ``OVERLAP_GEMM_AUTOTUNE_SECONDS`` (default 60) limits
compiling and starting the candidates of a kind; later ones are excluded.

A candidate that cannot be compiled, launched or captured, or that runs out of memory, is excluded on all
ranks. The log has a warning with the reason. A candidate that ends the process is not tried again by the
next process.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch

from ..runtime import agree
from ..runtime.group import Group
from ..spec import OpSpec
from ..spec.sharding import Shards
from ..tuning.measured import Kernel, Measured, Policy, Seconds, keep, trying
from ..tuning.prediction import predict
from ..tuning.settings import configured
from ..tuning.space import constants, proposals
from ..tuning.time_model import Facts
from ..tuning.timing import captured, measure
from .base import Backend, Problem
from .fused.plan_cache import DTYPES
from .group_measurements import GroupMeasurements, measurements_of, uses_measurements
from .op_call import CallOperands, Joined
from .scales.scaling import FLOAT8
from .select import BACKENDS, why_unfit

logger = logging.getLogger(__name__)

ROUNDS = 5
"""Number of timed samples of each candidate."""

BURST_SECONDS = 0.01
"""Length of a sample in seconds."""

CACHES = 100 << 20
"""Bytes of operands that exceed every GPU's caches. With fewer bytes, calls use several sets in turn."""

SETS = 3
"""Number of sets of operands below `CACHES` bytes."""

FASTER = 0.99
"""A kernel replaces the model's choice if it takes less than this fraction of that kernel's time."""

FARTHEST = 2.0
"""Ratio to the best candidate's time above which a candidate is excluded.

The ratio applies to predicted times, and to the times of the first calls, where the limit is `HOST` higher.
"""

HOST = 5e-4
"""Seconds of host time that an eager call may take regardless of its device time.

A CUDA graph has no host time, so a candidate that is slow eagerly may be the fastest in a graph."""


class Candidate(NamedTuple):
    """Candidate of a benchmark: a backend, and for the fused one a kernel.

    Attributes:
        backend: Backend to benchmark.
        kernel: Kernel of the fused backend. The empty `Kernel()` means the time model's choice, or another
            backend.
    """

    backend: Backend
    kernel: Kernel = Kernel()

    @property
    def name(self) -> str:
        """Returns the name of the candidate in the log and in the file."""
        return f"{self.backend.name}: {self.kernel}" if self.backend.name == "fused" else self.backend.name


def policy_of(problem: Problem, measurements: GroupMeasurements) -> Policy:
    """Returns the policy for a kind of call: "measure" or "model".

    It is the policy of a warm-up, or else of the environment. Without either, kinds are measured on GPUs with
    peer access whose constants are not calibrated.

    Args:
        problem: Problem of the call.
        measurements: Measurements of the group.
    """
    if measurements.policy is not None:
        return measurements.policy
    access = problem.peer_access
    if access is not None and access.arch and access.uncalibrated and access.why_not is None:
        return "measure"
    return "model"


def measure_if_due(
    problem: Problem, requested: str, operands: CallOperands, shards: Shards, group: Group
) -> bool:
    """Benchmarks the candidates of a kind at its first call if the policy requires it; collective.

    Otherwise the kind stays with the model's choice.

    Args:
        problem: Problem of the call, equal on all ranks.
        requested: The caller's `backend=`.
        operands: Operands, as in `Backend.bind`.
        shards: Division of the rows or columns, as in `Backend.bind`.
        group: Ranks that take part.

    Returns:
        Whether a new measurement was made.
    """
    if not uses_measurements(problem.spec, requested, group, problem.promises):
        return False
    measurements = measurements_of(group, operands.x.device)
    if problem.kind in measurements.kinds:
        return False
    is_exchanged = problem.spec.reshards_k and problem.parts  # runs as joined matrices were measured
    is_open = requested == "auto" and not (problem.captured or problem.is_empty or is_exchanged)
    is_due = is_open and policy_of(problem, measurements) == "measure"
    one = replace(problem, parts=())  # a list along K is measured as its joined matrices
    launched = group.progress.events
    measured = _measured(one, operands, shards, group, measurements) if is_due else None
    group.progress.events = launched  # the call itself has launched nothing, and may still be retried
    measurements.kinds[problem.kind] = measured
    if measured is not None and group.rank == 0:
        keep(measurements.under, problem.kind, measured)
    return measured is not None


@contextmanager
def autotune_policy(
    op: OpSpec, policy: Policy | None, requested: str, group: Group, device: torch.device
) -> Iterator[None]:
    """Sets the policy of a group's calls within the block, if measurements may decide those of an op.

    Args:
        op: Definition of the op.
        policy: Policy; None: that of the environment, or else "measure" on GPUs.
        requested: The caller's `backend=`.
        group: Group of the calls.
        device: Device of this rank's tensors.
    """
    if not uses_measurements(op, requested, group):
        yield
        return
    measurements = measurements_of(group, device)
    if device.type == "cuda":
        policy = policy or measurements.policy or "measure"
    with measurements.with_policy(policy):
        yield


def copy_measurement(
    problem: Problem, other: Problem, requested: str, group: Group, device: torch.device
) -> None:
    """Copies the measurement of `problem` to `other`, the same call with fewer extents, if it has none.

    Args:
        problem: Problem that was measured.
        other: Problem that gets its measurement.
        requested: The caller's `backend=`.
        group: Group of the calls.
        device: Device of this rank's tensors.
    """
    if not uses_measurements(problem.spec, requested, group, problem.promises):
        return
    measurements = measurements_of(group, device)
    measured = measurements.kinds.get(problem.kind)
    if (
        measured is not None
        and measurements.kinds.setdefault(other.kind, measured) is measured
        and group.rank == 0
    ):
        keep(measurements.under, other.kind, measured)


def bind_as(kernel: Kernel, backend: Backend, *arguments: Any) -> Callable[[CallOperands], Any]:
    """Returns `backend.bind(*arguments)`; the fused backend binds this kernel, unless it is empty."""
    if not any(kernel):
        return backend.bind(*arguments)
    with configured(algorithm=kernel.algorithm, **dict(kernel.fields)):  # type: ignore[arg-type]
        return backend.bind(*arguments)


def _measured(
    problem: Problem,
    passed: CallOperands,
    shards: Shards,
    group: Group,
    measurements: GroupMeasurements,
) -> Measured | None:
    """Returns the times of the candidates; None if no candidate could be called, or operands not copied."""
    operands, device = list[CallOperands](), passed.x.device
    failure = _failure(lambda: operands.extend(_operands(problem, passed)), device)
    if failures := list(filter(None, group.all_gather_object(failure))):
        logger.warning("%s is not measured: copies of its operands: %s", problem.kind, failures[0])
        return None
    started = time.monotonic()
    calls: dict[Candidate, Callable[[], object]] = {}
    with torch.no_grad():
        for candidate in _candidates(problem, group):
            if (problem.kind, candidate.name) in measurements.refused:
                continue
            call = _call(candidate, problem, operands, shards, group)
            is_writer = group.rank == 0
            with trying(measurements.under, problem.kind, candidate.name) if is_writer else nullcontext():
                failure = _failure(call, device)
            reports = group.all_gather_object((failure, time.monotonic() - started))
            if failures := [theirs for theirs, _ in reports if theirs]:
                logger.warning("%s: %s is left out: %s", problem.kind, candidate.name, failures[0])
            else:
                calls[candidate] = call
            if measurements.seconds and max(spent for _, spent in reports) > measurements.seconds:
                logger.info(
                    "%s: candidates took %.0f s; the others are left out", problem.kind, measurements.seconds
                )
                break
        if not calls:
            return None
        measured = _timed(calls, device, group)
    times = measured.captured or measured.eager
    text = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in times)
    logger.info("%s: %s: %s; fused by %s", problem.kind, measured, text, measured.kernel)
    return measured


def _candidates(problem: Problem, group: Group) -> Iterator[Candidate]:
    """Yields the candidates for a problem, in the order of their expected times."""
    access, fits = problem.peer_access, {b.name: b for b in BACKENDS if why_unfit(b, problem) is None}
    if problem.device_type != "cuda" or access is None or not access.arch:
        yield from (Candidate(backend) for name, backend in fits.items() if name != "fused")
        return
    kind = (FLOAT8 if problem.is_scaled else DTYPES).get(problem.dtype)
    fused = fits.pop("fused", None) if kind and access.why_not is None else None
    times: Mapping[str, float] = {}
    if kind:
        facts = Facts(
            problem.op, problem.m, problem.n, problem.k, kind, problem.world_size, blocks=problem.blocks
        )
        predicted = predict(facts, access.arch, access.num_sms, captured=True)
        times = {} if predicted is None else predicted.seconds
        if fused is not None:
            kernels = proposals(facts, constants(access.arch), access.arch, access.num_sms)
            yield Candidate(fused, kernels[0][0])
    fits.pop("fused", None)
    best = min(times.values(), default=0.0)
    plausible = [b for n, b in fits.items() if n == "torch" or times.get(n, best) <= FARTHEST * best]
    yield from (Candidate(backend) for backend in sorted(plausible, key=lambda b: times.get(b.name, 0.0)))
    if fused is not None:
        yield from (Candidate(fused, kernel) for kernel, _ in kernels[1:])


def _operands(problem: Problem, operands: CallOperands) -> list[CallOperands]:
    """Returns sets of copies of the caller's tensors, with scales of 1, in the bound function's form."""
    x, (weights, biases) = operands.x, operands.lists(problem.spec)
    several = problem.spec.takes_lists
    if isinstance(x, Joined):
        x, weights = x.side_by_side(), [weights[0].side_by_side()]

    def copied(tensors: Any) -> Any:
        if isinstance(tensors, (list, tuple)):
            return [copied(one) for one in tensors]
        return tensors if tensors is None else tensors.detach().clone()

    scales: tuple[Any, ...] = ()
    if (layout := problem.types.scales) is not None:
        pairs = [layout.unit(tuple(x.shape), tuple(w.shape), x.device) for w in weights]
        of_x, of_weights = pairs[0][0], [of_weight for _, of_weight in pairs]
        if problem.blocks is None:
            of_x, of_weights = of_x.reshape(-1), [scale.reshape(-1) for scale in of_weights]
        scales = of_x, of_weights if several else of_weights[0]
    passed = x, weights if several else weights[0], biases if several else next(iter(biases), None)
    sets = range(num_sets(sum(one.nbytes for one in (x, *weights)), x.device))
    return [CallOperands(*map(copied, passed), *scales) for _ in sets]


def num_sets(nbytes: int, device: torch.device) -> int:
    """Returns the number of operand sets that calls use in turn, so that caches hold none; 1 on CPUs.

    Args:
        nbytes: Bytes of one set of operands.
        device: Device of the operands.
    """
    return SETS if device.type == "cuda" and nbytes < CACHES else 1


def _call(
    candidate: Candidate, problem: Problem, operands: Sequence[CallOperands], shards: Shards, group: Group
) -> Callable[[], object]:
    """Returns a function that calls a candidate with the next set of operands; its first call binds.

    On CPUs over gloo ranks compare its transfers. If one rank fails before its first one, it raises on all.
    """
    sets, bound = cycle(operands), list[Callable[[CallOperands], Any]]()
    device, progress = operands[0].x.device, group.progress
    facts: agree.Facts = (("op", problem.op), ("candidate", candidate.name))
    is_compared = candidate.backend.verifies and device.type == "cpu" and group.has_gloo
    compared = agree.of_calls(group, device, facts) if is_compared else group

    def call() -> object:
        before = progress.events
        try:
            if not bound:
                arguments = problem, operands[0], shards, compared
                bound.append(bind_as(candidate.kernel, candidate.backend, *arguments))
            return bound[0](next(sets))
        except Exception as error:
            is_alone = progress.events == before and not getattr(error, "is_on_every_rank", False)
            if is_compared and is_alone:  # the peers wait in its first transfer
                failed = agree.of_calls(group, device, (*facts, agree.failure(error)))
                assert failed.enter is not None
                failed.enter("none")
            raise

    return call


def _failure(call: Callable[[], object], device: torch.device) -> str | None:
    """Runs `call` and synchronises; returns the error as text for the other ranks, or None."""
    try:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # whatever the error is, all ranks continue without the result
        return f"{type(error).__name__}: {error}"
    return None


def _timed(calls: Mapping[Candidate, Callable[[], object]], device: torch.device, group: Group) -> Measured:
    """Returns the measured times of candidates; fused kernels are compared by their times in CUDA graphs."""

    def medians(
        variants: Mapping[Candidate, Callable[[], object]],
        rounds: int = ROUNDS,
        seconds: float = BURST_SECONDS,
    ) -> dict[Candidate, float]:
        timings = measure(
            {candidate.name: call for candidate, call in variants.items()},
            group=group.process_group,
            device=device,
            rounds=rounds,
            burst_seconds=seconds,
        )
        return {candidate: timings.median(candidate.name) for candidate in variants}

    first = medians(calls, rounds=3, seconds=0.0)
    longest = FARTHEST * min(first.values()) + (HOST if device.type == "cuda" else 0.0)
    calls = {c: call for c, call in calls.items() if first[c] <= longest}
    on_device: dict[Candidate, float] = {}
    kernels = [candidate for candidate in calls if candidate.backend.name == "fused"]
    if device.type == "cuda":
        graphs: dict[Candidate, Callable[[], object]] = {}
        for candidate, call in calls.items():
            failure = _failure(partial(_capture, graphs, candidate, call), device)
            if failures := list(filter(None, group.all_gather_object(failure))):
                logger.warning("%s is left out of CUDA graphs: %s", candidate.name, failures[0])
                graphs.pop(candidate, None)
        on_device = medians(graphs) if graphs else {}
        del graphs
    times = on_device or medians(calls)
    kernel = _fastest({candidate: times[candidate] for candidate in kernels if candidate in times})
    each = {c: call for c, call in calls.items() if c not in kernels or c.kernel == kernel}

    def in_order(of: Mapping[Candidate, float]) -> Seconds:
        by_backend = {c.backend.name: seconds for c, seconds in of.items() if c in each}
        return tuple(sorted(by_backend.items(), key=lambda item: item[1]))

    eager = in_order(medians(each) if on_device else times)
    today = datetime.date.today().isoformat()
    return Measured(eager, in_order(on_device), kernel, len(calls), today)


def _capture(
    graphs: dict[Candidate, Callable[[], object]], candidate: Candidate, call: Callable[[], object]
) -> None:
    graphs[candidate] = captured(call)


def _fastest(times: Mapping[Candidate, float]) -> Kernel:
    """Returns the fastest kernel, or the model's choice if that is not slower by the factor `FASTER`."""
    if not times:
        return Kernel()
    fastest = min(times, key=times.__getitem__)
    default = next((candidate for candidate in times if not any(candidate.kernel)), None)
    if default is not None and times[fastest] >= FASTER * times[default]:
        return default.kernel
    return fastest.kernel
