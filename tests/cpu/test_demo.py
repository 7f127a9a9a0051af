"""The demo in a world of one; tests/multi runs it on several ranks."""

import importlib.metadata
import json
import math
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import overlap_gemm
from overlap_gemm.cli import app, llama, timelines
from overlap_gemm.tuning.spans import Span
from overlap_gemm_tools import plots


def test_a_world_of_one(tmp_path):
    sizes = shlex.split("--steps 2 --batch 1 --sequence 8 --layers 1 --head-dim 4 --rows 3 --rounds 1")
    result = CliRunner().invoke(app, ["demo", *sizes, "--no-fused", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "1 CPU rank," in result.output
    assert not dist.is_initialized()
    overlap_gemm.finalize()


def test_the_default_text_is_a_real_one():
    assert len(llama.default_text().read_bytes()) > 10_000


def test_a_checkout_that_is_not_installed_has_a_text(monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", unknown)
    assert len(llama.default_text().read_bytes()) > 10_000


def test_an_installation_without_a_checkout_has_a_text(monkeypatch, tmp_path):
    monkeypatch.setattr(
        llama, "__file__", str(tmp_path / "site-packages" / "overlap_gemm" / "cli" / "llama.py")
    )
    assert llama.default_text().name == "LICENSE"


def test_batches_are_windows_of_the_text_and_repeat_with_the_seed(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(100)))
    drawn = next(llama.batches(text, batch=5, sequence=10, device=torch.device("cpu")))
    assert drawn.shape == (5, 11)
    assert (drawn.diff(dim=1) == 1).all(), "consecutive bytes"
    assert len(set(drawn[:, 0].tolist())) > 1
    again = next(llama.batches(text, batch=5, sequence=10, device=torch.device("cpu")))
    assert torch.equal(drawn, again)
    for length in (100, 0):
        text.write_bytes(bytes(length))
        with pytest.raises(ValueError, match=f"at least 101 bytes, a window, got {length}"):
            next(llama.batches(text, batch=1, sequence=100, device=torch.device("cpu")))


def test_a_head_of_an_odd_width_is_refused_with_the_rule():
    result = CliRunner().invoke(app, ["demo", "--head-dim", "3"])
    assert result.exit_code == 1 and "head_dim must be even, got 3" in result.output
    overlap_gemm.finalize()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_heads_divide_over_the_ranks(ranks):
    config = llama.build(ranks, layers=1, head_dim=4, sequence=8).config
    assert config.num_attention_heads % ranks == 0
    assert config.num_key_value_heads % ranks == 0
    assert config.hidden_size == config.num_attention_heads * 4


def test_the_tolerance_is_stated_in_units_of_rounding():
    assert llama.Comparison("logits", error=3.9e-7, rounding=1e-7).holds
    assert not llama.Comparison("logits", error=4.1e-7, rounding=1e-7).holds
    assert not llama.Comparison("logits", error=math.nan, rounding=1e-7).holds


def test_one_nan_gradient_is_seen_among_good_ones(monkeypatch):
    model = llama.build(1, layers=1, head_dim=4, sequence=8)
    tokens = torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(0))
    honest = llama._evaluate

    def poisoned(which, tokens):
        logits, gradients = honest(which, tokens)
        if which is model:
            gradients["model.norm.weight"][3] = math.nan
        return logits, gradients

    assert all(found.holds for found in llama.compare(model, tokens))
    monkeypatch.setattr(llama, "_evaluate", poisoned)
    assert [found.holds for found in llama.compare(model, tokens)] == [True, False]


def test_timelines_are_drawn_for_every_rank(tmp_path):
    spans = [Span("compute", "GEMM", 0.0, 0.002), Span("transfer", "to 1", 0.001, 0.003)]
    one = {"gemm_reduce_scatter": {"sequential": [spans, spans, []], "decomposed": [spans, spans, spans]}}
    timelines.draw_timelines(one, tmp_path / "t.svg")
    drawn = (tmp_path / "t.svg").read_text()
    assert "rank 2 transfer" in drawn
    assert "gemm_reduce_scatter, decomposed" in drawn
    assert "Who computes and who transfers when" in drawn


def test_pictures_of_a_benchmark_say_what_to_see_and_where_it_ran(tmp_path):
    """Ours against the best other: only `auto`, both modes, few rows and many."""
    folder = Path(__file__).parents[2] / "benchmarks"
    report = json.loads((folder / "results" / "h200x2-shapes.json").read_text())
    runpy.run_path(str(folder / "picture.py"))["draw_ratios"](report, tmp_path / "r.svg")
    plots.draw_bounds(report, tmp_path / "b.svg")
    ratios, bounds = ((tmp_path / name).read_text() for name in ("r.svg", "b.svg"))
    for drawn in (ratios, bounds):
        assert f"2 x NVIDIA H200, nccl, torch 2.11.0+cu130, {report['machine']['date']}" in drawn
    assert "time of overlap_gemm / fastest of torch" in ratios
    assert "Left of the line overlap_gemm is faster" in ratios
    assert "captured in CUDA graphs" in ratios and "called eagerly" in ratios
    assert all(line in ratios for line in ("gemm_reduce_scatter,", "above 256 rows", "up to 256 rows"))
    assert "Speed relative to the bound: longer is better" in bounds
