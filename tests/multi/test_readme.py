"""The README's first lines and links; its examples run in test_pages.py."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readme_opens_with_the_two_commands():
    first = re.search(r"```\n(.*?)```", README, flags=re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == [
        "bash launch/demo.sh",
        "bash launch/test.sh",
    ]


def test_every_file_the_documents_link_to_exists():
    documents = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
    assert len(README.splitlines()) <= 100, "details belong in docs/"
    for document in documents:
        folder = (ROOT / document).parent
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / document).read_text()):
            assert (folder / target).exists(), f"{document} links to {target}"
