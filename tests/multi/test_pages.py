"""The pages' snippets run as they stand, each alone, on two ranks: nothing is imported or made elsewhere."""

import contextlib
import io
import linecache
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._inductor.config

import overlap_gemm
from overlap_gemm.integrations import hugging_face, hugging_face_attention, torch_symm_mem
from tests.support.models import tiny

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "docs/pipelines.md": "tests/emulated/test_pipelines_page.py",
    "docs/integrations/megatron.md": "test_megatron.py",
}
"""Pages whose snippets other tests run."""


def pages():
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for file in sorted(file for file in files if "notes" not in file.parts):
        for number, text in enumerate(re.findall(r"^```python\n(.*?)^```$", file.read_text(), re.M | re.S)):
            yield file.relative_to(ROOT).as_posix(), number, text


ONE_PROGRAM = "docs/tutorial.md"
SNIPPETS = {
    f"{page}-{number}": text for page, number, text in pages() if page not in (*ELSEWHERE, ONE_PROGRAM)
}
SNIPPETS[ONE_PROGRAM] = "\n".join(text for page, _, text in pages() if page == ONE_PROGRAM)
SAYS = {
    "README.md-0": "torch.Size([256, 1024])",
    "docs/models.md-1": "torch.Size([1, 132])",
    "docs/index.md-0": "all_gather_gemm runs as 'torch'",
    ONE_PROGRAM: "all_gather_gemm runs as",
}
"""What some of them print, on every rank."""
STACKS = {
    "docs/models.md": ("transformers", "peft"),
    "docs/integrations/transformers.md": ("transformers", "peft", "accelerate"),
    "docs/integrations/trainer.md": ("transformers", "accelerate"),
    "docs/integrations/megatron.md": ("megatron-core",),
    "docs/integrations/torch.md": ("torch",),
}
"""Whose versions, those of the constraints, a page says."""


def here(text, folder):
    """The snippet for ranks on CPUs: small numbers, a small model, no GPU's kernel."""
    text = re.sub(r"\b(8192|28672)\b", "64", text)
    for name in ("out", "my-adapter"):  # folders that it writes
        text = text.replace(f'"{name}"', repr(f"{folder}/{name}"))
    text = text.replace('"Qwen/Qwen3-8B"', repr(folder))
    return text.replace('backend="fused"', 'backend="decomposed"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model, saved as published ones are."""
    path = tmp_path_factory.mktemp("model")
    tiny("qwen3", 2, dtype=torch.float32).save_pretrained(path)
    return str(path)


def runs(rank, size, text):
    environment = {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    # As a launcher says it; and what a snippet sets of torch's configuration goes with it.
    with (
        mock.patch.dict(os.environ, environment),
        torch._inductor.config.patch(),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        # Epilogues are read from their source.
        linecache.cache["snippet"] = len(text), None, text.splitlines(keepends=True), "snippet"
        exec(compile(text, "snippet", "exec"), {"__name__": "__main__"})
    overlap_gemm.finalize()
    for integration in (hugging_face, hugging_face_attention, torch_symm_mem):
        integration.uninstall()
    return printed.getvalue()


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet(ranks, folder, snippet):
    for printed in ranks(2).run(runs, here(SNIPPETS[snippet], folder)):
        assert SAYS.get(snippet, "") in printed


@pytest.mark.parametrize("page", STACKS)
def test_a_page_says_the_versions_that_were_run(page):
    text, pins = (
        (ROOT / page).read_text(),
        "\n".join((ROOT / name).read_text() for name in ("constraints-common.txt", "constraints.txt")),
    )
    for stack in STACKS[page]:
        version = re.findall(rf"^{stack}==(\d+\.\d+(?:\.\d+)?)", pins, re.M)[-1]
        assert re.search(rf"{stack}[`]? {re.escape(version)}\b", text), (
            f"{page} does not say {stack} {version}"
        )


def test_no_page_is_left_out():
    assert ELSEWHERE.keys() <= {page for page, _, _ in pages()}
    assert len(SNIPPETS) >= 7


def test_a_small_model_runs_without_a_launcher():
    """And with nothing of one in the environment."""
    text = SNIPPETS["docs/models.md-1"]
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launchers}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 132])" in done.stdout


def test_pages_install_from_the_checkout():
    """The package is on no index: a name that pip would look up there is another's, or nobody's."""
    for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if "notes" not in file.parts:
            assert not re.findall(r"pip install[^\n`]*\boverlap-gemm\b", file.read_text()), file
