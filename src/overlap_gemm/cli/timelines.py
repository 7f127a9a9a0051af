"""Picture of computations and transfers over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..tuning.spans import Span

SPAN_COLORS = {"compute": "#4c78a8", "transfer": "#f58518"}
mpl.rcParams["font.size"] = 8


def draw_timelines(timelines: Mapping[str, Mapping[str, Sequence[Sequence[Span]]]], file: Path) -> None:
    """Draws the computations and transfers of each rank over time.

    Args:
        timelines: Spans of each rank, by op and backend.
        file: File to write; its suffix determines the format.
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
    handles = [Patch(color=color, label=kind) for kind, color in SPAN_COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.savefig(file, dpi=150)


def _draw_ranks(axes: Axes, by_rank: Sequence[Sequence[Span]]) -> None:
    lanes = [(rank, kind) for rank in range(len(by_rank)) for kind in SPAN_COLORS]
    for rank, spans in enumerate(by_rank):
        for span in spans:
            place = lanes.index((rank, span.kind))
            width = (span.end - span.begin) * 1e3
            color = SPAN_COLORS[span.kind]
            axes.barh(place, width, left=span.begin * 1e3, height=0.7, color=color, edgecolor="white")
    axes.set_yticks(range(len(lanes)), [f"rank {rank} {kind}" for rank, kind in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the call began")
