"""Results of a benchmark, as plain data and as rows of a table.

Two ratios are reported, as medians over the rounds with their quartiles:

- `of_bound`: time of the bound / time of a backend; 1 is the best possible.
- `against`: time of a backend / time of the best baseline; a backend that is faster has less than 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich import box
from rich.table import Table

from overlap_gemm.spec import OPS
from overlap_gemm.testing.workload import Workload
from overlap_gemm.tuning.driver import Load
from overlap_gemm.tuning.prediction import Prediction
from overlap_gemm.tuning.timing import Timings

from .epilogue_calls import ALONE, backend_of
from .liger_calls import LIGER
from .norm_calls import AFTER, COMPILED, NORM

Mode = Literal["eager", "graph"]
EAGER: Mode = "eager"
GRAPH: Mode = "graph"

OTHERS = ("torch", "torch-symm", "one-shot", "two-shot", "quack")
"""Baselines that a user could call instead of this library."""

UNSTEADY = 0.05
"""Spread of a variant's rounds above which its time is flagged."""

ENOUGH = 0.98
"""Least share of the best variant's speed that `auto` is expected to reach."""


@dataclass(frozen=True)
class Skipped:
    """A variant that could not be timed.

    Attributes:
        name: Name of the variant.
        shape: Shape as ``M,N,K``.
        why: Reason.
    """

    name: str
    shape: str
    why: str


@dataclass
class Measured:
    """A workload's measurements.

    Attributes:
        backends: Backends that could be timed.
        link: Seconds of the op's bytes at the link's measured rate; None if the rate was not measured.
        skipped: Variants that could not be timed.
        taken: For each mode, the backend that runs under each of these names.
        timings: For each mode, times of all variants, "product" and "bound" among them.
        predicted: For each mode, the model's times; None if it has no constants of this machine.
        loads: For each mode, the state of rank 0's GPU after each round.
        epilogue: Name of the epilogue, or None.
        places: For each mode, where the epilogue of a call is applied, as `explain` states it.
    """

    backends: list[str]
    link: float | None
    skipped: list[Skipped]
    taken: dict[Mode, dict[str, str]] = field(default_factory=dict)
    timings: dict[Mode, Timings] = field(default_factory=dict)
    predicted: dict[Mode, Prediction | None] = field(default_factory=dict)
    loads: dict[Mode, list[Load]] = field(default_factory=dict)
    epilogue: str | None = None
    places: dict[Mode, dict[str, str]] = field(default_factory=dict)


def row(workload: Workload, measured: Measured, ranks: int) -> dict[str, Any]:
    """Returns the results of one workload as plain data; times are in seconds."""
    return {
        **asdict(workload),
        "dtype": str(workload.dtype).removeprefix("torch."),
        "ranks": ranks,
        "link": measured.link,
        **({} if measured.epilogue is None else {"epilogue": measured.epilogue}),
        **{mode: _mode(workload, measured, mode, ranks) for mode in measured.timings},
    }


def _mode(workload: Workload, measured: Measured, mode: Mode, ranks: int) -> dict[str, Any]:
    timings = measured.timings[mode]
    predicted = measured.predicted.get(mode)
    others = [name for name in OTHERS if name in timings.seconds]
    best = min(others, key=timings.median) if others else None
    ours: dict[str, dict[str, Any]] = {}
    for name in measured.backends:
        if name not in timings.seconds:  # could not be captured
            continue
        seconds = timings.median(name)
        expected = predicted.seconds.get(measured.taken[mode][name]) if predicted is not None else None
        ours[name] = {
            "taken": measured.taken[mode][name],
            "of_bound": timings.ratio("bound", name),
            "of_bound_quartiles": timings.ratio_range("bound", name),
            "against": None if best is None else timings.ratio(name, best),
            "against_quartiles": None if best is None else timings.ratio_range(name, best),
            "predicted": expected,
            "error": None if expected is None else expected / seconds - 1,
            "tflops": workload.flops(ranks) / seconds / 1e12,
        }
        if measured.epilogue is not None and (alone := backend_of(name) + ALONE) in timings.seconds:
            ours[name]["epilogue"] = measured.places[mode].get(name)
            ours[name]["of_alone"] = timings.ratio(name, alone)
            ours[name]["of_alone_quartiles"] = timings.ratio_range(name, alone)
    return {
        "seconds": {name: timings.median(name) for name in timings.seconds},
        "unsteady": sorted(name for name in timings.seconds if timings.spread(name) > UNSTEADY),
        "clocks_mhz": [load.clock for load in measured.loads.get(mode, ())],
        "power_w": [load.power for load in measured.loads.get(mode, ())],
        "best_other": best,
        "ours": ours,
        "predicted": None
        if predicted is None
        else {**predicted.seconds, "product": predicted.product, "bound": predicted.bound},
    }


def summary(report: Mapping[str, Any]) -> list[str]:
    """Returns a line per mode: speed of `auto` relative to the best variant, and errors of the model.

    With an epilogue a line per shape, mode and backend: times relative to the op alone.
    """
    lines = []
    if any("epilogue" in result for result in report["results"]):
        return [line for result in report["results"] for line in _of_alone(result)]
    for mode in (GRAPH, EAGER):
        shares, errors = [], []
        for result in report["results"]:
            if mode not in result or "auto" not in result[mode]["ours"]:
                continue
            measured, ours = result[mode], result[mode]["ours"]
            times = {name: s for name, s in measured["seconds"].items() if name in (*OTHERS, *ours)}
            shape = f"{OPS[result['op']].label} {result['m']},{result['n']},{result['k']}"
            shares.append((min(times.values()) / times["auto"], shape))
            errors += [(abs(o["error"]), shape) for o in ours.values() if o["error"] is not None]
        if shares:
            below = sum(share < ENOUGH for share, _ in shares)
            share, shape = min(shares)
            line = f"{mode}: auto reaches at least {share:.2f} of the best measured speed ({shape}), "
            line += f"in {below} of {len(shares)} shapes less than {ENOUGH}"
            if errors:
                middle = sorted(errors)[len(errors) // 2][0]
                line += f"; the model errs by {middle:.0%}, at most {max(errors)[0]:.0%} ({max(errors)[1]})"
            lines.append(line)
    return lines


def _of_alone(result: Mapping[str, Any]) -> Iterator[str]:
    shape = f"{OPS[result['op']].label} {result['m']},{result['n']},{result['k']}"
    for mode in (GRAPH, EAGER):
        ours = result.get(mode, {}).get("ours", {})
        for name in (name for name in ours if name == backend_of(name)):
            ratios = [
                f"{ours[one]['of_alone']:.3f} {what}"
                for one, what in (
                    (name, f"with {result['epilogue']}"),
                    (name + COMPILED, "compiled after"),
                    (name + AFTER, "eager after"),
                    (name + LIGER, "with Liger after"),
                    (name + NORM, "with norm of rows' squares"),
                    (name + NORM + COMPILED, "with compiled norm"),
                    (name + NORM + AFTER, "with eager norm"),
                    (name + NORM + LIGER, "with Liger's norm"),
                )
                if "of_alone" in ours.get(one, ())
            ]
            yield f"{mode}: {shape} {name}: of the time alone {', '.join(ratios)}; {ours[name]['epilogue']}"


def table(report: Mapping[str, Any]) -> Table:
    """Returns the table of the results: a line per mode in each row, CUDA graphs above eager calls."""
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
        "backend",
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


def _cells(measured: Mapping[str, Any], name: str) -> tuple[str, ...]:
    def time(variant: str) -> str:
        return _us(measured["seconds"][variant]) + "~" * (variant in measured.get("unsteady", ()))

    first = [time("product"), time("bound")]
    best = measured["best_other"]
    first.append("-" if best is None else f"{best} {time(best)}")
    if name not in measured["ours"]:
        return (f"{name} -", *first, "-", "-", "-", "-")
    ours = measured["ours"][name]
    backend = name if ours["taken"] == name else f"{name}: {ours['taken']}"
    against = "-"
    if ours["against"] is not None:
        low, high = ours["against_quartiles"]
        against = f"{ours['against']:.2f} ({low:.2f}-{high:.2f})"
    error = "-" if ours["error"] is None else f"{ours['error']:+.0%}"
    return (backend, *first, time(name), f"{ours['of_bound']:.2f}", against, error)


def _us(seconds: float) -> str:
    micro = seconds * 1e6
    return f"{micro:.1f}" if micro < 100 else f"{micro:.0f}"
