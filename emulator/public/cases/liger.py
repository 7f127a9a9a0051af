"""Liger-Kernel's kernels, in Triton or the CuTe DSL, forward and backward, against double precision."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional as F


def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns rotary embeddings of both, concatenated."""

    def one(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    return torch.cat([one(q), one(k)], 1)


def jsd(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Returns the Jensen-Shannon divergence of two tensors of logarithms."""
    middle = ((student.exp() + teacher.exp()) / 2).log()
    parts = (F.kl_div(middle, x, log_target=True, reduction="batchmean") for x in (student, teacher))
    return sum(parts) / 2


def function(module: str, triton: str, cute: str, in_cute: bool) -> Any:
    """Returns the function of torch.autograd of one of both languages."""
    if in_cute:
        return getattr(
            import_module(f"liger_kernel.ops.backends._cutedsl.{module}"), f"_Liger{cute}CuTeDSLFunction"
        )
    return getattr(import_module(f"liger_kernel.ops.{module}"), f"Liger{triton}Function")


def case(name: str, in_cute: bool) -> tuple[Callable, Callable, list[torch.Tensor], list[torch.Tensor]]:
    """Returns the kernel, its reference, its differentiable and its other inputs."""
    x, y, weight, bias = torch.randn(6, 300), torch.randn(6, 300), torch.randn(300), torch.randn(300)
    if name == "rms-norm":
        Rms = function("rms_norm", "RMSNorm", "RMSNorm", in_cute)

        return (
            lambda *a: Rms.apply(*a, 1e-6, 0.0, "llama", False, None),
            lambda x, w: F.rms_norm(x, (300,), w, 1e-6),
            [x, weight],
            [],
        )
    if name == "add-rms-norm":
        AddRms = function("fused_add_rms_norm", "FusedAddRMSNorm", "FusedAddRMSNorm", in_cute)

        want = lambda x, y, w: F.rms_norm(x + y, (300,), w, 1e-6)  # noqa: E731
        return lambda *a: AddRms.apply(*a, 1e-6)[0], want, [x, y, weight], []
    if name == "layer-norm":
        Layer = function("layer_norm", "LayerNorm", "LayerNorm", in_cute)

        want = lambda x, w, b: F.layer_norm(x, (300,), w, b, 1e-6)  # noqa: E731
        return lambda *a: Layer.apply(*a, 1e-6), want, [x, weight, bias], []
    if name == "softmax":
        Softmax = function("softmax", "Softmax", "Softmax", in_cute)

        return Softmax.apply, lambda x: x.softmax(-1), [x], []
    if name == "sparsemax":
        from liger_kernel.ops.sparsemax import LigerSparsemaxFunction as Sparsemax

        def want(x: torch.Tensor) -> torch.Tensor:
            ordered = x.sort(-1, descending=True).values
            sums, ranks = ordered.cumsum(-1) - 1, torch.arange(1, x.shape[-1] + 1)
            support = (ordered * ranks > sums).sum(-1, keepdim=True)
            return (x - sums.gather(-1, support - 1) / support).clamp(min=0)

        return lambda x: Sparsemax.apply(x, -1), want, [x], []
    if name == "cross-entropy":
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as CrossEntropy

        x, target = torch.randn(6, 2000), torch.randint(0, 2000, (6,))
        return lambda x, t: CrossEntropy.apply(x, t, None)[0], F.cross_entropy, [x], [target]
    if name == "swiglu":
        SwiGlu = function("swiglu", "SiLUMul", "SwiGLU", in_cute)

        return SwiGlu.apply, lambda x, y: F.silu(x) * y, [x, y], []
    if name == "geglu":
        GeGlu = function("geglu", "GELUMul", "GeGLU", in_cute)

        return GeGlu.apply, lambda x, y: F.gelu(x, approximate="tanh") * y, [x, y], []
    if name == "rope":
        Rope = function("rope", "Rope", "Rope", in_cute)

        angles = torch.randn(1, 5, 32).repeat(1, 1, 2)
        heads = [torch.randn(2, 8, 5, 64), torch.randn(2, 4, 5, 64)]
        return lambda *a: torch.cat(Rope.apply(*a), 1), rotated, heads, [angles.cos(), angles.sin()]
    if name == "jsd":
        from liger_kernel.ops.jsd import LigerJSDFunction as Jsd

        student, teacher = x.log_softmax(-1), y.log_softmax(-1)
        return Jsd.apply, jsd, [student], [teacher]
    raise ValueError(f"no case {name}")


def compare(name: str, in_cute: bool) -> None:
    """Raises where outputs or gradients are not the reference."""
    torch.manual_seed(0)
    kernel, reference, inputs, others = case(name, in_cute)
    mine = [t.cuda().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    out = kernel(*[t + 0 for t in mine], *[t.cuda() for t in others])  # some kernels overwrite their inputs
    want = reference(*exact, *[t.double() if t.is_floating_point() else t for t in others])
    gradient = torch.randn_like(want)
    result = out.detach().cpu().double()
    out.backward(gradient.float().cuda())
    want.backward(gradient)
    torch.testing.assert_close(result, want.detach(), rtol=1e-5, atol=1e-5)
    for ours, right in zip(mine, exact, strict=True):
        torch.testing.assert_close(ours.grad.cpu().double(), right.grad, rtol=1e-4, atol=1e-5)
