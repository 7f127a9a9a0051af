"""Fine-tunes all weights of a published model with transformers' Trainer, with checkpoints to resume from.

    bash launch/torchrun.sh python examples/models/finetune.py --model Qwen/Qwen3-8B --out /tmp/tuned

`--texts` is a file with a text in each line; the default is a few sentences in this file.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, TrainingArguments

import overlap_gemm
from overlap_gemm.integrations.trainer import TensorParallelTrainer
from overlap_gemm.parallel import from_pretrained

SENTENCES = ["A tile is moved while the next is computed.", "Ranks sum in the order of their numbers."]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dtype", default="float32", help="of weights; products are bfloat16 on GPUs")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main(options: argparse.Namespace) -> list[float]:
    world = overlap_gemm.init()
    model = from_pretrained(options.model, world.mesh(), dtype=getattr(torch, options.dtype)).train()
    lines = options.texts.read_text().splitlines() if options.texts else SENTENCES
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [tokenizer(line)["input_ids"] for line in lines for _ in range(4)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    settings = TrainingArguments(
        str(options.out), max_steps=options.steps, per_device_train_batch_size=options.batch, logging_steps=1,
        save_steps=max(1, options.steps // 2), learning_rate=options.lr, report_to=[],
        bf16=world.device.type == "cuda", use_cpu=world.device.type == "cpu",
    )  # fmt: skip
    trainer = TensorParallelTrainer(model, settings, train_dataset=data, data_collator=padded)
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    overlap_gemm.finalize()
    return losses


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)

    def fill(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])

    ids, labels = fill("input_ids", 0), fill("labels", -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


if __name__ == "__main__":
    main(arguments())
