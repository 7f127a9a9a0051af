"""The pictures: four times per op and shape, and who computed and transferred when."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..runtime.spans import Span

COLOURS = {"gemm": "#4c78a8", "comm": "#f58518", "sequential": "#9d9da1", "overlapped": "#54a24b"}
SPAN_COLOURS = {"compute": "gemm", "transfer": "comm"}
mpl.rcParams["font.size"] = 8


def draw_four_times(report: Mapping[str, Any], file: Path) -> None:
    """Draws a benchmark report: a group of four bars per result, as parts of its T_seq."""
    results = report["results"]
    figure = Figure(figsize=(8, 0.9 + 0.55 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    labels = {"gemm": "T_gemm", "comm": "T_comm", "sequential": "T_seq", "overlapped": "T_overlap"}
    for slot, (name, label) in enumerate(labels.items()):
        places = [index + (slot - 1.5) * 0.2 for index in range(len(results))]
        parts = [result["seconds"][name] / result["seconds"]["sequential"] for result in results]
        axes.barh(places, parts, height=0.18, color=COLOURS[name], label=label)
    axes.set_yticks(range(len(results)), [_label(result) for result in results])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xlabel("time / T_seq (left of 1 is faster than one after the other)")
    machine = report["machine"]
    axes.set_title(f"{machine['ranks']} ranks, {machine['processor']}, {machine['carrier']}", loc="left")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=150)


def _label(result: Mapping[str, Any]) -> str:
    shape = f"{result['m']},{result['n']},{result['k']} {result['dtype']}"
    return f"{result['op']} {result['name']}\n{shape}, {result['backend']}, {result['speedup']:.2f}x"


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
    handles = [Patch(color=COLOURS[key], label=kind) for kind, key in SPAN_COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.savefig(file, dpi=150)


def _draw_ranks(axes: Axes, by_rank: Sequence[Sequence[Span]]) -> None:
    lanes = [(rank, kind) for rank in range(len(by_rank)) for kind in SPAN_COLOURS]
    for rank, spans in enumerate(by_rank):
        for found in spans:
            place = lanes.index((rank, found.kind))
            width = (found.end - found.begin) * 1e3
            colour = COLOURS[SPAN_COLOURS[found.kind]]
            axes.barh(place, width, left=found.begin * 1e3, height=0.7, color=colour, edgecolor="white")
    axes.set_yticks(range(len(lanes)), [f"rank {rank} {kind}" for rank, kind in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the call began")
