"""The documentation is a site: strict, with no broken link, and every public name in its reference."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_emulator
import overlap_gemm
from overlap_gemm import epilogues, nn, parallel, pipelines

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="mkdocs-material has no release for Python 3.10")
def test_the_site_builds(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference.html").read_text()
    names = [name for module in (overlap_gemm, epilogues, nn, parallel, pipelines) for name in module.__all__]
    reference += (tmp_path / "emulator" / "reference.html").read_text()
    names += cute_emulator.__all__
    for name in names:
        assert re.search(rf'id="[\w.]*\.{name}"', reference), name
    assert dead_links(tmp_path) == []
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    assert any("swap_ab" in page["text"] for page in index["docs"])
    # A search for a part of a name finds the name.
    assert re.split(index["config"]["separator"], "gemm_reduce_scatter") == ["gemm", "reduce", "scatter"]


def dead_links(site):
    """Returns (page, target) of links and pictures whose file is not in the site; mkdocs checks pages."""
    return [
        (page.relative_to(site).as_posix(), target)
        for page in site.rglob("*.html")
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text())
        if not re.match(r"\w+:|/", target) and not (page.parent / target).exists()
    ]


def test_links_to_files_outside_the_site_are_noticed(tmp_path):
    (tmp_path / "a.html").write_text('<a href="a.html#x">here</a> <a href="../b.md#y">there</a>')
    assert dead_links(tmp_path) == [("a.html", "../b.md")]
