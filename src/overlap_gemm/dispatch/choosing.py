"""From an op's arguments to what carries it out: the backend is chosen, agreed on, and bound."""

import gc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.autotuning import bind_as, measure_if_due
from ..backends.base import Problem
from ..backends.select import announce, choose
from ..config.scale_blocks import Blocks
from ..runtime import agree
from ..runtime.group import Group, resolve
from ..runtime.order import is_capturing
from ..spec import OpSpec
from ..spec.sharding import Shards
from ..tuning.settings import configured, late_weights, settings
from .options import Passed
from .registered import Run


class Chosen(NamedTuple):
    """Who carries a call out.

    Attributes:
        backend: its name.
        run: what it does.
    """

    backend: str
    run: Run


def chosen(
    op: OpSpec,
    x: Tensor,
    weight: Any,
    bias: Any,
    extents: tuple[int, int | None, int | None],
    shards: Shards,
    options: Passed,
    keep: bool = False,
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
) -> Chosen:
    """Chooses the backend, in debug mode after all ranks have compared notes.

    Args:
        op: Of the backend.
        x: As for the backend, contiguous or not.
        weight: As for the backend.
        bias: As for the backend.
        extents: (m, n, k) of `Problem`.
        shards: As for the backend.
        options: As the ops take them.
        keep: As for `Problem`.
        out_dtype: As for `Problem`; what runs takes scales then.
        blocks: As for `Problem`.
    """
    backend, reserve_sms = options.backend, options.reserve_sms
    ranks = resolve(options.group)
    several = isinstance(bias, (list, tuple))
    weight_dtype = None if out_dtype is None else (weight[0] if several else weight).dtype
    scaled = (weight_dtype, out_dtype, blocks)
    of_call = options.deterministic, backend, keep
    problem = Problem.of(op.name, *extents, x, ranks, *of_call, scaled, options.promises)
    facts = (
        *problem.agreed(),
        ("chunk", shards.chunk),
        ("weights", len(weight) if several else 1),
        ("bias", len(bias) > 0 if several else bias is not None),
        *options.agreed(),
        *settings().agreed(op),
    )
    try:
        choice = choose(problem, backend)
    except ValueError as error:  # it may be this rank's alone, whose device has no such kernels, say
        agree.same(ranks, x.device, (*facts, agree.failure(error)))
        raise
    agree.same(ranks, x.device, facts)
    if measure_if_due(problem, backend, x, weight, bias, shards, ranks):
        choice = choose(problem, backend)
    announce(choice)
    group = agree.of_calls(ranks, x.device, facts) if choice.backend.verifies else ranks
    with configured(reserve_sms=reserve_sms), late_weights(options.copied_weight):
        run = bind_as(choice.kernel, choice.backend, problem, x, weight, bias, shards, group)
    if reserve_sms is not None:
        run = configured(reserve_sms=reserve_sms)(run)
    name, what = choice.backend.name, f"M={problem.m} width={problem.width} {problem.types} P={ranks.size}"
    count = calls.setdefault((op.name, name), [0])
    return Chosen(name, _ranged(f"overlap_gemm {op.name} {what} {name}", run, ranks, count))


calls: dict[tuple[str, str], list[int]] = {}
"""How many calls of an op, by a backend, have begun in this process."""


def _ranged(name: str, run: Run, group: Group, count: list[int]) -> Run:
    """`run` in a range of that name for whoever profiles: torch.profiler, or NVTX.

    Once more with torch's cache freed, where there was no memory before anything was launched or sent.
    """

    def ranged(*operands: Any) -> Any:
        count[0] += 1
        before = group.progress.events
        try:
            if not torch.autograd._profiler_enabled():
                return run(*operands)
            with torch.autograd.profiler.record_function(name):
                return run(*operands)
        except torch.OutOfMemoryError:
            if group.progress.events != before or is_capturing(operands[0].device):
                raise
        gc.collect()
        torch.cuda.empty_cache()
        return run(*operands)

    return ranged
