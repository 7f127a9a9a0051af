"""The first page's example of the emulator runs as pasted."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "index.md"


def test_the_example_runs_as_pasted(tmp_path):
    section = PAGE.read_text().split("## Run CuTe DSL kernels without a GPU")[1].split("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.S)
    script = tmp_path / "add_one.py"
    script.write_text(example)
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert result.returncode == 0, result.stderr
    numbers = [float(n) for n in re.findall(r"(\d+)\.", result.stdout)]
    assert numbers == [n + 1.0 for n in range(32)]
    assert re.search(r"[1-9]\d* warp instructions", result.stdout)
