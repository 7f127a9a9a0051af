"""The first kernel of the emulator's README, as it stands there."""

import runpy
import tempfile
from pathlib import Path

text = (Path(__file__).parents[2] / "README.md").read_text()
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "mirror.py"  # a file, since the DSL reads a kernel's source from there
    script.write_text(text.partition("```python\n")[2].partition("```")[0])
    runpy.run_path(str(script))
