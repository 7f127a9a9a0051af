"""vLLM's Triton kernels against torch in double precision; its host modules are stand-ins."""

import math
import sys
from types import SimpleNamespace

import torch
import triton
import triton.language
from bare import bare

OPS, LAYERS = "vllm.v1.attention.ops", "vllm.model_executor.layers"
platform = SimpleNamespace(
    is_rocm=lambda: False, is_cuda=lambda: True, is_cuda_alike=lambda: True, is_xpu=lambda: False,
    is_device_capability_family=lambda *_: False, is_fp8_fnuz=lambda: False,
    fp8_dtype=lambda: torch.float8_e4m3fn, has_device_capability=lambda *_: True,
)  # fmt: skip
bare(
    "vllm", "vllm.v1", "vllm.v1.attention", OPS, "vllm.model_executor", LAYERS, f"{LAYERS}.fused_moe",
    f"{LAYERS}.mamba", f"{LAYERS}.mamba.ops", f"{LAYERS}.quantization",
    f"{LAYERS}.quantization.compressed_tensors", "vllm.utils",
    vllm__platforms={"current_platform": platform},
    vllm__triton_utils={
        "tl": triton.language, "triton": triton, "HAS_TRITON": True,
        "use_tensor_descriptor": lambda use: False,
    },
    vllm__triton_utils__allocation={"set_triton_allocator": lambda device: None},
    vllm__logger={"init_logger": lambda name: SimpleNamespace(warning_once=print, info_once=print)},
)  # fmt: skip


def softmax_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Returns attention of [rows, heads, width] in double precision; heads share keys."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


torch.manual_seed(0)
name = sys.argv[1]
tolerance = {"rtol": 2**-6, "atol": 2**-6}
if name == "decode-attention":
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    heads, shared, width, splits, lengths = 8, 2, 64, 4, [40, 17]
    q = torch.randn(2, heads, width).half()
    keys, values = (torch.randn(64, shared, width).half() for _ in range(2))
    table = torch.stack([torch.randperm(64)[:48] for _ in lengths]).int()
    out, logs = torch.empty(2, heads, width, device="cuda").half(), torch.empty(2, heads, device="cuda")
    logits = torch.empty(2, heads, splits, width + 1, device="cuda")
    decode_attention_fwd(
        q.cuda(), keys.cuda(), values.cuda(), out, logs, table.cuda(), torch.tensor(lengths).int().cuda(),
        logits, splits, 1 / math.sqrt(width),
    )  # fmt: skip
    rows = [table[n, :length].long() for n, length in enumerate(lengths)]
    want = torch.cat([softmax_of(q[n : n + 1], keys[r], values[r], False) for n, r in enumerate(rows)])
elif name == "prefill-attention":
    from vllm.v1.attention.ops.triton_prefill_attention import context_attention_fwd

    lengths = [70, 33]
    q, k, v = (torch.randn(sum(lengths), heads, 64).half() for heads in (4, 2, 2))
    out = torch.empty_like(q, device="cuda")
    starts, counts = (torch.tensor(t).int().cuda() for t in ([0, lengths[0]], lengths))
    context_attention_fwd(q.cuda(), k.cuda(), v.cuda(), out, starts, counts, max(lengths))
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    want = torch.cat([softmax_of(*part, True) for part in parts])
elif name == "merge-attention":
    from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states

    parts, logs = torch.randn(2, 6, 4, 64), torch.randn(2, 4, 6)
    out = torch.empty(6, 4, 64, device="cuda")
    merge_attn_states(out, parts[0].cuda(), logs[0].cuda(), parts[1].cuda(), logs[1].cuda())
    share = logs.double().softmax(0).transpose(1, 2)[..., None]
    want = (parts * share).sum(0)
elif name == "moe-sum":
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    parts, weights = torch.randn(9, 4, 512).bfloat16(), torch.rand(9, 4)
    out = moe_fused_mul_sum(parts.cuda(), weights.cuda())
    want = (parts.double() * weights.double()[..., None]).sum(1)
elif name == "scaled-matmul":
    from vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm import triton_scaled_mm

    a, b = (torch.randint(-100, 100, shape).to(torch.int8) for shape in ((70, 256), (256, 96)))
    scales = torch.rand(70, 1) / 100, torch.rand(96, 1) / 100
    out = triton_scaled_mm(a.cuda(), b.cuda(), *(s.cuda() for s in scales), torch.bfloat16)
    want = (a.double() @ b.double()) * scales[0].double() * scales[1].double().T
elif name == "gated-norm":
    from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated

    x, gate, weight = torch.randn(7, 512).bfloat16(), torch.randn(7, 512).bfloat16(), torch.randn(512)
    out = rms_norm_gated(x.cuda(), weight.cuda(), None, gate.cuda(), 1e-6, 256, norm_before_gate=False)
    gated = (x.double() * torch.nn.functional.silu(gate.double())).view(7, 2, 256)
    want = torch.nn.functional.rms_norm(gated, (256,), None, 1e-6).view(7, 512) * weight.double()
    tolerance["atol"] = 2**-5
else:
    raise ValueError(f"no case {name}")
torch.testing.assert_close(out.cpu().double(), want, **tolerance)
