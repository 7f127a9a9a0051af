"""The one timing protocol of the package: benchmarks, the demo and tuning measure with it and nothing else.

- **Interleaved.** Each round times every variant once, so that a drift of clocks or load meets all of them;
  the order rotates from round to round, so that none always runs behind the same neighbour.
- **Bursts.** A sample is the mean of back-to-back calls after one barrier, not a call between two barriers:
  that is how a model issues them, and launch overlap counts. All ranks use the same burst length.
- **Slowest rank.** A round's sample is the maximum over the ranks: the op is done when its last rank is.
- **Median** over the rounds. Ratios are formed within a round and the median of those is taken, so that noise
  which slows a whole round cancels.

Caches are warm from the call before, except where one call's operands exceed them. Time on CUDA is event time
on the current stream, otherwise wall-clock time.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

MAX_BURST = 1000
"""Calls in a burst at most, however short a call is."""


@dataclass(frozen=True)
class Timings:
    """What `measure` found.

    Attributes:
        seconds: For each variant the time of one call in seconds, one sample per round, each the maximum over
            the ranks. Equal on all ranks.
    """

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, variant: str) -> float:
        """Median time of one call in seconds."""
        return statistics.median(self.seconds[variant])

    def ratio(self, variant: str, other: str) -> float:
        """Median over the rounds of `variant`'s time divided by `other`'s."""
        return statistics.median(self._ratios(variant, other))

    def ratio_range(self, variant: str, other: str) -> tuple[float, float]:
        """First and third quartile of the ratios whose median `ratio` is."""
        low, high = np.quantile(self._ratios(variant, other), [0.25, 0.75])
        return float(low), float(high)

    def _ratios(self, variant: str, other: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[variant], self.seconds[other], strict=True)]


@dataclass(frozen=True)
class FourTimes:
    """The four times of an overlapped op, and ratios of which no single one tells the whole truth.

    Attributes:
        gemm: T_gemm, the same product without communication, in seconds.
        comm: T_comm, the same bytes moved without a product, in seconds.
        sequential: T_seq, one after the other, in seconds.
        overlapped: T_overlap, the op as the backend in question carries it out, in seconds.
        speedup: T_seq / T_overlap, the median of the rounds' ratios.
    """

    gemm: float
    comm: float
    sequential: float
    overlapped: float
    speedup: float

    @classmethod
    def of(cls, timings: Timings, overlapped: str) -> "FourTimes":
        """The four times of the variant `overlapped`, beside variants "gemm", "comm" and "sequential"."""
        return cls(
            gemm=timings.median("gemm"),
            comm=timings.median("comm"),
            sequential=timings.median("sequential"),
            overlapped=timings.median(overlapped),
            speedup=timings.ratio("sequential", overlapped),
        )

    @property
    def hidden(self) -> float | None:
        """The hidden part of the exposed communication, 1 - (T_overlap - T_gemm) / (T_seq - T_gemm).

        Flux's E. Negative where overlapping costs more than it hides; it cannot reach 1 where T_comm exceeds
        T_gemm. None where T_seq does not exceed T_gemm, so that there is nothing to hide.
        """
        exposed = self.sequential - self.gemm
        return 1 - (self.overlapped - self.gemm) / exposed if exposed > 0 else None

    @property
    def roof(self) -> float:
        """max(T_gemm, T_comm) / T_overlap: 1 is a perfect overlap."""
        return max(self.gemm, self.comm) / self.overlapped


def measure(
    variants: Mapping[str, Callable[[], object]],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    rounds: int = 11,
    burst_seconds: float = 0.05,
    after_round: Callable[[], object] | None = None,
) -> Timings:
    """Times several callables against each other by the protocol of this module.

    Args:
        variants: Name and callable; the same names in the same order on all ranks. A callable may be
            collective over `group`. Each is called at least twice before it is timed.
        group: The ranks that take part, each of which must call; None for the world, or for this process
            alone where torch.distributed is not initialised.
        device: Where the callables work: "cuda" times with events on the current stream.
        rounds: Samples per variant.
        burst_seconds: A burst holds as many calls as fill about this time, at least one.
        after_round: Called after each round on every rank, outside of the timing (a progress bar).

    Raises:
        ValueError: No variant, or less than one round.
    """
    if not variants or rounds < 1:
        raise ValueError(f"measure needs a variant and a round, got {list(variants)} and {rounds=}")
    clock = _Clock(torch.device(device), group)
    bursts = {}
    for name, call in variants.items():
        clock.burst(call, 1)
        (first,) = clock.slowest([clock.burst(call, 1)])
        bursts[name] = min(MAX_BURST, max(1, math.ceil(burst_seconds / max(first, 1e-9))))
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        start = round_ % len(names)
        for name in names[start:] + names[:start]:
            samples[name].append(clock.burst(variants[name], bursts[name]))
        if after_round is not None:
            after_round()
    return Timings({name: tuple(clock.slowest(samples[name])) for name in names})


class _Clock:
    """Times bursts on one device, and agrees with the other ranks."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None):
        self.device = device
        self.group = group
        self.alone = not dist.is_initialized()

    def burst(self, call: Callable[[], object], calls: int) -> float:
        """Seconds per call of `calls` calls, on this rank, after all ranks have arrived."""
        self.slowest(
            [0.0]
        )  # a barrier that also has the device idle on return, which dist.barrier leaves open
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / calls
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) / calls

    def slowest(self, seconds: list[float]) -> list[float]:
        """Elementwise maximum over the ranks."""
        if self.alone:
            return seconds
        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.group)
        return times.tolist()
