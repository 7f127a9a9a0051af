"""The one timing protocol of the package: benchmarks, the demo and tuning measure with it and nothing else.

- **Interleaved.** Each round times every variant once, so that a drift of clocks or load meets all of them;
  the order rotates from round to round, so that none always runs after the same neighbour.
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

    def with_bound(self, link: float) -> "Timings":
        """With a variant "bound": round by round the larger of variant "product" and `link` seconds."""
        bound = tuple(max(product, link) for product in self.seconds["product"])
        return Timings({**self.seconds, "bound": bound})

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

    def spread(self, variant: str) -> float:
        """Returns the interquartile range of the rounds, relative to their median."""
        low, high = np.quantile(self.seconds[variant], [0.25, 0.75])
        return float(high - low) / self.median(variant)

    def _ratios(self, variant: str, other: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[variant], self.seconds[other], strict=True)]


@dataclass(frozen=True)
class Replay:
    """A CUDA graph of several calls, to be timed in place of them.

    Attributes:
        graph: What was captured.
        calls: Calls in it.
    """

    graph: torch.cuda.CUDAGraph
    calls: int

    def __call__(self) -> None:
        """Replays all of them."""
        self.graph.replay()


def captured(call: Callable[[], object], calls: int = 8) -> Replay:
    """A graph of `calls` calls: their time without the host's. Two calls before make what graphs cannot."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return Replay(graph, calls)


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
            collective over `group`, and a `Replay` of several calls. Each is called at least twice before it
            is timed.
        group: The ranks that take part, each of which must call; None for the world, or for this process
            alone where torch.distributed is not initialised.
        device: Where the callables work: "cuda" times with events on the current stream.
        rounds: Samples per variant.
        burst_seconds: A burst holds as many calls as fill about this time, at least one.
        after_round: Called after each round, for example to read the clocks.

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
    calls = {name: call.calls if isinstance(call, Replay) else 1 for name, call in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        start = round_ % len(names)
        for name in names[start:] + names[:start]:
            samples[name].append(clock.burst(variants[name], bursts[name]) / calls[name])
        if after_round is not None:
            after_round()
    return Timings({name: tuple(clock.slowest(samples[name])) for name in names})


class _Clock:
    """Times bursts on one device, and agrees with the other ranks."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None):
        self.device, self.group = device, group

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
        """`slowest` of the ranks."""
        return slowest(seconds, self.device, self.group)


def slowest(seconds: list[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Elementwise maximum over the ranks of a group; what this process says where it is alone."""
    if not dist.is_initialized():
        return seconds
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return times.tolist()
