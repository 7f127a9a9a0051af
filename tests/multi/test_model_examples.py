"""The programs of examples/models, one for each job, on two CPU ranks and small models.

One is started by a launcher; the others run on ranks that are up.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import SIZES, make
from tests.support.models import save_with_tokenizer
from tests.support.scripts import run_program

FOLDER = Path(__file__).parents[2] / "examples" / "models"
PAGES = Path(__file__).parents[2] / "docs" / "jobs"
SMALL = ("--hidden", 32, "--layers", 2, "--heads", 4, "--vocabulary", 64, "--sequence", 24, "--batch", 2)


@pytest.fixture
def model(tmp_path):
    save_with_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def started(launch, size, name, *options):
    done = launch("torchrun", size, "python", FOLDER / f"{name}.py", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def ran(ranks, size, name, *options):
    """Returns what rank 0 prints."""
    return ranks(size).run(run_program, str(FOLDER / f"{name}.py"), options)[0]


def losses(text):
    return [float(loss) for loss in re.findall(r"loss'?:? '?(\d+\.\d+)", text)]


def test_pretrain_is_the_unsharded_models(launch, ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    options = (*SMALL, "--steps", 6, "--lr", "0.01", "--dtype", "float32")
    found, expected = (
        losses(run(how, size, "pretrain", *options, "--out", tmp_path / str(size)))
        for run, how, size in ((started, launch, 2), (ran, ranks, 1))
    )
    assert len(found) == 6 and found[-1] < found[0] - 0.5
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-3)
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / size).state_dict() for size in ("2", "1")]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-2, atol=1e-3)


def test_finetune_goes_on_from_a_checkpoint(ranks, model, tmp_path):
    options = ("--model", model, "--out", tmp_path / "out")
    options += ("--lr", 0.01)
    ran(ranks, 2, "finetune", *options, "--steps", 4)
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    first = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(first) == 4 and first[-1] < first[0]
    ran(ranks, 2, "finetune", *options, "--steps", 6, "--resume")
    state = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())
    assert [e["step"] for e in state["log_history"] if "loss" in e] == [1, 2, 3, 4, 5, 6]
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].shape == (24,)


def test_lora_on_8_bits_is_merged_into_8_bits(ranks, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "intermediate_size", 512)
    monkeypatch.setitem(SIZES, "head_dim", 128)
    make(tmp_path / "base", "fp8 128x128")
    options = ("--model", tmp_path / "base", "--steps", 4, "--sequence", 16, "--rank", 4)
    text = ran(ranks, 2, "lora_on_8_bits", *options, "--out", tmp_path / "out")
    [(first, last, error)] = re.findall(r"loss (\S+) -> (\S+); requantised, error at most (\S+)", text)
    assert float(last) < float(first) and 0 < float(error) < 0.05
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").exists()
    base, merged = (
        load_file(at / "model.safetensors") for at in (tmp_path / "base", tmp_path / "out/merged")
    )
    assert {name: value.dtype for name, value in merged.items()} == {n: v.dtype for n, v in base.items()}


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_dpo_prefers_what_was_chosen(ranks, model, tmp_path):
    options = ("--model", model, "--steps", 4, "--dtype", "float32", "--out", tmp_path / "out")
    ran(ranks, 2, "dpo", *options)
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(value.any() for name, value in weights.items() if "lora_B" in name)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_serve(launch, model):
    assert started(launch, 1, "serve", "--model", model)


def test_every_program_has_a_page():
    programs = {path.stem for path in FOLDER.glob("*.py")}
    pages = {path: path.read_text() for path in PAGES.glob("*.md")}
    for name in programs:
        assert [path for path, text in pages.items() if f"examples/models/{name}.py" in text], name
