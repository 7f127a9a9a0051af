"""Files of the released wheels of stacks."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

VERSIONS = {"torchtitan": "0.3.0", "sglang": "0.5.23", "verl": "0.9.1", "axolotl": "0.19.0"}


def extracted(stack: str, folder: Path, *names: str) -> list[str]:
    """Extracts files of a stack's wheel into a folder, and returns their paths."""
    wheel: str | Path | None = os.environ.get(f"OVERLAP_GEMM_{stack.upper()}_WHEEL")
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
        subprocess.run([*command, f"{stack}=={VERSIONS[stack]}"], check=True, timeout=240)
        (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        return [files.extract(name, folder) for name in names]
