"""FlashAttention-4, causal, against attention in double precision: forward, or forward and backward."""

import math
import sys

import torch
from flash_attn.cute.interface import flash_attn_func

ROWS, WIDTH = 128, 128
torch.manual_seed(0)
inputs = [torch.randn(1, ROWS, 1, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
exact = [t.cpu().double() for t in inputs]
for t in inputs + exact:
    t.requires_grad_(sys.argv[1] == "backward")
out = flash_attn_func(*inputs, causal=True)
out = out[0] if isinstance(out, tuple) else out
q, k, v = (t.transpose(1, 2) for t in exact)
hidden = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(hidden, -math.inf)
want = (scores.softmax(-1) @ v).transpose(1, 2)
torch.testing.assert_close(out.detach().cpu().double(), want.detach(), rtol=2**-6, atol=2**-6)
if sys.argv[1] == "backward":
    gradient = torch.randn_like(out)
    out.backward(gradient)
    want.backward(gradient.cpu().double())
    for mine, right in zip(inputs, exact, strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), right.grad, rtol=2**-5, atol=2**-5)
