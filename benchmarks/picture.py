"""Draws the README's picture of a benchmark's results: our time beside the best other, eager and captured.

cd benchmarks; python picture.py results/h200x2-gemm-reduce-scatter.json ../docs/pictures/beside-torch.png 512
"""

import json
import sys
from pathlib import Path

from overlap_gemm.cli.plots import draw_ratios

if __name__ == "__main__":
    results, picture, *rows = sys.argv[1:]
    draw_ratios(json.loads(Path(results).read_text()), Path(picture), int(rows[0]) if rows else 0)
