"""The pictures: what of its bound every way reaches, and who computed and transferred when."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..runtime.spans import Span
from .results import EAGER, GRAPH, OTHERS

PALETTE = ("#9d9da1", "#4c78a8", "#54a24b", "#f58518", "#b279a2", "#e45756")
SPAN_COLOURS = {"compute": "#4c78a8", "transfer": "#f58518"}
mpl.rcParams["font.size"] = 8


def draw_bounds(report: Mapping[str, Any], file: Path) -> None:
    """Draws a benchmark report: how much of its bound each way reaches, and what the model said."""
    results = report["results"]
    mode = GRAPH if any(GRAPH in result for result in results) else EAGER
    names = list(
        dict.fromkeys(
            name for r in results for name in (*OTHERS, *r[mode]["ours"]) if name in r[mode]["seconds"]
        )
    )
    figure = Figure(figsize=(8, 1.2 + len(results) * (0.2 + 0.12 * len(names))), layout="constrained")
    axes = figure.add_subplot()
    height = 0.85 / len(names)
    for slot, name in enumerate(names):
        shares = {
            place: r[mode]["seconds"]["bound"] / r[mode]["seconds"][name]
            for place, r in enumerate(results)
            if name in r[mode]["seconds"]
        }
        places = [place + (slot + 0.5) * height - 0.425 for place in shares]
        axes.barh(places, list(shares.values()), height, color=PALETTE[slot % len(PALETTE)], label=name)
        expected = [
            (at, results[place][mode]["seconds"]["bound"] / found["predicted"])
            for at, place in zip(places, shares, strict=True)
            if (found := results[place][mode]["ours"].get(name)) and found["predicted"]
        ]
        axes.plot([x for _, x in expected], [y for y, _ in expected], "k|", markersize=5)
    axes.set_yticks(range(len(results)), [_label(result) for result in results])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xlabel(f"bound / time, {mode} (1: the bound is reached; black: where the model expected it)")
    axes.set_title(f"How near each way comes to its bound: longer is better\n{where(report)}", loc="left")
    figure.legend(loc="outside lower center", ncols=len(names))
    figure.savefig(file, dpi=150)


def where(report: Mapping[str, Any]) -> str:
    """What a benchmark ran on, for a picture's title."""
    machine = report["machine"]
    dated = [f"torch {machine['torch']}"] * ("torch" in machine) + [machine["date"]] * ("date" in machine)
    return ", ".join([f"{machine['ranks']} x {machine['processor']}", machine["carrier"], *dated])


def _label(result: Mapping[str, Any]) -> str:
    return f"{result['op']} {result['name']}\n{result['m']},{result['n']},{result['k']} {result['dtype']}"


def draw_timelines(timelines: Mapping[str, Mapping[str, Sequence[Sequence[Span]]]], file: Path) -> None:
    """Draws who computes and who transfers when.

    Args:
        timelines: For each op and backend the spans of each rank.
        file: Where to; the ending decides the format.
    """
    ranks = max(len(spans) for by_backend in timelines.values() for spans in by_backend.values())
    rows, columns = len(timelines), max(len(by_backend) for by_backend in timelines.values())
    figure = Figure(figsize=(5 * columns, rows * (1 + 0.5 * ranks)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex="row")
    for axes_row, (op, by_backend) in zip(grid, timelines.items(), strict=True):
        for axes, (backend, by_rank) in zip(axes_row, by_backend.items(), strict=True):
            axes.set_title(f"{op}, {backend}", loc="left")
            _draw_ranks(axes, by_rank)
    figure.suptitle("Who computes and who transfers when: overlap is both at once", x=0.01, ha="left")
    handles = [Patch(color=colour, label=kind) for kind, colour in SPAN_COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.savefig(file, dpi=150)


def _draw_ranks(axes: Axes, by_rank: Sequence[Sequence[Span]]) -> None:
    lanes = [(rank, kind) for rank in range(len(by_rank)) for kind in SPAN_COLOURS]
    for rank, spans in enumerate(by_rank):
        for found in spans:
            place = lanes.index((rank, found.kind))
            width = (found.end - found.begin) * 1e3
            colour = SPAN_COLOURS[found.kind]
            axes.barh(place, width, left=found.begin * 1e3, height=0.7, color=colour, edgecolor="white")
    axes.set_yticks(range(len(lanes)), [f"rank {rank} {kind}" for rank, kind in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the call began")
