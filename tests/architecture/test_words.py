"""Source and pages say what the field says (docs/glossary.md): words of our own."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [page for page in (ROOT / "docs").glob("*.md") if page.name != "style.md"]
TEXTS = (*(ROOT / "src").rglob("*.py"), ROOT / "README.md", *PAGES)

OURS = (
    "OR_AUTO", "TOLD", "Given", "Parcel", "Terms", "across: int", r"\.across", r"\.features", "carried_out",
    "settle", "greets?", "greeting", "mended", "nobody asked", "what has been run where",
)  # fmt: skip
"""Names and phrases that the field has better ones for."""


def test_words_of_our_own_stay_away():
    found = {word: places(rf"{word}\b") for word in OURS}
    assert {word: where for word, where in found.items() if where} == {}


def places(pattern: str) -> list[str]:
    """File and text of each line that has it."""
    return [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in TEXTS
        for line in file.read_text().splitlines()
        if re.search(pattern if pattern.startswith("\\") else rf"\b{pattern}", line)
    ]
