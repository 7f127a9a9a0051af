"""Pre-trains a Llama from scratch: initialises it as shards, trains it, saves it in transformers' format.

    bash launch/torchrun.sh python examples/models/pretrain.py --out /tmp/llama

`--tokens` is a numpy file with one row of token ids; the default is a repeated text.
"""

import argparse
from pathlib import Path

import numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import overlap_gemm
from overlap_gemm.parallel import full_norm, materialize, parallelize


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main(options: argparse.Namespace) -> list[float]:
    world = overlap_gemm.init()
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.heads,
        max_position_embeddings=options.sequence,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, options.dtype))
    materialize(parallelize(model, world.mesh()))
    torch.manual_seed(0)
    model.init_weights()
    model.train()

    text = (
        numpy.load(options.tokens)
        if options.tokens
        else numpy.arange(options.batch * options.sequence * 4) % 61
    )
    rows = torch.from_numpy(text.astype("int64")).split(options.sequence)[:-1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    losses = []
    for step in range(options.steps):
        ids = torch.stack([rows[(step * options.batch + i) % len(rows)] for i in range(options.batch)])
        ids = ids.to(world.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = full_norm(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if world.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, gradient norm {float(norm):.3f}", flush=True)
    model.save_pretrained(options.out)
    overlap_gemm.finalize()
    return losses


if __name__ == "__main__":
    main(arguments())
