"""Draws the README's picture of a benchmark: time relative to the fastest other, eager and captured.

cd benchmarks; python picture.py results/h100x2-shapes.json ../docs/pictures/relative-to-torch.png
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from overlap_gemm_tools.plots import PALETTE, where
from overlap_gemm_tools.results import EAGER, GRAPH

FEW = 256
"""Rows up to which a shape is one of few rows in `draw_ratios`."""


def draw_ratios(report: Mapping[str, Any], file: Path) -> None:
    """Draws `auto`'s time relative to the fastest of torch's ways, eager and captured: a dot for each shape.

    Args:
        report: A benchmark's.
        file: Where to; the ending decides the format.
    """
    kinds = sorted({(result["op"], result["m"] <= FEW) for result in report["results"]})
    figure = Figure(figsize=(5.2, 1.5 + 0.4 * len(kinds)), layout="constrained")
    axes = figure.add_subplot()
    for shift, mode, colour in ((-0.15, GRAPH, PALETTE[2]), (0.15, EAGER, PALETTE[1])):
        points = [
            (ours["against"], kinds.index((result["op"], result["m"] <= FEW)) + shift)
            for result in report["results"]
            if (ours := result.get(mode, {}).get("ours", {}).get("auto")) and ours["against"] is not None
        ]
        if points:
            ratios, places = (list(column) for column in zip(*points, strict=True))
            label = "captured in CUDA graphs" if mode == GRAPH else "called eagerly"
            axes.plot(ratios, places, "o", color=colour, markersize=4, alpha=0.7, label=label)
    axes.set_yticks(
        range(len(kinds)), [f"{op},\n{'up to' if few else 'above'} {FEW} rows" for op, few in kinds]
    )
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xlabel("time of overlap_gemm / fastest of torch's ways")
    title = f"Left of the line overlap_gemm is faster\n{where(report)}"
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    results, picture = sys.argv[1:]
    draw_ratios(json.loads(Path(results).read_text()), Path(picture))
