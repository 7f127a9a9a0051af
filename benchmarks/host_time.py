"""Microseconds of host time that one eager call takes, with everything cached.

    python benchmarks/host_time.py                                   # one CPU process: our own share of it
    bash launch/torchrun.sh -n 4 python benchmarks/host_time.py      # GPUs: whole calls, launches included

On a CPU the kernel of `fused` is replaced by one that does nothing, in an emulated world of two ranks. The
portable backends multiply small matrices; their `torch.mm` is printed as the lower bound. On GPUs
calls are issued without waiting for the device, few enough that its queue does not fill up.
"""

import time
from collections.abc import Callable
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.spec import OPS

CALLS, ROUNDS = 50, 20


def host_seconds(call: Callable[[], object], synchronize: Callable[[], None]) -> tuple[float, float]:
    """Returns the least and the median time of a call over the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - begin) / CALLS)
    synchronize()
    return min(rounds), median(rounds)


def report(name: str, call: Callable[[], object], synchronize: Callable[[], None]) -> None:
    """Warms up, measures and prints; on rank 0."""
    for _ in range(3):
        call()
    least, middle = host_seconds(call, synchronize)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{name:58} {least * 1e6:8.1f} {middle * 1e6:8.1f}", flush=True)


def time_ops(backends: tuple[str, ...], x: torch.Tensor, weight: torch.Tensor, **options: object) -> None:
    """Times every op by every backend that has it, without and with a gradient of the weight."""
    wait = torch.cuda.synchronize if x.is_cuda else (lambda: None)
    ranks = dist.get_world_size() if x.is_cuda else 1
    wanting = weight.detach().clone().requires_grad_()
    report("torch.mm", lambda: torch.mm(x, weight.t()), wait)
    for op in OPS:
        extents = {"all_gather_gemm": {"rows": "equal"}, "gemm_all_gather": {"columns": "equal"}}.get(op, {})
        call = getattr(overlap_gemm, op)
        weights = (weight, wanting)
        if op == "all_to_all_gemm":  # every rank has all of K
            wide = weight.repeat(1, ranks)
            weights = (wide, wide.clone().requires_grad_())
        for backend in backends:
            if backend == "fused" and op != "gemm_reduce_scatter":
                continue
            for name, w in zip(("", ", weight wants a gradient"), weights, strict=True):
                how = {"backend": backend, **extents, **options}
                report(f"{op}, {backend}{name}", lambda c=call, o=w, h=how: c(x, o, **h), wait)


def main() -> None:
    """Prints a table."""
    world = overlap_gemm.init()
    if world.rank == 0:
        print(f"{world.size} ranks on {world.device.type}; least and median of {ROUNDS} rounds, us")
    if world.device.type == "cuda":
        x = torch.randn(512, 1024 // world.size, device=world.device, dtype=torch.bfloat16)
        weight = torch.randn(1024, 1024 // world.size, device=world.device, dtype=torch.bfloat16)
        time_ops(("auto", "torch", "sequential", "fused"), x, weight)
    else:
        torch.set_num_threads(1)
        x, weight = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
        time_ops(("torch", "sequential"), x, weight)
        nothing = mock.patch.object(plans, "compiled_kernel", lambda *_: lambda *_: None)
        with nothing, Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as ranks:
            call = overlap_gemm.gemm_reduce_scatter
            how = {"group": ranks.names[0], "backend": "fused"}
            for name, w in (("", weight), (", weight wants a gradient", weight.clone().requires_grad_())):
                report(f"gemm_reduce_scatter, fused, no kernel{name}", lambda o=w: call(x, o, **how), int)
    overlap_gemm.finalize()


if __name__ == "__main__":
    main()
