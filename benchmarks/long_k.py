"""Energy, clock and memory traffic of GEMM kernels on one GPU: why the best kernel depends on K.

    python benchmarks/long_k.py --json out.json                         # time, energy and clock, sustained
    ncu ... python benchmarks/long_k.py --kernel cooperative-g8 --k 14336     # three launches to profile

Each kernel runs alone, in a group of one without communication, in loops of 0.4 s. The kernels take turns.
Energy is NVML's counter over a loop. cuBLAS is `torch.mm`. Needs pynvml.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import overlap_gemm
from overlap_gemm.cli.this_machine import describe
from overlap_gemm.tuning.settings import configured

KERNELS: dict[str, dict[str, Any]] = {
    "cublas": {},
    "pingpong-g8": {"mma": "pingpong", "tile": (128, 128), "cluster": (2, 1), "raster_group": 8},
    "pingpong-g16": {"mma": "pingpong", "tile": (128, 128), "cluster": (2, 1), "raster_group": 16},
    "pingpong-64x256": {"mma": "pingpong", "tile": (64, 256), "cluster": (2, 1), "raster_group": 8},
    "cooperative-g4": {"mma": "cooperative", "tile": (128, 256), "cluster": (2, 1), "raster_group": 4},
    "cooperative-g8": {"mma": "cooperative", "tile": (128, 256), "cluster": (2, 1), "raster_group": 8},
    "cooperative-g16": {"mma": "cooperative", "tile": (128, 256), "cluster": (2, 1), "raster_group": 16},
}
LOOP = 0.4
"""Seconds of a loop."""

ROUNDS = 5


class Product:
    """`x @ weight.t()` by one of the kernels."""

    def __init__(self, kernel: str, k: int) -> None:
        self.settings = KERNELS[kernel]
        self.x, self.weight = (torch.randn(8192, k, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def __call__(self) -> torch.Tensor:
        """Launches it."""
        if not self.settings:
            return torch.mm(self.x, self.weight.t())
        with configured(**self.settings):
            return overlap_gemm.gemm_reduce_scatter(self.x, self.weight, backend="fused")


def sustained(call: Product, device: Any) -> dict[str, float]:
    """Returns seconds, joules and the SM clock in MHz of one call, in a loop."""
    import pynvml

    torch.cuda.synchronize()
    before, begin, calls = pynvml.nvmlDeviceGetTotalEnergyConsumption(device), time.perf_counter(), 0
    clocks = []
    while time.perf_counter() - begin < LOOP:
        for _ in range(8):
            call()
        calls += 8
        clocks.append(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(device) - before) / 1e3
    return {"seconds": seconds / calls, "joules": joules / calls, "clock_mhz": statistics.median(clocks)}


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    kernel: Annotated[str | None, typer.Option(help="Launch this one alone, three times.")] = None,
    k: Annotated[list[int] | None, typer.Option(help="K; repeat for several.")] = None,
) -> None:
    """Measures, or launches one kernel."""
    world = overlap_gemm.init(device="cuda")
    depths = k or [4096, 14336]
    if kernel is not None:
        call = Product(kernel, depths[0])
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        return
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    results = []
    for depth in depths:
        calls = {name: Product(name, depth) for name in KERNELS}
        expected = calls["cublas"]()
        for name, call in calls.items():
            call.x, call.weight = calls["cublas"].x, calls["cublas"].weight
            error = (call().float() - expected.float()).norm() / expected.float().norm()
            assert error < 0.01, f"{name} differs by {error}"
        rounds = [{name: sustained(call, device) for name, call in calls.items()} for _ in range(ROUNDS)]
        for name in calls:
            fields = rounds[0][name]
            row = {field: statistics.median(each[name][field] for each in rounds) for field in fields}
            results.append({"kernel": name, "k": depth, **row})
            print(json.dumps(results[-1]), flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": describe(world), "results": results}, indent=1) + "\n")
    overlap_gemm.finalize()


if __name__ == "__main__":
    typer.run(main)
