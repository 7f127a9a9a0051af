"""Pages of the site that are outside of this folder: the emulator's, the benchmarks' and CONTRIBUTING.md."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
EMULATOR = ROOT / "emulator" / "docs"
BENCHMARKS = ROOT / "benchmarks"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages; a symbolic link to them is lost where git has none."""
    places = {
        Path("benchmarks.md"): BENCHMARKS / "README.md",
        Path("contributing.md"): ROOT / "CONTRIBUTING.md",
        Path("results/scaling.png"): BENCHMARKS / "results" / "scaling.png",
    }
    places |= {Path("emulator") / page.relative_to(EMULATOR): page for page in EMULATOR.rglob("*.*")}
    for place, page in sorted(places.items()):
        files.append(File.generated(config, place.as_posix(), abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Returns the page with links between its folder and others as they are in the site."""
    if page.file.src_uri in ("benchmarks.md", "contributing.md"):
        return re.sub(r"\]\((?:\.\./)?docs/", "](", markdown)
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+benchmarks/README\.md", f"]({up}benchmarks.md", markdown)
    return re.sub(r"\]\((?:\.\./)+CONTRIBUTING\.md", f"]({up}contributing.md", markdown)
