"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_opens_with_the_two_commands():
    first = re.search(r"```\n(.*?)```", README, flags=re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == [
        "bash launch/demo.sh",
        "bash launch/test.sh",
    ]


@pytest.mark.parametrize(
    ("number", "says"),
    [(0, "torch.Size([256, 1024])"), (1, "all_gather_gemm runs as 'torch'"), (2, "torch.Size([1, 132])")],
)
def test_example(launch, number, says, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(EXAMPLES[number])
    done = launch("torchrun", 2, "python", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(says) == 2, done.stdout


def test_every_file_the_documents_link_to_exists():
    documents = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
    assert len(README.splitlines()) <= 100, "details belong in docs/"
    for document in documents:
        folder = (ROOT / document).parent
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / document).read_text()):
            assert (folder / target).exists(), f"{document} links to {target}"


def test_the_tutorial_is_a_program(launch, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.DOTALL)
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(blocks))
    done = launch("torchrun", 2, "python", script)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 on cpu" in done.stdout
    assert "all_gather_gemm runs as" in done.stdout
