"""TRL's trainers on a model whose projections are sharded: losses and gradient norms of one rank."""

import importlib.util

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap_gemm.integrations.trainer import ShardedCheckpoints
from overlap_gemm.parallel import from_pretrained
from tests.support.models import save_with_tokenizer
from tests.support.trained import launched

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")

ROWS = {
    "SFT": [{"text": "How are partial sums added? In rank order."}, {"text": "When is a tile sent?"}],
    "KTO": [
        {"prompt": "How are", "completion": " sums", "label": True},
        {"prompt": "When is", "completion": " it", "label": False},
    ],
    "GRPO": [{"prompt": "How are"}, {"prompt": "When is"}],
}
OPTIONS = {
    "SFT": {"max_length": 32},
    "KTO": {"max_length": 32},
    "GRPO": {"num_generations": 4, "max_completion_length": 6},
}


def rewards(completions, **_):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def trained(rank, size, method, folder):
    with launched():
        return log_of(size, method, folder)


def log_of(size, method, folder):
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    trainer_class = type("Sharded", (ShardedCheckpoints, getattr(trl, f"{method}Trainer")), {})
    settings = getattr(trl, f"{method}Config")(
        str(folder / "out"), max_steps=3, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-3,
        report_to=[], bf16=False, use_cpu=True, save_strategy="no", **OPTIONS[method],
    )  # fmt: skip
    model = from_pretrained(folder, init_device_mesh("cpu", (size,)), dtype=torch.float32)
    torch.manual_seed(0)
    more = {"reward_funcs": rewards} if method == "GRPO" else {}
    trainer = trainer_class(
        model, args=settings, train_dataset=Dataset.from_list(ROWS[method] * 8),
        processing_class=AutoTokenizer.from_pretrained(folder), **more,
    )  # fmt: skip
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("method", ROWS)
def test_losses_are_those_of_one_rank(ranks, tmp_path, method):
    save_with_tokenizer(tmp_path)
    expected, *sharded = (one for size in (1, 2) for one in ranks(size).run(trained, method, tmp_path))
    assert len(expected) == 3 and all(norm > 0 for _, norm in expected)
    for each in sharded:
        torch.testing.assert_close(torch.tensor(each), torch.tensor(expected), rtol=1e-4, atol=1e-6)
