"""Random sequences on portable backends: every result is right, or an error names why on every rank."""

import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.cli.soak import BURST, run, steps
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.runtime.group import find
from overlap_gemm.tuning.settings import settings

BACKENDS = ("auto", "torch", "sequential", "decomposed")
CPU = torch.device("cpu")
FAULTS = ("order", "skip", "arguments", "memory", "settings", "group")
ALGORITHMS = (None, "one_shot", "two_shot")


class Sequence:
    """A random sequence on one rank: bursts of `overlap-gemm soak`, and after each a fault of one rank.

    Args:
        rank: This rank.
        size: Number of ranks.
        backend: Backend of all calls.
        seed: Seed, equal on all ranks.
    """

    def __init__(self, rank, size, backend, seed):
        self.rank, self.size = rank, size
        self.draw = random.Random(f"{seed} {backend}")
        self.group = dist.new_group()
        drawn = (replace(step, backend=backend) for step in steps(seed, 16, size, CPU))
        self.program = filter(self.is_supported, drawn)
        self.counts = Counter()

    def burst(self):
        """Makes right calls: none of them may raise, and all results must be right."""
        drawn = list(islice(self.program, BURST))
        record = run(iter(drawn), find(self.group), CPU, 0.0)
        assert not record.failures and not record.refused, record
        self.counts.update(record.events, right=BURST)
        self.counts["scaled"] += sum(step.workload.scales is not None for step in drawn)

    def arguments(self, step):
        """Returns the tensors of a step, and its keyword arguments."""
        workload = step.workload
        operands = workload.operands(find(self.group), CPU)
        how = {**workload.arguments, **operands.scales, **step.options, "group": self.group}
        return operands.x, operands.weight, {**how, "backend": step.backend}

    def is_supported(self, step):
        """Returns whether the backend supports a step."""
        x, weight, how = self.arguments(step)
        try:
            return bool(overlap_gemm.explain(step.workload.op, x, weight, **how))
        except ValueError:
            return False

    def call(self, step):
        """Makes the call of a step."""
        x, weight, how = self.arguments(step)
        return getattr(overlap_gemm, step.workload.op)(x, weight, **how)

    def different(self, count):
        """Draws steps of which ranks can tell each from each."""
        kinds = {}
        while len(kinds) < count:
            step = next(self.program)
            kinds.setdefault((step.workload.op, step.workload.m, step.workload.dtype), step)
        return list(kinds.values())

    def is_named(self, call, *arguments):
        """Checks that a call raises the same named error on every rank."""
        with pytest.raises(DisagreementError) as caught:
            call(*arguments)
        texts = [None] * self.size
        dist.all_gather_object(texts, str(caught.value).partition(": ")[2])
        assert len(set(texts)) == 1, texts
        self.counts["named"] += 1

    def fault(self, kind):
        """Makes calls in which one rank differs, and those that bring the ranks in step again."""
        odd = self.draw.randrange(self.size)
        is_odd = self.rank == odd
        if kind in ("order", "skip"):
            calls = self.different(2 if kind == "order" else 3)
            for step in calls[1:] + calls[:1] if is_odd else calls:  # what is skipped is made up for
                self.is_named(self.call, step)
        elif kind in ("arguments", "memory"):
            (step,) = self.different(1)
            error = self.refused(step, kind) if is_odd else None
            self.is_named(self.call, step)
            if is_odd:
                with overlap_gemm.retry(error):
                    self.call(step)
            else:
                self.call(step)
        elif kind == "settings":
            (step,), chosen = self.different(1), self.draw.sample(ALGORITHMS, 2)
            with overlap_gemm.configured(algorithm=chosen[is_odd]):
                everyone = [None] * self.size
                dist.all_gather_object(everyone, settings().agreed(step.workload.spec))
                if len(set(everyone)) > 1:
                    self.is_named(self.call, step)
                else:
                    self.call(step)
        else:
            closed, (step,) = self.group, self.different(1)
            dist.destroy_process_group(closed)
            with pytest.raises(Exception, match="destroyed"):
                self.call(step)
            self.group = dist.new_group()

    def refused(self, step, kind):
        """Makes a call that this rank refuses; returns the error."""

        def no_memory(*_, **__):
            raise MemoryError("planted")

        if kind == "arguments":
            x, weight, how = self.arguments(step)
            with pytest.raises(ValueError, match=step.workload.op) as caught:
                getattr(overlap_gemm, step.workload.op)(x, weight[None], **how)
        else:
            with (
                mock.patch.object(torch, "mm", no_memory),
                mock.patch.object(torch.Tensor, "new_empty", no_memory),
                pytest.raises(MemoryError) as caught,
            ):
                self.call(step)
        return caught.value


def sequence(rank, size, backend, seed, calls):
    """Makes at least that many calls; returns what was made."""
    made, faults = Sequence(rank, size, backend, seed), []
    while made.counts["right"] + made.counts["named"] < calls:
        made.burst()
        for _ in range(2):
            faults = faults or made.draw.sample(FAULTS, len(FAULTS))
            made.fault(kind := faults.pop())
            made.counts[kind] += 1
    made.burst()
    return made.counts


@pytest.mark.parametrize(("world", "calls"), [(2, 40), pytest.param(3, 300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_sequence_is_right_or_named_on_every_rank(ranks, backend, world, calls):
    counts, *others = ranks(world).run(sequence, backend, 1, calls)
    assert all(other == counts for other in others)
    assert all(counts[kind] for kind in (*FAULTS, "scaled", "lag", "fail on one rank", "close workspaces"))
