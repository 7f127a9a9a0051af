"""Picture of a benchmark: share of the bound that each backend and baseline reaches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from .results import EAGER, GRAPH, OTHERS

PALETTE = ("#9d9da1", "#4c78a8", "#54a24b", "#f58518", "#b279a2", "#e45756")
mpl.rcParams["font.size"] = 8


def draw_bounds(report: Mapping[str, Any], file: Path) -> None:
    """Draws a benchmark report: time of the bound / time of each variant, measured and predicted."""
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
            (at, results[place][mode]["seconds"]["bound"] / ours["predicted"])
            for at, place in zip(places, shares, strict=True)
            if (ours := results[place][mode]["ours"].get(name)) and ours["predicted"]
        ]
        axes.plot([x for _, x in expected], [y for y, _ in expected], "k|", markersize=5)
    axes.set_yticks(range(len(results)), [_label(result) for result in results])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xlabel(f"bound / time, {mode} (1: as fast as the bound; black: predicted by the model)")
    axes.set_title(f"Speed relative to the bound: longer is better\n{where(report)}", loc="left")
    figure.legend(loc="outside lower center", ncols=len(names))
    figure.savefig(file, dpi=150)


def where(report: Mapping[str, Any]) -> str:
    """Returns machine, link, version of torch and date of a benchmark, for a picture's title."""
    machine = report["machine"]
    dated = [f"torch {machine['torch']}"] * ("torch" in machine) + [machine["date"]] * ("date" in machine)
    return ", ".join([f"{machine['ranks']} x {machine['processor']}", machine["carrier"], *dated])


def _label(result: Mapping[str, Any]) -> str:
    return f"{result['op']} {result['name']}\n{result['m']},{result['n']},{result['k']} {result['dtype']}"
