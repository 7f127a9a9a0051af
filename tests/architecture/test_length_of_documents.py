"""The documents stay short enough to be read: words of all pages together, counted as `wc -w` does."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "benchmarks", "emulator/docs")

AT_MOST = 35_000
"""Words of all pages. What is added to one is cut in another."""

PAGE_AT_MOST = 3_300


def words_of_pages() -> dict[str, int]:
    """Returns the number of words of each page that users read."""
    pages = [ROOT / "README.md", ROOT / "emulator/README.md"]
    pages += [page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))]
    return {page.relative_to(ROOT).as_posix(): len(page.read_text().split()) for page in pages}


def test_all_pages_together_do_not_grow():
    found = words_of_pages()
    total = sum(found.values())
    longest = sorted(found.items(), key=lambda page: -page[1])[:8]
    assert total <= AT_MOST, f"{total} words, at most {AT_MOST}. Longest pages: {longest}"


def test_no_page_is_a_book():
    assert {name: n for name, n in words_of_pages().items() if n > PAGE_AT_MOST} == {}


def test_no_folder_of_dated_notes():
    dated = [path for folder in FOLDERS for path in (ROOT / folder).rglob("20[0-9][0-9]-*.md")]
    assert dated == []
