"""The timing protocol of the package, used by all benchmarks, the demo and tuning.

- **Interleaved.** Each round times every variant once, so that a drift of clocks or load affects all of them.
  Its order changes from round to round: each variant follows each other one equally often. Power and caches
  are as the one before left them: on an H200 at its limit, that alone moved the same call by up to 3.5 %.
- **Bursts.** A sample is the mean of back-to-back calls after one barrier, not one call between two barriers.
  Models issue calls in this way, and launch overlap counts. All ranks use the same burst length.
- **Slowest rank.** A sample is the maximum over the ranks: an op is complete when its last rank is.
- **Median** over the rounds. Ratios are computed within a round, and their median is taken, so that noise
  which slows a full round cancels.

Caches are warm from the call before, unless one call's operands exceed them. Times on CUDA are event times on
the current stream, otherwise wall-clock times.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

MAX_BURST = 1000
"""Maximum number of calls in a burst."""


@dataclass(frozen=True)
class Timings:
    """Result of `measure`.

    Attributes:
        seconds: Time of one call in seconds, by variant: one sample per round, each the maximum over the
            ranks. Equal on all ranks.
    """

    seconds: Mapping[str, tuple[float, ...]]

    def with_bound(self, link: float) -> "Timings":
        """Returns the timings with a variant "bound": per round max("product", `link` seconds)."""
        bound = tuple(max(product, link) for product in self.seconds["product"])
        return Timings({**self.seconds, "bound": bound})

    def median(self, variant: str) -> float:
        """Returns the median time of one call in seconds."""
        return statistics.median(self.seconds[variant])

    def ratio(self, variant: str, other: str) -> float:
        """Returns the median over the rounds of `variant`'s time divided by `other`'s."""
        return statistics.median(self._ratios(variant, other))

    def ratio_range(self, variant: str, other: str) -> tuple[float, float]:
        """Returns the first and third quartile of the ratios whose median is `ratio`."""
        low, high = np.quantile(self._ratios(variant, other), [0.25, 0.75])
        return float(low), float(high)

    def summary(self, base: str) -> dict[str, dict[str, object]]:
        """Returns, for result files, by variant: microseconds, and the ratios to `base` with quartiles."""
        return {
            "us": {name: round(self.median(name) * 1e6, 2) for name in self.seconds},
            "ratio": {name: round(self.ratio(name, base), 4) for name in self.seconds},
            "quartiles": {
                name: [round(quartile, 4) for quartile in self.ratio_range(name, base)]
                for name in self.seconds
            },
        }

    def spread(self, variant: str) -> float:
        """Returns the interquartile range of the rounds, relative to their median."""
        low, high = np.quantile(self.seconds[variant], [0.25, 0.75])
        return float(high - low) / self.median(variant)

    def _ratios(self, variant: str, other: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[variant], self.seconds[other], strict=True)]


@dataclass(frozen=True)
class Replay:
    """CUDA graph of several calls, timed in place of them.

    Attributes:
        graph: Captured graph.
        calls: Number of calls in the graph.
    """

    graph: torch.cuda.CUDAGraph
    calls: int

    def __call__(self) -> None:
        """Replays all calls."""
        self.graph.replay()


def captured(call: Callable[[], object], calls: int = 8) -> Replay:
    """Returns a graph of `calls` calls, to measure their time without the host's.

    Two eager calls before the capture allocate and compile, which is not possible in a capture.
    """
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
        variants: Callables by name; the same names in the same order on all ranks. A callable may be
            collective over `group`, or a `Replay` of several calls. Each is called at least twice before it
            is timed.
        group: Group of the ranks, all of which must call; None: the world, or this process alone if
            torch.distributed is not initialized.
        device: Device of the callables' work; "cuda" uses events on the current stream.
        rounds: Samples per variant.
        burst_seconds: Approximate duration of a burst, which has at least one call.
        after_round: Function that is called after each round, for example to read the clocks.

    Raises:
        ValueError: There is no variant or no round.
    """
    if not variants or rounds < 1:
        raise ValueError(
            f"measure: needs at least one variant and one round, got {list(variants)} and {rounds=}"
        )
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
        for name in order_of_round(names, round_):
            samples[name].append(clock.burst(variants[name], bursts[name]) / calls[name])
        if after_round is not None:
            after_round()
    return Timings({name: tuple(clock.slowest(samples[name])) for name in names})


def order_of_round(names: Sequence[str], round_: int) -> list[str]:
    """Returns the variants in the order of a round.

    It is a row of a balanced Latin square (Williams design) of n variants. After n rounds each variant had
    each place, and each other variant before it, equally often; if n is odd, after 2 n rounds.
    """
    count = len(names)
    steps = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(count)]  # 0, 1, -1, 2, -2, ...
    order = [names[(step + round_) % count] for step in steps]
    return order[::-1] if count % 2 and round_ % 2 else order


class _Clock:
    """Timer of bursts on one device, synchronized with the other ranks."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None):
        self.device, self.group = device, group

    def burst(self, call: Callable[[], object], calls: int) -> float:
        """Returns the seconds per call of a burst on this rank, which begins after all ranks have arrived."""
        # A barrier after which the device is idle; dist.barrier does not guarantee that.
        self.slowest([0.0])
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
        """Returns the elementwise maximum over the ranks."""
        return slowest(seconds, self.device, self.group)


def slowest(seconds: list[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Returns the elementwise maximum over the ranks of a group; for a single process, its own values."""
    if not dist.is_initialized():
        return seconds
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return times.tolist()
