"""The pictures: four times per op and shape, and who computed and transferred when."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

COLOURS = {"gemm": "#4c78a8", "comm": "#f58518", "sequential": "#9d9da1", "overlapped": "#54a24b"}
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
