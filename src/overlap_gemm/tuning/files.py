"""Atomic writes of files that other processes may read at the same time."""

import os
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Writes a file atomically: a reader sees the old or the new text.

    Raises:
        OSError: The folder cannot be created or written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(file)
