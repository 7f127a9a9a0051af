"""Microseconds of host time that one eager call takes, with everything cached.

    python benchmarks/host_time.py [WORD ...]                        # one CPU process: our own share of it
    bash launch/torchrun.sh -n 4 python benchmarks/host_time.py      # GPUs: whole calls, launches included

On a CPU the kernels and copies of `fused` are replaced by functions that do nothing, in an emulated world of
two ranks; times are of the calling thread. Autograd records "recorded" calls; "and backward" includes the
gradients of all operands. The last column is the median's ratio to that of torch's product of the same kind
(`torch.mm`, `torch._scaled_mm`), measured first, like the floor: a registered op that does nothing. Only rows
whose name contains a WORD are measured. On GPUs calls are issued without waiting for the device, few enough
that its queue does not fill up.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.api import layer_epilogues
from overlap_gemm.api.float8 import PLAIN
from overlap_gemm.backends.fused import gather_plans, plan_cache
from overlap_gemm.dispatch import gradient_products
from overlap_gemm.epilogues import add_residual, swiglu
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import OPS

CALLS, ROUNDS = 10, 100

products: dict[str, float] = {}
"""Seconds of torch's products, by name."""


@torch.library.custom_op("host_time::nothing", mutates_args=())
def nothing(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns uninitialized memory: the floor of every op that is registered with torch."""
    return x.new_empty(len(x), len(weight))


nothing.register_autograd(
    lambda ctx, grad: (grad.new_empty(ctx.x), grad.new_empty(ctx.weight)),
    setup_context=lambda ctx, inputs, output: vars(ctx).update(x=inputs[0].shape, weight=inputs[1].shape),
)


def host_seconds(call: Callable[[], object], synchronize: Callable[[], object]) -> tuple[float, float]:
    """Returns the least and the median time of a call over the rounds; on CPUs that of the calling thread."""
    rounds, clock = [], time.perf_counter if torch.cuda.is_initialized() else time.thread_time
    for _ in range(ROUNDS):
        synchronize()
        begin = clock()
        for _ in range(CALLS):
            call()
        rounds.append((clock() - begin) / CALLS)
    synchronize()
    return min(rounds), median(rounds)


def report(name: str, call: Callable[[], object], synchronize: Callable[[], object]) -> None:
    """Warms up, measures and prints; on rank 0. Rows that the command line excludes are not measured."""
    is_product = name.startswith("torch.")
    if sys.argv[1:] and not is_product and not any(word in name for word in sys.argv[1:]):
        return
    for _ in range(3):
        call()
    least, middle = host_seconds(call, synchronize)
    if is_product:
        products[name] = middle
    if not dist.is_initialized() or dist.get_rank() == 0:
        of = products.get("torch._scaled_mm" if "fp8" in name else "torch.mm")
        ratio = f" {middle / of:6.2f}" if of else ""
        print(f"{name:70} {least * 1e6:8.1f} {middle * 1e6:8.1f}{ratio}", flush=True)


def time_ops(backends: tuple[str, ...], x: torch.Tensor, weight: torch.Tensor, **options: object) -> None:
    """Times every op by every backend that has it, without and with a gradient of the weight."""
    wait: Callable[[], object] = torch.cuda.synchronize if x.is_cuda else int
    ranks = dist.get_world_size() if x.is_cuda else 1
    wanting = weight.detach().clone().requires_grad_()
    report("torch.mm", lambda: torch.mm(x, weight.t()), wait)
    time_passes("the floor: an op that does nothing", nothing, (x, weight), wait)
    for op in OPS:
        extents = {"all_gather_gemm": {"rows": "equal"}, "gemm_all_gather": {"columns": "equal"}}.get(op, {})
        call = getattr(overlap_gemm, op)
        weights = (weight, wanting)
        if op == "all_to_all_gemm":  # every rank has all of K
            wide = weight.repeat(1, ranks)
            weights = (wide, wide.clone().requires_grad_())
        for backend in backends:
            for name, w in zip(("", ", weight wants a gradient"), weights, strict=True):
                how = {"backend": backend, **extents, **options}
                report(f"{op}, {backend}{name}", partial(call, x, w, **how), wait)


@contextmanager
def world_without_kernels() -> Iterator[str]:
    """Yields the group of one of two emulated ranks, whose kernels, copies and transfers do nothing."""

    def nothing(*_: object) -> None:
        pass

    def gathered(x: torch.Tensor, shards: Any, group: object) -> torch.Tensor:
        return x.new_empty(shards.total, x.shape[1])

    with ExitStack() as stack:
        for module, name in (
            (plan_cache, "compiled_kernel"),
            (gather_plans, "compiled_gather"),
            (gather_plans, "compiled_gate"),
        ):
            stack.enter_context(mock.patch.object(module, name, lambda *_, **__: nothing))
        stack.enter_context(mock.patch.object(gradient_products, "gather_rows", gathered))
        emulator = stack.enter_context(Emulator("sm_90a", 2))
        for name in ("copy", "wait_stream"):
            stack.enter_context(mock.patch.object(emulator, name, nothing))
        yield stack.enter_context(VirtualWorld(2, emulator=emulator)).names[0]


def time_fused(x: torch.Tensor, weight: torch.Tensor, ranks: int, group: str | None = None) -> None:
    """Times fused calls of each kind: forward, forward that autograd records, forward and backward."""
    wait: Callable[[], object] = torch.cuda.synchronize if x.is_cuda else int
    shard, pair = x[: len(x) // ranks], (weight, weight.clone())
    residual = x.new_zeros(len(shard), len(weight))
    how: dict[str, Any] = {"group": group, "backend": "fused"}
    scatter = partial(overlap_gemm.gemm_reduce_scatter, k="equal", **how)
    reduce = partial(overlap_gemm.gemm_all_reduce, k="equal", **how)
    gather = partial(overlap_gemm.all_gather_gemm, rows="equal", columns="equal", **how)

    def gated(shard: torch.Tensor, *pair: torch.Tensor) -> torch.Tensor:
        gate, up = gather(shard, pair)
        return F.silu(gate) * up

    def by_layer(shard: torch.Tensor, *pair: torch.Tensor) -> torch.Tensor:
        more = {"rows": "equal", "columns": "equal", **how}
        return layer_epilogues.gated(PLAIN, shard, pair, None, layer_epilogues.GATINGS["silu"], None, **more)

    residual_of_layer = partial(layer_epilogues.plus_residual, PLAIN, "gemm_reduce_scatter")
    kinds: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
        "gemm_reduce_scatter": (scatter, (x, weight)),
        "gemm_all_reduce": (reduce, (x, weight)),
        "all_gather_gemm": (gather, (shard, weight)),
        "gemm_reduce_scatter, then add": (lambda x, w, r: scatter(x, w) + r, (x, weight, residual)),
        "gemm_reduce_scatter of add_residual": (
            lambda x, w, r: scatter(x, w, epilogue=add_residual(residual=r)),
            (x, weight, residual),
        ),
        "gemm_reduce_scatter of a layer with a residual": (
            lambda x, w, r: residual_of_layer(x, w, r, None, k="equal", **how),
            (x, weight, residual),
        ),
        "all_gather_gemm, then silu and mul": (gated, (shard, *pair)),
        "all_gather_gemm of swiglu": (lambda x, *w: gather(x, w, epilogue=swiglu()), (shard, *pair)),
        "all_gather_gemm of a layer with gate and up": (by_layer, (shard, *pair)),
    }
    for name, (call, tensors) in kinds.items():
        time_passes(f"fused {name}", call, tensors, wait)
    (x8, of_x), (shard8, of_shard), (weight8, of_weight) = map(overlap_gemm.quantize_rows, (x, shard, weight))
    if x.is_cuda:
        how = {"scale_a": of_x, "scale_b": of_weight.t(), "out_dtype": torch.bfloat16}
        report("torch._scaled_mm", lambda: torch._scaled_mm(x8, weight8.t(), **how), wait)
    reduce_scaled = partial(reduce, x8, weight8, scale_x=of_x, scale_w=of_weight)
    report("fused gemm_all_reduce, fp8", reduce_scaled, wait)
    gather_scaled = partial(gather, shard8, weight8, scale_x=of_shard, scale_w=of_weight)
    report("fused all_gather_gemm, fp8", gather_scaled, wait)
    with overlap_gemm.configured(shard_transport="copy_engine"):
        time_passes("fused all_gather_gemm by copies", gather, (shard, weight), wait)
        report("fused all_gather_gemm by copies, fp8", gather_scaled, wait)


def time_passes(
    name: str,
    call: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    wait: Callable[[], object],
) -> None:
    """Times a call without a gradient, one that autograd records, and one with all gradients."""
    wanting = tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)
    grad = torch.ones_like(call(*tensors))

    def both() -> None:
        torch.autograd.grad(call(*wanting), wanting, grad)

    report(name, partial(call, *tensors), wait)
    report(f"{name}, recorded", partial(call, *wanting), wait)
    report(f"{name}, and backward", both, wait)


def main() -> None:
    """Prints a table."""
    world = overlap_gemm.init()
    if world.rank == 0:
        print(f"{world.size} ranks on {world.device.type}; least and median of {ROUNDS} rounds, us; ratio")
    if world.device.type == "cuda":
        x = torch.randn(512, 1024 // world.size, device=world.device, dtype=torch.bfloat16)
        weight = torch.randn(1024, 1024 // world.size, device=world.device, dtype=torch.bfloat16)
        time_ops(("auto", "torch", "sequential"), x, weight)
        time_fused(x, weight, world.size)
    else:
        torch.set_num_threads(1)
        x, weight = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
        time_ops(("torch", "sequential"), x, weight)
        with world_without_kernels() as group:
            time_fused(torch.randn(8, 16).bfloat16(), torch.randn(32, 16).bfloat16(), 2, group)
    overlap_gemm.finalize()


if __name__ == "__main__":
    main()
