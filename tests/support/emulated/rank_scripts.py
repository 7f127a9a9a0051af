"""Scripts of several ranks under the emulator."""

import textwrap
from pathlib import Path
from typing import Any

from cute_emulator.testing import emulator_command


def lines_of_ranks(
    folder: Path, script: str, *arguments: object, arch: str = "sm_90a", ranks: int = 2, **options: Any
) -> list[str]:
    """Runs a script on every rank, and returns the lines that they print, sorted; it must end with 0.

    Args:
        folder: Folder for the script's file.
        script: Text of the script, indented.
        *arguments: Arguments of the script.
        arch: Architecture of the emulated GPUs.
        ranks: Number of ranks.
        **options: Options of `emulator_command`, such as `env`.
    """
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    done = emulator_command("--arch", arch, "--ranks", ranks, file, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())
