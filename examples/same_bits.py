"""Trains a small Llama on all ranks and evaluates it on one, with equal bits by `invariant="ranks"`.

    torchrun --nproc-per-node 2 examples/same_bits.py

Prints two figures:

- the number of logits that differ between the model on P ranks and on one;
- the largest difference of log-probabilities of sampled tokens between rollout and training. The rollout runs
  one sequence at a time on one rank; the training step runs the full batch on P ranks.

`--invariant none` shows both without the invariance.
"""

import argparse
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import overlap_gemm
from overlap_gemm.parallel import full_state_dict, parallelize

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def model_on(
    ranks: list[int], dtype: torch.dtype, device: torch.device, invariant: str | None
) -> torch.nn.Module:
    """Returns the model on these ranks, with the same weights on every caller."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(device, dtype)
    return parallelize(model, DeviceMesh(device.type, ranks), invariant=invariant)


def log_probabilities(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each token after the first."""
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def rollout(model: torch.nn.Module, prompt: torch.Tensor, length: int) -> torch.Tensor:
    """Appends the likeliest tokens, one sequence at a time."""
    finished = []
    for sequence in prompt:
        tokens = sequence[None]
        for _ in range(length):
            tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
        finished.append(tokens)
    return torch.cat(finished)


def compare(dtype: torch.dtype, world: overlap_gemm.World, invariant: Any, steps: int = 3) -> bool:
    """Trains for some steps; returns whether all bits are equal. Rank 0 prints the figures."""
    ranks = list(range(world.size))
    model = model_on(ranks, dtype, world.device, invariant)
    alone = model_on([world.rank], dtype, world.device, invariant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prompt = torch.randint(96, (4, 6), generator=torch.Generator().manual_seed(1)).to(world.device)
    farthest, differing = 0.0, 0
    for _ in range(steps):
        alone.load_state_dict(full_state_dict(model))
        tokens = rollout(alone, prompt, 6)
        training = log_probabilities(model, tokens)
        with torch.no_grad():
            of_rollout = torch.cat([log_probabilities(alone, one[None]) for one in tokens])
            logits = [which(input_ids=tokens).logits for which in (model, alone)]
        farthest = max(farthest, (training - of_rollout).abs().max().item())
        differing += int((logits[0] != logits[1]).sum())
        (-training.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if world.rank == 0:
        print(f"{dtype}, invariant={invariant!r}, {world.size} ranks and one: {differing} logits differ;")
        print(f"  log-probabilities of rollout and training differ by at most {farthest:.3g}")
    return differing == 0 and farthest == 0


def main() -> None:
    """Compares the bits in float32 and in bfloat16."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--invariant", default="ranks", choices=["none", "batch", "ranks", "ranks:4", "ranks:2"]
    )
    invariant = parser.parse_args().invariant
    world = overlap_gemm.init()
    same = [
        compare(t, world, None if invariant == "none" else invariant) for t in (torch.float32, torch.bfloat16)
    ]
    overlap_gemm.finalize()
    if invariant.startswith("ranks") and not all(same):
        raise SystemExit("bits differ")


if __name__ == "__main__":
    main()
