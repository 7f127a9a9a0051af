"""Kernels in Triton of flash-linear-attention against the recurrence in double precision."""

import sys

import torch
from torch.nn.functional import logsigmoid, normalize

BATCH, TIME, HEADS, WIDTH = 1, 128, 2, 64


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns linear attention's output with logarithms of decays [.., 1 or WIDTH], or the delta rule's."""
    state, out = torch.zeros(BATCH, HEADS, WIDTH, WIDTH, dtype=q.dtype), []
    for at in range(TIME):
        if decay is not None:
            state = state * decay[:, at].exp()[..., None]
        new = v[:, at]
        if beta is not None:
            new = (new - torch.einsum("bhkv,bhk->bhv", state, k[:, at])) * beta[:, at, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, at], new)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, at]) * WIDTH**-0.5)
    return torch.stack(out, 1)


torch.manual_seed(0)
name = sys.argv[1]
q, k, v = (torch.randn(BATCH, TIME, HEADS, WIDTH).bfloat16() for _ in range(3))
k = normalize(k.float(), dim=-1).bfloat16()
gate = logsigmoid(torch.randn(BATCH, TIME, HEADS, WIDTH)).bfloat16()
beta = torch.rand(BATCH, TIME, HEADS).bfloat16()
decay = gate[..., 0].float()
exact, mine = [t.double() for t in (q, k, v)], [t.cuda() for t in (q, k, v)]
if name == "linear":
    from fla.ops.linear_attn import chunk_linear_attn

    out, _ = chunk_linear_attn(*mine, normalize=False)
    want = recurrence(*exact)
elif name == "simple-gla":
    from fla.ops.simple_gla import chunk_simple_gla

    out, _ = chunk_simple_gla(*mine, g=decay.cuda())
    want = recurrence(*exact, decay=decay.double()[..., None])
elif name == "gla":
    from fla.ops.gla import fused_recurrent_gla

    out, _ = fused_recurrent_gla(*mine, gk=gate.cuda())
    want = recurrence(*exact, decay=gate.double())
elif name == "delta-rule":
    from fla.ops.delta_rule import chunk_delta_rule

    out, _ = chunk_delta_rule(*mine, beta.cuda())
    want = recurrence(*exact, beta=beta.double())
elif name == "gated-delta-rule":
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    out, _ = fused_recurrent_gated_delta_rule(*mine, g=decay.cuda(), beta=beta.cuda())
    want = recurrence(*exact, decay=decay.double()[..., None], beta=beta.double())
else:
    raise ValueError(f"no case {name}")
torch.testing.assert_close(out.cpu().double(), want, rtol=2**-5, atol=2**-6)
