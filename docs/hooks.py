"""What mkdocs is told in addition to mkdocs.yml."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

EMULATOR = Path(__file__).parents[1] / "emulator" / "docs"


def on_files(files: Files, *, config: Any) -> Files:
    """The emulator's pages lie with the emulator; a symbolic link to them is lost where git has none."""
    for page in sorted(EMULATOR.rglob("*.*")):
        place = Path("emulator") / page.relative_to(EMULATOR)
        files.append(File.generated(config, str(place), abs_src_path=str(page)))
    return files
