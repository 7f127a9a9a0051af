"""Selection of the backend that runs an op, with the reasons for it, which `explain` prints.

`auto` selects from the backends that can run the problem:

1. If calls of the kind were measured (`autotuning`), the backend with the least measured time.
2. Otherwise backends with a reason to be slower (`Backend.why_slower`) are excluded. Of the others, the one
   with the least predicted time (`tuning.prediction`) is selected.
3. If no time can be predicted, the first of these others: fused, decomposed, torch, sequential (`BACKENDS`).

With a promise of bits (``invariant=``) no time decides, because times depend on M: rule 3 applies. A backend
that cannot keep the promise, or ``deterministic=True``, is excluded before; if it is named, that raises
ValueError.

Times of a call with an epilogue include it (`tuning.epilogue_time`): in the kernel, or one pass over memory
after the op. `why_after` decides between these for the selected backend.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ..spec.promises import NO_PROMISES, InvarianceError, Promises
from ..spec.sharding import shard_rows
from ..tuning.epilogue_time import EpilogueTime, epilogue_time
from ..tuning.machine import machine_for
from ..tuning.measured import Kernel
from ..tuning.prediction import Facts, Prediction, predict
from ..tuning.settings import settings
from .base import Backend, Problem
from .decomposed import Decomposed
from .fused.fused_backend import Fused
from .fused.list_calls import why_each
from .fused.plan_cache import DTYPES
from .op_call import FALLBACK, CallOperands, with_fallback
from .portable_arithmetic import why_no_order
from .scales.scaling import FLOAT8
from .sequential import Sequential
from .torch_backend import Torch

logger = logging.getLogger(__name__)

BACKENDS: tuple[Backend, ...] = (Fused(), Decomposed(), Torch(), Sequential())
"""Backends, in the order in which `auto` tries them if no times are known; register a new backend here."""


@dataclass(frozen=True)
class Choice:
    """A backend and the reasons for it.

    Attributes:
        backend: Chosen backend.
        problem: Problem to run, without its epilogue.
        requested: The caller's `backend=`.
        verdicts: (name, reason against it) of each considered backend, in order; None for the chosen one.
        prediction: Predicted times of the backends, if they are known.
        backward: Choice for the dual op in the backward pass, set by `explain`.
        epilogue: Epilogue and its implementation, set by `explain`.
    """

    backend: Backend
    problem: Problem
    requested: str
    verdicts: tuple[tuple[str, str | None], ...]
    prediction: Prediction | None = None
    backward: "Choice | None" = None
    epilogue: str | None = None

    @property
    def kernel(self) -> Kernel:
        """Returns the fused kernel with the least measured time; an empty one means the model's choice."""
        measured = self.problem.measured if self.backend.name == "fused" else None
        return Kernel() if measured is None else measured.kernel

    def __str__(self) -> str:
        """Returns a line for the choice and one for each backend considered."""
        problem, prediction = self.problem, self.prediction
        lines = [
            f"{problem.op} runs as {self.backend.name!r} (backend={self.requested!r})",
            f"  M={problem.m}, width={problem.width}, {problem.types}, {problem.device_type}, "
            f"P={problem.world_size}, {problem.bytes / 2**20:.3g} MiB to move",
            *([f"  {options}"] if (options := str(problem.call)) else ()),
        ]
        measured = problem.measured
        times, how = {} if prediction is None else prediction.seconds, "predicted"
        if measured is not None:
            times, how = measured.seconds(problem.captured), "measured"
        for name, reason in self.verdicts:
            known = f" [{times[name] * 1e6:.0f} us {how}]" if name in times else ""
            lines.append(f"  {name}: {'chosen' if reason is None else 'no, ' + reason}{known}")
        if self.backend.name == "fused" and (transport := settings().transport_name(problem.spec)):
            lines.append(f"  transport {transport!r}, as configured")
        if self.backend.name == "fused" and problem.num_weights > 1:
            why, number = why_each(problem), f"{problem.num_weights} weights"
            lines.append(f"  one kernel for {number}" if why is None else f"  {number}, a kernel each: {why}")
        if measured is not None:
            lines.append(f"  {measured}" + (f"; fused by {measured.kernel}" if "fused" in times else ""))
        if prediction is not None:
            unknown = [name for name, extent in (("N", problem.n), ("K", problem.k)) if extent is None]
            known = "".join(f", {name} not known" for name in unknown)
            lines.append(
                f"  bound: {prediction.bound * 1e6:.0f} us (product {prediction.product * 1e6:.0f}, "
                f"link {prediction.link * 1e6:.0f}){known}; constants of {prediction.machine.name}, "
                f"{prediction.machine.source}"
            )
            if as_rows := prediction.machine.missing_block_timings(problem.blocks):
                lines.append(f"  constants are those with scales of rows: {as_rows}")
        if self.epilogue is not None:
            lines.append(f"  epilogue {self.epilogue}")
        lines += cost_of_promises(problem)
        if self.backward is not None:
            lines.append(f"  backward: {self.backward.problem.op} runs as {self.backward.backend.name!r}")
        return "\n".join(lines)


def choose(problem: Problem, requested: str = "auto") -> Choice:
    """Returns the choice of a backend for a problem, the same on every rank of a group.

    Args:
        problem: Problem to run.
        requested: "auto", the name of the backend that must run the problem, or a name with `FALLBACK`.

    Raises:
        ValueError: The name is unknown, the named backend cannot run the problem, or no backend can. For
            example, "fused" needs operands of 16 bits, or of 8 with scales, and except for all_gather_gemm N
            must be a multiple of 8. If only some ranks raise, `dispatch.choosing` makes that a
            DisagreementError on every rank.
        InvarianceError: No backend can keep the promises of the problem.
    """
    check_promised(problem)
    check_name(requested)
    plain = problem.without_epilogue()
    name, prediction = requested.removesuffix(FALLBACK), predicted(problem)
    verdicts: dict[str, str | None] = {}
    if name != "auto":
        backend = next(backend for backend in BACKENDS if backend.name == name)
        verdicts[name] = backend.why_not(problem)
        if verdicts[name] is None:
            return Choice(backend, plain, requested, tuple(verdicts.items()), prediction)
        if name == requested:
            raise ValueError(f"backend={requested!r} cannot run {problem}: {verdicts[name]}")
    others = [backend for backend in BACKENDS if backend.name != name]
    # Times depend on M, so a choice by times would make bits depend on M: promises exclude that.
    times: Mapping[str, float] = {} if prediction is None or problem.promises.leaves else prediction.seconds
    unfit = {backend.name: why_unfit(backend, problem) for backend in others}
    measured = problem.measured.seconds(problem.captured) if problem.measured else {}
    if any(unfit[backend.name] is None for backend in others if backend.name in measured):
        times, why = measured, {name: None if name in measured else "it was not measured" for name in unfit}
    else:
        why = {backend.name: unfit[backend.name] or backend.why_slower(problem) for backend in others}
    verdicts |= {name: unfit[name] or why[name] for name in unfit}
    worth = [backend for backend in others if verdicts[backend.name] is None]
    if not worth:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in verdicts.items())
        raise ValueError(f"no backend can run {problem}: {reasons}")
    if times and (with_epilogue := predicted_epilogue(problem)) is not None:
        times = added_epilogue(times, problem, with_epilogue)
    best = min(
        worth, key=lambda backend: times.get(backend.name, math.inf)
    )  # the first where none has a time
    for backend in worth:
        if backend is not best:
            verdicts[backend.name] = f"{best.name} {'is faster' if times else 'is tried first'}"
    return Choice(best, plain, requested, tuple(verdicts.items()), prediction)


reasons: dict[tuple[str, str], dict[str, str]] = {}
"""Reasons against the other backends (name -> reason) in the last choice, by (op, chosen backend)."""


def log_choice(choice: Choice) -> Choice:
    """Logs a choice that is about to run, once per op and class of shapes, and returns it.

    The chosen backend is logged at level INFO. If it is not the preferred one, the reason is logged as a
    warning.
    """
    problem = choice.problem
    about = (problem.op, (problem.m - 1).bit_length(), problem.width, problem.types, problem.world_size)
    _inform(*about, choice.backend.name, choice.requested)
    others = {name: reason for name, reason in choice.verdicts if reason is not None}
    reasons[problem.op, choice.backend.name] = others
    preferred = choice.requested.removesuffix(FALLBACK)
    if preferred not in ("auto", choice.backend.name):
        _warn(problem.op, preferred, choice.backend.name, dict(choice.verdicts)[preferred] or "")
    return choice


@cache
def _inform(op: str, bits: int, width: int, types: str, ranks: int, backend: str, requested: str) -> None:
    """Logs a choice; cached, so once for each class of shapes."""
    logger.info(
        "%s, M <= %d, width %d, %s, P=%d runs as %r (backend=%r)",
        op, 1 << bits, width, types, ranks, backend, requested.removesuffix(FALLBACK),
    )  # fmt: skip


@cache
def _warn(op: str, preferred: str, backend: str, why: str) -> None:
    """Logs that the preferred backend was not chosen; cached, so once for each reason."""
    logger.warning("%s runs as %r, not as %r: %s", op, backend, preferred, why)


def predicted(problem: Problem, promises: Promises = NO_PROMISES) -> Prediction | None:
    """Returns the model's prediction for a problem; None on CPUs, and for unknown GPUs or dtypes.

    Args:
        problem: Problem to predict.
        promises: Promises that the fused kernel keeps.
    """
    facts, access = _facts(problem), problem.peer_access
    if facts is None or access is None:
        return None
    return predict(facts, access.arch, access.num_sms, problem.captured, promises)


def predicted_epilogue(problem: Problem) -> EpilogueTime | None:
    """Returns the model's times of a problem's epilogue; None without one, or where `predicted` is None."""
    facts, access, applying = _facts(problem), problem.peer_access, problem.applying
    if facts is None or access is None or applying is None:
        return None
    machine = machine_for(access.arch)
    if machine is None:
        return None
    sizes = [dtype.itemsize for dtype in applying.dtypes]
    return epilogue_time(applying.epilogue, sizes, facts, machine, access.arch, access.num_sms)


def why_after(choice: Choice, problem: Problem, columns: int) -> str | None:
    """Returns the reason the epilogue of a call is applied after the op; None if the backend applies it.

    Args:
        choice: Choice of the backend.
        problem: Problem of the call, with its epilogue.
        columns: Rows of this rank's weight.
    """
    by_time = choice.requested == "auto" and not problem.promises.leaves  # times depend on M
    times = predicted_epilogue(problem) if by_time else None
    return why_after_by(choice.backend, problem, columns, times)


def why_after_by(backend: Backend, problem: Problem, columns: int, times: EpilogueTime | None) -> str | None:
    """Returns the reason the epilogue is applied after the op; the arguments are those of `why_after`.

    Args:
        backend: Backend that runs the op.
        problem: Problem of the call, with its epilogue.
        columns: Rows of this rank's weight.
        times: Times of the epilogue that decide if the backend can apply it; None: it then does.
    """
    reason = backend.why_after(problem, columns)
    return reason if reason is not None or times is None else times.why_after()


def added_epilogue(seconds: Mapping[str, float], problem: Problem, times: EpilogueTime) -> dict[str, float]:
    """Returns the times of backends with a problem's epilogue.

    Args:
        seconds: Times without it, by backend.
        problem: Problem with an epilogue.
        times: Times of the epilogue.
    """
    columns = problem.local_columns
    kernels = [backend.name for backend in BACKENDS if backend.why_after(problem, columns) is None]
    return times.added(seconds, kernels)


def epilogue_line(backend: Backend, problem: Problem, why: str | None, times: EpilogueTime | None) -> str:
    """Returns the epilogue of a problem, its place with the reason, and its predicted times, as text.

    Args:
        backend: Backend that runs the op.
        problem: Problem with an epilogue.
        why: Result of `why_after` or `why_after_by`.
        times: Times of the epilogue; None: they are not known.
    """
    assert problem.applying is not None, problem
    before_sum = "before the sum over the ranks"
    if why is not None:
        place = f"{f'by torch {before_sum}' if problem.has_partial_epilogue else 'after the op'}, {why}"
    else:
        place = "in the kernel" if backend.name == "fused" else before_sum
    line = f"{problem.applying.epilogue.name}: {place}"
    return line if times is None else f"{line}; {times}"


def _facts(problem: Problem) -> Facts | None:
    access = problem.peer_access
    kind = (FLOAT8 if problem.is_scaled else DTYPES).get(problem.dtype)
    if access is None or not access.arch or access.uncalibrated or kind is None or problem.is_empty:
        return None
    extents, ranks = (problem.m, problem.n, problem.k), problem.world_size
    weights = () if why_each(problem) else tuple(shard_rows(width, ranks) for width in problem.widths)
    how: dict[str, Any] = {"blocks": problem.blocks, "weights": weights, "launches": _launches(problem)}
    how |= {"parts": len(problem.parts) or 1, "products": problem.num_weights}
    return Facts(problem.op, *extents, kind, ranks, **how)


def _launches(problem: Problem) -> tuple[int, ...]:
    """Returns N of the kernel of each weight of a list; empty if one kernel multiplies all of them.

    Unknown ones, of ranks that divide N, are assumed to be equal.
    """
    applying, number = problem.applying, problem.num_weights
    if number == 1 or why_each(problem) is None or (applying is not None and applying.epilogue.pairs):
        return ()
    if problem.widths:
        return tuple([max(width, 1) for width in problem.widths])
    return () if problem.n is None else (-(-problem.n // number),) * number


def why_unfit(backend: Backend, problem: Problem) -> str | None:
    """Returns the reason `auto` may not take a backend; None if it may."""
    if problem.deterministic and not backend.deterministic:
        return "deterministic sums are required, and its order and rounding are those of the collective"
    return backend.why_not(problem)


def explained(problem: Problem, requested: str, columns: int) -> Choice:
    """Returns the choice with all that `explain` prints; the other arguments are those of `why_after`."""
    choice = choose(problem, requested)
    if problem.applying is not None:
        why, times = why_after(choice, problem, columns), predicted_epilogue(problem)
        choice = replace(choice, epilogue=epilogue_line(choice.backend, problem, why, times))
    return choice if problem.is_scaled else with_backward(choice)


def with_backward(choice: Choice) -> Choice:
    """Returns the choice extended by the choice for the dual op, if there is one."""
    dual = choice.problem.dual()
    if dual is None or all(why_unfit(backend, dual) for backend in BACKENDS):
        return choice
    return replace(choice, backward=choose(dual, with_fallback(choice.requested)))


def cost_of_promises(problem: Problem) -> list[str]:
    """Returns lines for `explain` with the cost of the promises about bits; empty without promises."""
    promises, lines = problem.promises, []
    if promises.leaves:
        lines.append(
            f"  invariant={promises.invariant!r}: no time decides between backends, kernels that cut K are "
            "left out, and portable products are made in blocks"
        )
    if promises.has_tree and problem.spec.sums:
        lines.append(
            f"  K is summed in {promises.leaves} leaves, {promises.local_leaves(problem.world_size)} a rank"
        )
    sent = problem.out_dtype or problem.dtype
    if promises.has_wide_partials and problem.spec.sums and sent.itemsize < 4:
        lines.append(f"  partial sums are float32: {4 / sent.itemsize:.3g} times the bytes of {sent}")
    if promises != NO_PROMISES and (times := _times_of_promises(problem)):
        kept, free = times
        lines.append(
            f"  fused kernels that keep it: {kept * 1e6:.0f} us predicted, {free * 1e6:.0f} us without, "
            f"ratio {kept / free:.2f}"
        )
    return lines


def _times_of_promises(problem: Problem) -> tuple[float, float] | None:
    """Returns the predicted seconds of the fused kernel with and without promises; None if unknown."""
    if Fused().why_not(problem):
        return None
    try:
        both = predicted(problem, problem.promises), predicted(problem)
    except InvarianceError:  # kernels that `configured` requires do not keep it: the call raises this
        return None
    kept, free = (None if one is None else one.seconds.get("fused") for one in both)
    return None if kept is None or free is None else (kept, free)


def check_promised(problem: Problem) -> None:
    """Checks that the extents and scales of a problem permit its promises.

    Raises:
        InvarianceError: No backend can keep the promises.
    """
    promises = problem.promises
    if not promises.has_tree:
        return
    promises.local_leaves(problem.world_size)
    if not problem.spec.sums or problem.k is None:  # calls know K; for gradients `explain` may not
        return
    if problem.is_scaled and problem.blocks is None:
        raise InvarianceError(
            f"{problem.op}: invariant={promises.invariant!r} needs scales of blocks along K, because a scale "
            "of a row of a rank's shard depends on the number of ranks; pass block="
        )
    if reason := promises.why_no_cut(problem.k, problem.blocks[2] if problem.blocks else 1):
        raise InvarianceError(f"{problem.op}: {reason}")


def check_order(choice: Choice, operands: CallOperands) -> None:
    """Checks that a portable backend can multiply this rank's operands in the order that a promise requires.

    Args:
        choice: Choice of the backend.
        operands: Operands of the call, as in `Backend.bind`.

    Raises:
        InvarianceError: It cannot. Ranks may have different K, so this rank may raise alone.
    """
    problem = choice.problem
    if not (problem.promises.leaves and choice.backend.verifies):
        return
    dtype = torch.float32 if problem.is_scaled else problem.dtype
    leaves = problem.promises.local_leaves(problem.world_size) if problem.spec.sums else 1
    depth = operands.lists(problem.spec)[0][0].shape[1] // leaves
    if reason := why_no_order(operands.x.device, dtype, depth):
        raise InvarianceError(f"{problem.op}: {reason}")


def check_name(requested: str, deterministic: bool = False, promises: Promises = NO_PROMISES) -> None:
    """Checks the argument `backend=` of a call.

    Args:
        requested: "auto" or a backend's name, with or without `FALLBACK`.
        deterministic: Whether the caller passed deterministic=True. torch's deterministic mode alone
            does not exclude a named backend.
        promises: Promises of the call.

    Raises:
        ValueError: The name is unknown; or the named backend's sums are not deterministic, but the caller
            requires deterministic or invariant ones.
    """
    kept = {"auto": True, **{backend.name: backend.deterministic for backend in BACKENDS}}
    if not isinstance(requested, str) or requested.removesuffix(FALLBACK) not in kept:
        raise ValueError(f"backend={requested!r} is not available; choose one of {', '.join(kept)}")
    required = "deterministic=True" if deterministic else None
    if promises.leaves:
        required = f"invariant={promises.invariant!r}"
    if required and not kept[requested.removesuffix(FALLBACK)]:
        raise ValueError(
            f"{required} and backend={requested!r}, whose sums are not deterministic, cannot go together; "
            "use backend='auto'"
        )
