"""What a benchmark found for one workload, as plain data and as rows of a table.

One way of quoting: `of_bound` is the bound's time divided by ours, 1 is perfect; `against` is our time
divided by the best other's, below 1 is faster. Both are medians over the rounds, with their quartiles.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich import box
from rich.table import Table

from overlap_gemm.spec import OPS
from overlap_gemm.testing.workload import Workload
from overlap_gemm.tuning.driver import Load
from overlap_gemm.tuning.prediction import Prediction
from overlap_gemm.tuning.timing import Timings

Mode = Literal["eager", "graph"]
EAGER: Mode = "eager"
GRAPH: Mode = "graph"

OTHERS = ("torch", "torch-symm", "one-shot", "two-shot", "quack")
"""What a user could call instead of ours."""


UNSTEADY = 0.05
"""Spread of a way's rounds from which on its time is flagged."""

ENOUGH = 0.98
"""Of the best way's speed, what `auto` shall reach."""


@dataclass(frozen=True)
class Skipped:
    """A way that could not be timed on a shape `M,N,K`, and why."""

    way: str
    shape: str
    why: str


@dataclass
class Measured:
    """A workload's measurements.

    Attributes:
        backends: Ours that could be timed.
        link: Seconds of the op's bytes at the link's measured rate, None where it was not measured.
        skipped: What could not be timed.
        taken: By mode, the backend behind each of ours.
        timings: By mode; with variants "product" and "bound".
        predicted: By mode, where the model knows the machine.
        loads: By mode, the state of rank 0's GPU after each round.
    """

    backends: list[str]
    link: float | None
    skipped: list[Skipped]
    taken: dict[Mode, dict[str, str]] = field(default_factory=dict)
    timings: dict[Mode, Timings] = field(default_factory=dict)
    predicted: dict[Mode, Prediction | None] = field(default_factory=dict)
    loads: dict[Mode, list[Load]] = field(default_factory=dict)


def row(workload: Workload, found: Measured, ranks: int) -> dict[str, Any]:
    """One workload's results as plain data; times in seconds."""
    return {
        **asdict(workload),
        "dtype": str(workload.dtype).removeprefix("torch."),
        "ranks": ranks,
        "link": found.link,
        **{mode: _mode(workload, found, mode, ranks) for mode in found.timings},
    }


def _mode(workload: Workload, found: Measured, mode: Mode, ranks: int) -> dict[str, Any]:
    timings = found.timings[mode]
    predicted = found.predicted.get(mode)
    others = [name for name in OTHERS if name in timings.seconds]
    best = min(others, key=timings.median) if others else None
    ours = {}
    for name in found.backends:
        if name not in timings.seconds:  # could not be captured
            continue
        seconds = timings.median(name)
        expected = predicted.seconds.get(found.taken[mode][name]) if predicted is not None else None
        ours[name] = {
            "taken": found.taken[mode][name],
            "of_bound": timings.ratio("bound", name),
            "of_bound_quartiles": timings.ratio_range("bound", name),
            "against": None if best is None else timings.ratio(name, best),
            "against_quartiles": None if best is None else timings.ratio_range(name, best),
            "predicted": expected,
            "error": None if expected is None else expected / seconds - 1,
            "tflops": workload.flops(ranks) / seconds / 1e12,
        }
    return {
        "seconds": {name: timings.median(name) for name in timings.seconds},
        "unsteady": sorted(name for name in timings.seconds if timings.spread(name) > UNSTEADY),
        "clocks_mhz": [load.clock for load in found.loads.get(mode, ())],
        "power_w": [load.power for load in found.loads.get(mode, ())],
        "best_other": best,
        "ours": ours,
        "predicted": None
        if predicted is None
        else {**predicted.seconds, "product": predicted.product, "bound": predicted.bound},
    }


def summary(report: Mapping[str, Any]) -> list[str]:
    """A line per mode: how near `auto` comes to the best measured way, and the model to the truth."""
    lines = []
    for mode in (GRAPH, EAGER):
        shares, errors = [], []
        for result in report["results"]:
            if mode not in result or "auto" not in result[mode]["ours"]:
                continue
            found = result[mode]
            ways = {name: s for name, s in found["seconds"].items() if name in (*OTHERS, *found["ours"])}
            shape = f"{OPS[result['op']].label} {result['m']},{result['n']},{result['k']}"
            shares.append((min(ways.values()) / ways["auto"], shape))
            errors += [(abs(o["error"]), shape) for o in found["ours"].values() if o["error"] is not None]
        if shares:
            below = sum(share < ENOUGH for share, _ in shares)
            share, shape = min(shares)
            line = f"{mode}: auto reaches at least {share:.2f} of the best way measured ({shape}), "
            line += f"in {below} of {len(shares)} shapes less than {ENOUGH}"
            if errors:
                middle = sorted(errors)[len(errors) // 2][0]
                line += f"; the model errs by {middle:.0%}, at most {max(errors)[0]:.0%} ({max(errors)[1]})"
            lines.append(line)
    return lines


def table(report: Mapping[str, Any]) -> Table:
    """The results, two lines a row: CUDA graphs above eager calls, where there are both."""
    machine = report["machine"]
    results = report["results"]
    modes = [mode for mode in (GRAPH, EAGER) if any(mode in result for result in results)]
    kinds = {f"{one['dtype']} ({one['scales']})" if one["scales"] else one["dtype"] for one in results}
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in report["link_rates"].items())
    drawn = Table(
        title=f"{machine['ranks']} x {machine['processor']}, {', '.join(kinds)}, microseconds, "
        f"{' / '.join(modes)}; "
        f"{report['protocol']}{'; link: ' + rates if rates else ''}; ~: rounds differ by more than "
        f"{UNSTEADY:.0%}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    drawn.add_column("op, shape M,N,K", no_wrap=True)
    columns = (
        "way",
        "product",
        "bound",
        "best other",
        "ours",
        "of\nbound",
        "/ best other\n(quartiles)",
        "model\nerror",
    )
    for heading in columns:
        drawn.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        shape = f"{result['m']},{result['n']},{result['k']}"
        title = f"{result['name'] or result['op']}\n{OPS[result['op']].label} {shape}"
        for name in dict.fromkeys(name for mode in modes for name in result[mode]["ours"]):
            cells = [_cells(result[mode], name) for mode in modes]
            drawn.add_row(title, *("\n".join(lines) for lines in zip(*cells, strict=True)))
            title = ""
    return drawn


def _cells(found: Mapping[str, Any], name: str) -> tuple[str, ...]:
    def time(way: str) -> str:
        return _us(found["seconds"][way]) + "~" * (way in found.get("unsteady", ()))

    first = [time("product"), time("bound")]
    best = found["best_other"]
    first.append("-" if best is None else f"{best} {time(best)}")
    if name not in found["ours"]:
        return (f"{name} -", *first, "-", "-", "-", "-")
    ours = found["ours"][name]
    way = name if ours["taken"] == name else f"{name}: {ours['taken']}"
    against = "-"
    if ours["against"] is not None:
        low, high = ours["against_quartiles"]
        against = f"{ours['against']:.2f} ({low:.2f}-{high:.2f})"
    error = "-" if ours["error"] is None else f"{ours['error']:+.0%}"
    return (way, *first, time(name), f"{ours['of_bound']:.2f}", against, error)


def _us(seconds: float) -> str:
    micro = seconds * 1e6
    return f"{micro:.1f}" if micro < 100 else f"{micro:.0f}"
