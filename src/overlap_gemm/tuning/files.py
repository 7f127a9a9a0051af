"""Files that other processes may read while they are written."""

import os
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Writes a file at once: a reader sees the old one or the new one.

    Raises:
        OSError: The folder cannot be made or written to.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(file)
