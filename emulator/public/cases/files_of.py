"""Runs a case, `FILES_OF="OUT SCRIPT" files_of.py ARGUMENT`; appends Python files of its kernels to OUT."""

import os
import re
import runpy
from pathlib import Path

from cute_emulator.execution.launch import Launch, Machine

out, script = os.environ["FILES_OF"].split()
submit, files = Machine.submit, set()


def recorded(machine: Machine, launch: Launch) -> None:
    """Queues a launch, and keeps the files that its PTX names."""
    files.update(re.findall(r'\.file\s+\d+\s+"([^"]+)"', launch.ptx))
    submit(machine, launch)


Machine.submit = recorded
try:
    runpy.run_path(str(Path(__file__).parent / script), run_name="__main__")
finally:
    Machine.submit = submit
    with Path(out).open("a") as lines:
        lines.writelines(f"{name}\n" for name in sorted(files))
