"""Choice of the backend of a call: the ranks compare the call, choose alike, and bind the backend."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..backends import select
from ..backends.autotuning import bind_as, measure_if_due
from ..backends.base import Problem
from ..backends.epilogues import applied_after
from ..backends.op_call import NO_OPERANDS, CallOperands, OpCall, operands_of
from ..backends.select import Choice, check_order, choose, log_choice
from ..runtime import agree
from ..runtime.group import Group, resolve
from ..runtime.order import is_capturing
from ..spec import OpSpec
from ..tuning.settings import configured, late_weights, settings
from .registered import Run


class Chosen(NamedTuple):
    """Backend of a call.

    Attributes:
        backend: Name of the backend.
        run: Function from the op's tensors to its result.
    """

    backend: str
    run: Run


def chosen(op: OpSpec, call: OpCall, operands: CallOperands) -> Chosen:
    """Returns the chosen backend, bound to the call. Collective in debug mode and where facts are unknown.

    In debug mode all ranks compare the call first. With backend "auto", the first call of a kind may probe
    peer access and benchmark candidates. "auto" may take another backend while a CUDA graph is captured,
    because replays have no host time. That one also runs the first call: a capture cannot prepare it.

    Args:
        op: Definition of the op.
        call: Lowered call.
        operands: Operands, as in `Backend.bind`.

    Raises:
        ValueError: No backend can run the call, or the requested one cannot, on all ranks.
        DisagreementError: On every rank: the ranks' calls differ, or only some ranks have no backend. Calls
            are compared at the first call with these facts, in debug mode at every call.
    """
    ranks = resolve(call.group)
    problem, choice, facts = _agreed_choice(op, call, operands)
    log_choice(choice)
    run = _bound(choice, problem, operands, ranks, facts)
    captured = replace(problem, captured=True)
    in_graphs = choose(captured, call.backend)
    if in_graphs.backend is not choice.backend:
        _prepare(in_graphs, captured, operands, ranks, facts)
    name, what = choice.backend.name, f"M={problem.m} width={problem.width} {problem.types} P={ranks.size}"
    count = calls.setdefault((op.name, name), [0])
    return Chosen(
        name,
        _ranged(f"overlap_gemm {op.name} {what} {name}", run, problem.applying is not None, ranks, count),
    )


def is_followed(op: OpSpec, call: OpCall, operands: CallOperands) -> bool:
    """Returns whether other operations of torch are to follow the op, because no kernel applies its epilogue.

    The operations are assumed to be one pass over memory. If a kernel applies it while a CUDA graph is
    captured, the first call also runs that one, as in `chosen`.

    The result is the same on every rank. Collective like `chosen`.

    Args:
        op: Definition of the op.
        call: Lowered call with an epilogue.
        operands: Operands, as in `Backend.bind`.
    """
    ranks = resolve(call.group)
    problem, choice, facts = _agreed_choice(op, call, operands)
    if problem.num_weights > 1 and problem.n is None:
        return True  # columns= is not passed, so the weights of the other ranks are unknown
    columns, captured = len(operands.lists(op)[0][0]), replace(problem, captured=True)
    if select.why_after(choice, problem, columns) is None:
        return False
    in_graphs = choose(captured, call.backend)
    if select.why_after(in_graphs, captured, columns) is None:
        _prepare(in_graphs, captured, operands, ranks, facts)
    return True


def _agreed_choice(op: OpSpec, call: OpCall, operands: CallOperands) -> tuple[Problem, Choice, Any]:
    """Returns a call's problem, the choice of its backend, and the facts that the ranks compared."""
    ranks = resolve(call.group)
    problem = Problem.of(op.name, call, operands, ranks)
    device, requested = operands.x.device, call.backend
    facts = problem.agreed() + settings().agreed(op)
    try:
        choice = choose(problem, requested)
        check_order(choice, operands)
    except ValueError as error:  # this rank alone may fail, for example by its device: the peers wait
        agree.same(ranks, device, (*facts, agree.failure(error)), every_time=True)
        raise
    agree.same(ranks, device, facts)
    plain = problem.without_epilogue()
    if measure_if_due(plain, requested, operands, problem.shards, ranks):
        choice = choose(problem, requested)
        facts = problem.agreed() + settings().agreed(op)  # as in later calls: the times are among them
        ranks.agreed.add(facts)
    return problem, choice, facts


def _prepare(
    in_graphs: Choice, captured: Problem, operands: CallOperands, ranks: Group, facts: agree.Facts
) -> None:
    """Runs a call by its choice in captured graphs, in which nothing can be compiled or allocated.

    Only the first call with these facts does: they are equal on all ranks, so all run it.
    """
    key = "before captures", captured.call.epilogue, *facts
    if key in ranks.agreed:
        return
    progress = ranks.progress
    ranks.agreed.add(key)
    launched = progress.events
    try:
        run = _bound(in_graphs, captured, operands, ranks, facts)
        with torch.no_grad():
            _ranged(f"overlap_gemm {captured.op} before captures", run, False, ranks, [0])(*operands)
    except BaseException:
        if progress.events == launched:  # the peers wait in it; else they have gone on to the call itself
            ranks.agreed.discard(key)
        raise
    finally:
        progress.events = launched  # the call itself has launched nothing, and may still be retried


def _bound(
    choice: Choice, problem: Problem, operands: CallOperands, ranks: Group, facts: agree.Facts
) -> Callable[[CallOperands], Any]:
    """Returns the bound function; the backend applies the epilogue if it can, else torch does after it."""
    group = replace(ranks, signed=problem.call.signed)
    if choice.backend.verifies:
        group = agree.of_calls(group, operands.x.device, facts)
    arguments, (weights, _) = (operands, problem.shards, group), operands.lists(problem.spec)
    reserve, applying = problem.call.reserve_sms, problem.applying
    why = None if applying is None else select.why_after(choice, problem, len(weights[0]))
    if why is not None and choice.backend.name == "fused" and group.is_virtual:
        _refuse_virtual(problem, why)
    bare = problem if why is None else problem.without_epilogue()
    with configured(reserve_sms=reserve), late_weights(problem.call.copied_weight):
        run = bind_as(choice.kernel, choice.backend, bare, *arguments)
    if applying is not None and why is not None:
        run = applied_after(run, applying)
    return run if reserve is None else configured(reserve_sms=reserve)(run)


def _refuse_virtual(problem: Problem, why: str) -> None:
    """Raises ValueError: torch would apply the epilogue before a virtual rank's kernel has run."""
    assert problem.applying is not None
    raise ValueError(
        f"{problem.op}: a virtual rank's kernel runs later, so torch cannot apply the epilogue "
        f"{problem.applying.visitor.name} after it; the kernel does not apply it: {why}"
    )


calls: dict[tuple[str, str], list[int]] = {}
"""Numbers of calls begun in this process, by (op, backend); each is a list of one number, to be changed."""


def _ranged(
    name: str, run: Callable[[CallOperands], Any], has_inputs: bool, group: Group, count: list[int]
) -> Run:
    """Returns a function that runs `run` in a profiler range (torch.profiler or NVTX) and counts the call.

    If a call runs out of GPU memory before it launches or sends anything, torch's cache is emptied and the
    call is repeated once; the peers wait meanwhile. During capture it is not repeated. A later or second
    failure is raised; then the call counts as skipped only if nothing was launched or sent.

    Args:
        name: Name of the range.
        run: Bound function of the backend.
        has_inputs: Whether the op has an epilogue, whose inputs are between the bias and the scales.
        group: Group of the call.
        count: List of one number, to which each call adds 1.
    """

    def ranged(*tensors: Any) -> Any:
        count[0] += 1
        if has_inputs:
            tensors = *tensors[:3], *(tensors[4:] or (None, None)), tensors[3]
        operands: CallOperands = operands_of(tensors + NO_OPERANDS[len(tensors) :])
        before = group.progress.events
        try:
            if not torch.autograd._profiler_enabled():
                return run(operands)
            with torch.autograd.profiler.record_function(name):
                return run(operands)
        except torch.OutOfMemoryError:
            if group.progress.events != before or is_capturing(operands.x.device):
                raise
        gc.collect()
        torch.cuda.empty_cache()
        return run(operands)

    return ranged
