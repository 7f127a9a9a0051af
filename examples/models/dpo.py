"""Direct preference optimisation with TRL's DPOTrainer, on a tensor-parallel model with adapters.

    pip install trl
    bash launch/torchrun.sh python examples/models/dpo.py --model Qwen/Qwen3-8B --out /tmp/preferred

`--pairs` is a file of JSON lines with prompt, chosen and rejected; the default is two pairs in this file.
"""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

import overlap_gemm
from overlap_gemm.integrations.trainer import ShardedCheckpoints
from overlap_gemm.parallel import from_pretrained

PAIRS = [
    {"prompt": "How are partial sums added?", "chosen": " In rank order.", "rejected": " In any order."},
    {"prompt": "When is a tile sent?", "chosen": " While the next is computed.", "rejected": " At the end."},
]


class TensorParallelDPOTrainer(ShardedCheckpoints, DPOTrainer):
    """Trainer of TRL that saves checkpoints of sharded optimizers."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main(options: argparse.Namespace) -> list[float]:
    world = overlap_gemm.init()
    model = from_pretrained(options.model, world.mesh(), dtype=getattr(torch, options.dtype))
    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules=["q_proj", "o_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    pairs = [json.loads(line) for line in options.pairs.open()] if options.pairs else PAIRS * 8
    settings = DPOConfig(
        str(options.out), max_steps=options.steps, per_device_train_batch_size=2, logging_steps=1,
        learning_rate=1e-3, report_to=[], bf16=world.device.type == "cuda",
        use_cpu=world.device.type == "cpu", save_strategy="no",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = Dataset.from_list(pairs)
    trainer = TensorParallelDPOTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    model.save_pretrained(options.out, is_main_process=world.rank == 0)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    overlap_gemm.finalize()
    return losses


if __name__ == "__main__":
    main(arguments())
