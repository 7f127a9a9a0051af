"""Draws the README's picture of a benchmark's results: our time against the best other, eager and captured.

cd benchmarks; python picture.py results/h200x4.json ../docs/pictures/beside-torch.png
"""

import json
import sys
from pathlib import Path

from overlap_gemm.cli.plots import draw_ratios

if __name__ == "__main__":
    results, picture = sys.argv[1:]
    draw_ratios(json.loads(Path(results).read_text()), Path(picture))
