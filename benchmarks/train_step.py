"""One training step of a stack of Llama layers on one GPU: bfloat16, and float8 by this library's layers.

    python benchmarks/train_step.py OUT.json [SECONDS [8B | tiny [WAY ...]]]

Layers as Llama 3 8B's: norm, q, k and v, causal attention, o, residual, norm, gate and up, SiLU, down,
residual; without rotary embedding, vocabulary and head, the same for all. A group of one rank. Ways:

- ``bfloat16``: torch's linears
- ``ours, bfloat16``: this library's layers
- ``float8``: these with `nn.Float8()`; ``float8, wgrad``: with `nn.Float8(wgrad=True)`
- ``..., compiled``: each layer by `torch.compile`

All have the same parameters and one AdamW. A *step* is forward, backward and optimizer; *passes* are forward
and backward alone. Not captured; each round times all in an order of its own. Medians in milliseconds, and
the median over the rounds of the ratio to ``bfloat16``, of what is compiled to ``bfloat16, compiled``.
`error` is that of the stack's output, and of the first layer's gradient of gate and up, to those of
``bfloat16`` (norms). `made_s` is the time until a way had made its first passes, `chosen` what the ops
said of the backends that they run as. When half of the time is over no way is made any more, and when all is
over no round begins.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overlap_gemm
from overlap_gemm.cli.this_machine import describe
from overlap_gemm.nn import ColumnParallelLinear, Float8, RowParallelLinear
from overlap_gemm.tuning.timing import Timings, measure

SIZES = {"8B": (4, 4, 2048, 4096, 14336, 32, 8), "tiny": (2, 2, 16, 64, 96, 4, 2)}
"""Layers, sequences, their length, width of the hidden state and of the MLP, heads of queries and of keys."""

ROUNDS = 7
BASE = "bfloat16"
COMPILED = ", compiled"
WAYS: dict[str, tuple[bool, Float8 | None]] = {
    BASE: (False, None),
    "ours, bfloat16": (True, None),
    "float8": (True, Float8()),
    "float8, wgrad": (True, Float8(wgrad=True)),
}
"""Whether the linears are ours, and their `float8=`."""

ORDER = [*WAYS, *(name + COMPILED for name in (BASE, "float8", "float8, wgrad", "ours, bfloat16"))]
"""In which ways are made, should the time not suffice for all."""


class Layer(nn.Module):
    """A decoder layer on `[sequences * length, hidden]`."""

    def __init__(self, linears: dict[str, nn.Module], norms: list[nn.Parameter], size: tuple[int, ...]):
        super().__init__()
        _, self.sequences, _, self.hidden, _, self.heads, self.kv_heads = size
        self.norm1, self.norm2 = norms
        self.qkv, self.o = linears["qkv"], linears["o"]
        self.gate_up, self.down = linears["gate_up"], linears["down"]

    def forward(self, x: Tensor) -> Tensor:
        """Adds attention and MLP to the hidden state."""
        width, norm = self.hidden // self.heads, (self.hidden,)
        counts = [width * heads for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.view(self.sequences, -1, part.shape[-1] // width, width).transpose(1, 2)
            for part in self.qkv(F.rms_norm(x, norm, self.norm1)).split(counts, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(seen.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(F.rms_norm(x, norm, self.norm2)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def parameters(size: tuple[int, ...], device: torch.device) -> list[dict[str, nn.Parameter]]:
    """Returns the parameters of each layer, by name."""
    layers, _, _, hidden, inner, heads, kv_heads = size
    kv = hidden // heads * kv_heads
    shapes = {
        "qkv": (hidden + 2 * kv, hidden), "o": (hidden, hidden), "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }  # fmt: skip

    def drawn(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[1] ** -0.5)

    def ones() -> nn.Parameter:
        return nn.Parameter(torch.ones(hidden, device=device, dtype=torch.bfloat16))

    return [
        {"norm1": ones(), "norm2": ones(), **{name: drawn(*shape) for name, shape in shapes.items()}}
        for _ in range(layers)
    ]


def stack(weights: list[dict[str, nn.Parameter]], name: str, size: tuple[int, ...]) -> nn.Sequential:
    """Returns the layers of an implementation, with these parameters."""
    is_ours, float8 = WAYS[name.removesuffix(COMPILED)]
    layers = []
    for each in weights:
        linears: dict[str, nn.Module] = {}
        for part in ("qkv", "o", "gate_up", "down"):
            out, width = each[part].shape
            linear: nn.Module = nn.Linear(width, out, bias=False, device="meta")
            if is_ours:
                kind = RowParallelLinear if part in ("o", "down") else ColumnParallelLinear
                linear = kind(width, out, bias=False, float8=float8, device="meta")
            linear.weight = each[part]
            linears[part] = linear
        layers.append(Layer(linears, [each["norm1"], each["norm2"]], size))
        if name.endswith(COMPILED):
            layers[-1].compile(dynamic=False)  # not the stack: one graph serves all layers
    return nn.Sequential(*layers)


class Chosen(logging.Handler):
    """Keeps what is said of choices."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("overlap_gemm")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a message."""
        self.lines.append(record.getMessage())


class Run:
    """Steps of all implementations on the same parameters, which are timed.

    Attributes:
        calls: (way, "step" or "passes") and what does it.
        errors: Of a way, of the output and of a gradient.
        made_s: Seconds until a way had made its first passes, compilation among them.
    """

    def __init__(self, size: tuple[int, ...], device: torch.device):
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.parameters = parameters(size, device)
        self.every = [one for layer in self.parameters for one in layer.values()]
        self.optimizer = torch.optim.AdamW(self.every, lr=1e-6, fused=True)
        rows, hidden = size[1] * size[2], size[3]
        self.x, self.target = (
            torch.randn(rows, hidden, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self.x.requires_grad_()  # as an embedding's output: and all layers are one graph
        self.reference: tuple[Tensor, Tensor] | None = None
        self.calls: dict[tuple[str, str], Callable[[], object]] = {}
        self.errors: dict[str, list[float]] = {}
        self.made_s: dict[str, float] = {}

    def add(self, name: str) -> None:
        """Makes a way, and compares it with the first one."""
        began, model = time.time(), stack(self.parameters, name, self.size)

        def passes() -> Tensor:
            out = model(self.x)
            F.mse_loss(out.float(), self.target.float()).backward()
            return out

        def step() -> None:
            passes()
            self.optimizer.step()
            self.clear_gradients()

        def both() -> None:
            passes()
            self.clear_gradients()

        out = passes().detach()
        grad = self.parameters[0]["gate_up"].grad
        assert grad is not None
        result = out, grad.clone()
        self.clear_gradients()
        self.reference = self.reference or result
        pairs = zip(result, self.reference, strict=True)
        self.errors[name] = [round(float((a - b).float().norm() / b.float().norm()), 5) for a, b in pairs]
        assert all(error < 0.2 for error in self.errors[name]), (name, self.errors[name])
        self.made_s[name] = round(time.time() - began, 1)
        print(name, self.errors[name], f"{self.made_s[name]} s", flush=True)
        self.calls |= {(name, "step"): step, (name, "passes"): both}

    def clear_gradients(self) -> None:
        """Removes all gradients."""
        for one in (self.x, *self.every):
            one.grad = None


def main() -> None:
    """Rounds until the seconds are over; the file is complete after each."""
    began, limit = time.time(), float(sys.argv[2]) if len(sys.argv) > 2 else 60
    size = SIZES[sys.argv[3] if len(sys.argv) > 3 else "8B"]
    world = overlap_gemm.init()
    torch.backends.cuda.enable_cudnn_sdp(False)  # docs/design/facts.md, "torch, NCCL, gloo"
    chosen, run, left_out = Chosen(), Run(size, world.device), []
    for name in [BASE, *(way for way in sys.argv[4:] or ORDER if way != BASE)]:
        if name != BASE and time.time() - began > limit / 2:
            left_out.append(name)
        else:
            run.add(name)
    for way in left_out:
        print("out of time before", way)
    timings: list[Timings] = []
    for turn in range(ROUNDS):
        keys = list(run.calls)
        random.Random(turn).shuffle(keys)
        calls = {" / ".join(key): run.calls[key] for key in keys}
        timings.append(measure(calls, device=world.device, rounds=1, burst_seconds=0))
        facts = {"size": size, "left_out": left_out, "chosen": chosen.lines}
        report = {"machine": describe(world), **facts, **figures(run, timings)}
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
        if time.time() - began > limit:
            break
    print(json.dumps(report["ways"], indent=1))
    overlap_gemm.finalize()


def figures(run: Run, timings: list[Timings]) -> dict[str, Any]:
    """Returns the measured part of the report."""
    results: dict[str, dict[str, Any]] = {}
    for name, kind in run.calls:
        key, base = f"{name} / {kind}", BASE + (COMPILED if name.endswith(COMPILED) else "")
        way = results.setdefault(name, {"error": run.errors[name], "made_s": run.made_s[name]})
        way[f"{kind}_ms"] = round(statistics.median(t.median(key) for t in timings) * 1e3, 3)
        if (base, kind) in run.calls:
            ratios = [t.ratio(key, f"{base} / {kind}") for t in timings]
            way[f"{kind}_ratio"] = round(statistics.median(ratios), 4)
    return {"rounds": len(timings), "ways": results}


if __name__ == "__main__":
    main()
