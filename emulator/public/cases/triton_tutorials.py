"""Kernels of Triton's tutorials (python/tutorials of a checkout, in PYTHONPATH) against double precision.

A tutorial is executed up to its first test, without its benchmarks.
"""

import importlib.util
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

os.environ["PYTEST_VERSION"] = "one configuration, as in the tutorial's own tests"


def tutorial(name: str) -> SimpleNamespace:
    """Returns what a tutorial defines; its kernels keep the file's name and lines."""
    path = Path(importlib.util.find_spec(name).origin)
    text = re.split(r"^(?:torch\.manual_seed|def test_|@pytest)", path.read_text(), maxsplit=1, flags=re.M)[0]
    held = {"__name__": name, "__file__": str(path)}
    exec(compile(text, str(path), "exec"), held)
    return SimpleNamespace(**held)


def close(mine: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Raises where a result is not the reference."""
    torch.testing.assert_close(mine.detach().cpu().double(), exact.detach(), rtol=tolerance, atol=tolerance)


def with_gradients(kernel, reference, inputs: list[torch.Tensor], tolerance: float) -> None:  # noqa: ANN001
    """Compares outputs, and gradients for the same gradient of the output."""
    mine = [t.cuda().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    out, want = kernel(*mine), reference(*exact)
    gradient = torch.randn_like(out).cpu() / 8
    out.backward(gradient.cuda())
    want.backward(gradient.double())
    close(out, want, tolerance)
    for ours, right in zip(mine, exact, strict=True):
        close(ours.grad, right.grad, 4 * tolerance)


torch.manual_seed(0)
name = sys.argv[1]
if name == "add":
    x, y = torch.rand(5000), torch.rand(5000)
    close(tutorial("01-vector-add").add(x.cuda(), y.cuda()), x.double() + y.double(), 1e-6)
elif name == "softmax":
    x = torch.randn(150, 781)
    close(tutorial("02-fused-softmax").softmax(x.cuda()), x.double().softmax(1), 1e-6)
elif name == "matmul":
    a, b = torch.randn(200, 96).half(), torch.randn(96, 300).half()
    out = tutorial("03-matrix-multiplication").matmul(a.cuda(), b.cuda(), "leaky_relu")
    close(out, F.leaky_relu(a.double() @ b.double()), 2**-8)
elif name == "layer-norm":
    layer_norm = tutorial("05-layer-norm").layer_norm
    inputs = [torch.randn(300, 500).half(), torch.rand(500).half(), torch.rand(500).half()]
    with_gradients(
        lambda x, w, b: layer_norm(x, (500,), w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (500,), w, b, 1e-5), inputs, 2**-6,
    )  # fmt: skip
elif name == "attention":
    attention, rows, width = tutorial("06-fused-attention").attention, 256, 64
    hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns causal attention."""
        scores = (q @ k.transpose(-1, -2) / math.sqrt(width)).masked_fill(hidden, -math.inf)
        return scores.softmax(-1) @ v

    inputs = [torch.randn(1, 2, rows, width).half() for _ in range(3)]
    with_gradients(lambda *a: attention(*a, True, 1 / math.sqrt(width), False), reference, inputs, 2**-7)
else:
    raise ValueError(f"no case {name}")
