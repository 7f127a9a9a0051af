"""LoRA on a base model in the 8 bits of its checkpoint, which is then merged, quantised and saved.

    bash launch/torchrun.sh python examples/models/lora_on_8_bits.py --model Qwen/Qwen3-8B-FP8 --out /tmp/8

Writes the adapter to OUT/adapter, and a checkpoint in the format of the base model to OUT/merged.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

import overlap_gemm
from overlap_gemm.parallel import from_pretrained, requantize


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main(options: argparse.Namespace) -> list[float]:
    world = overlap_gemm.init()
    model = from_pretrained(options.model, world.mesh(), dtype=torch.bfloat16)
    torch.manual_seed(0)
    lora = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    ids = (torch.arange(2 * options.sequence) % 61).view(2, -1).to(world.device)  # your batches
    losses = []
    for _ in range(options.steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    model.save_pretrained(options.out / "adapter", is_main_process=world.rank == 0)
    merged = model.merge_and_unload()
    errors = requantize(merged)
    if world.rank == 0:
        print(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; requantised, error at most {max(errors.values()):.4f}"
        )
    merged.save_pretrained(options.out / "merged")
    overlap_gemm.finalize()
    return losses


if __name__ == "__main__":
    main(arguments())
