"""Speed of the emulator: warp instructions per second and seconds per GEMM, on one core.

::

    OPENBLAS_NUM_THREADS=1 python benchmarks/emulator_speed.py [--rounds 5] [--json FILE]

Compiles this library's kernels (no GPU needed), and runs each once to translate its PTX. Then it runs each
`--rounds` times in interleaved rounds, and prints medians of the process's CPU time, which other jobs on the
machine disturb least; of wall time; and of CPU time without checks. Results are compared with torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy
import torch
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import from_dlpack

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.build import compile_kernel, make_kernel
from overlap_gemm.cli.this_machine import processor
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.runtime.virtual import VirtualWorld

STREAM = CUstream(0)
CLUSTERS = 8
"""Clusters a launch may use; the persistent kernels walk the other tiles."""

GEMM_SECONDS, RANKS_SECONDS, RATE = 0.4, 1.0, 500_000
"""Targets of issue 3: a 1024^3 GEMM, four ranks of 512 x 512 x 256, warp instructions per second (sm_100)."""

SECONDS = ("cpu_seconds", "cpu_seconds_unchecked", "wall_seconds")


@dataclass
class Workload:
    """One thing to measure.

    Attributes:
        name: for the table.
        target: seconds it may take, or None.
        run: does it once, with the default checks or with none; returns warp instructions.
        cpu: seconds of process CPU time per round.
        wall: seconds of wall time per round.
        unchecked: seconds of process CPU time per round with no checks.
        instructions: warp instructions of a run.
    """

    name: str
    target: float | None
    run: Callable[[bool], int]
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    unchecked: list[float] = field(default_factory=list)
    instructions: int = 0

    def measure(self) -> None:
        """Runs one round."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.instructions = self.run(True)
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        cpu = time.process_time()
        self.run(False)
        self.unchecked.append(time.process_time() - cpu)

    def result(self) -> dict[str, object]:
        """Medians and what follows from them."""
        cpu = statistics.median(self.cpu)
        return {
            "name": self.name,
            "cpu_seconds": round(cpu, 4),
            "cpu_seconds_of_rounds": [round(t, 4) for t in self.cpu],
            "cpu_seconds_unchecked": round(statistics.median(self.unchecked), 4),
            "wall_seconds": round(statistics.median(self.wall), 4),
            "warp_instructions": self.instructions,
            "warp_instructions_per_cpu_second": round(self.instructions / cpu),
            "target_seconds": self.target,
        }


def checks(on: bool) -> dict[str, tuple[str, ...]]:
    """Options of the emulator: its default checks, or none."""
    return {} if on else {"checks": ()}


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns A (M, K), B (N, K) and a poisoned C (M, N), bf16."""
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))
    return a, b, torch.full((m, n), torch.nan, dtype=torch.bfloat16)


def require_close(out: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """Raises unless `out` is `exact` up to bf16's rounding."""
    error = (out.float() - exact).abs().max() / exact.abs().max()
    if not error < 2**-8:
        raise ValueError(f"{what}: the result is off by {error:.3g} of its largest element")


def plain_gemm(
    config: GemmConfig, m: int, n: int, k: int, ranks: int = 1, target: float | None = None
) -> Workload:
    """Returns a plain GEMM on every rank, co-scheduled."""
    with Emulator(config.arch):
        compiled = compile_kernel(make_kernel(config))
    data = [operands(m, n, k) for _ in range(ranks)]
    views = [[from_dlpack(t, assumed_align=16).mark_layout_dynamic(1) for t in tensors] for tensors in data]
    tiles = -(-m // config.cluster_tile[0]) * -(-n // config.cluster_tile[1])
    name = f"{config.arch} {config.mma} {'x'.join(map(str, config.tile))}: GEMM {m}x{n}x{k}"

    def run(checked: bool) -> int:
        with Emulator(config.arch, ranks=ranks, **checks(checked)) as emulator:
            for rank, tensors in enumerate(views):
                with emulator.rank(rank):
                    compiled(*tensors, None, None, min(CLUSTERS, tiles), STREAM)
            if ranks > 1:
                emulator.run()
        return emulator.report.instructions

    workload = Workload(name + (f" on {ranks} ranks" if ranks > 1 else ""), target, run)
    run(True)
    for a, b, c in data:
        require_close(c, a.float() @ b.float().t(), workload.name)
    return workload


def reduce_scatter(m: int, n: int, k: int, ranks: int, target: float | None = None) -> Workload:
    """Returns a GEMM reduce-scatter by the public op, with K = `k` on every rank."""
    data = [operands(m, n, k)[:2] for _ in range(ranks)]
    exact = sum(a.float() @ b.float().t() for a, b in data)
    outs: list[torch.Tensor] = []

    def run(checked: bool) -> int:
        with (
            Emulator("sm_100a", ranks=ranks, **checks(checked)) as emulator,
            VirtualWorld(ranks, emulator=emulator) as world,
        ):
            outs[:] = [
                overlap_gemm.gemm_reduce_scatter(a, b, group=group, backend="fused")
                for (a, b), group in zip(data, world.names, strict=True)
            ]
            world.synchronize()
        return emulator.report.instructions

    workload = Workload(f"sm_100a: gemm_reduce_scatter {m}x{n}x{k} on {ranks} ranks", target, run)
    run(True)
    require_close(torch.cat(outs), exact, workload.name)
    return workload


def workloads() -> list[Workload]:
    """Returns the measured workloads."""
    cube = (1024, 1024, 1024)
    pair = {"mma": "2cta", "cluster": (2, 1)}
    return [
        plain_gemm(GemmConfig(tile=(256, 256), **pair), *cube, target=GEMM_SECONDS),
        plain_gemm(GemmConfig(tile=(256, 128), **pair), *cube, target=GEMM_SECONDS),
        plain_gemm(GemmConfig(tile=(128, 256)), *cube, target=GEMM_SECONDS),
        plain_gemm(GemmConfig(tile=(128, 128)), *cube, target=GEMM_SECONDS),
        plain_gemm(GemmConfig("sm_90a", (128, 256), mma="cooperative"), *cube),
        plain_gemm(GemmConfig(tile=(128, 128)), 512, 512, 256, ranks=4, target=RANKS_SECONDS),
        reduce_scatter(512, 512, 256, 4, target=RANKS_SECONDS),
    ]


def machine() -> dict[str, object]:
    """Returns properties of the machine and versions of libraries."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "openblas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
        "date": date.today().isoformat(),
    }


def main() -> None:
    """Measures, prints and stores the workloads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "emulator-speed.json"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as dumps:
        os.environ["CUTE_DSL_DUMP_DIR"] = dumps  # PTX dumps of two processes must not meet
        all_workloads = workloads()
        before = machine()
        for _ in range(options.rounds):
            for workload in all_workloads:
                workload.measure()
    results = [workload.result() for workload in all_workloads]
    print(f"| workload | CPU s | unchecked | wall s | target s | warp instructions | per CPU s ({RATE:,}) |")
    print("|---|---|---|---|---|---|---|")
    for r in results:
        seconds = " | ".join(f"{r[kind]:.3f}" for kind in SECONDS)
        print(
            f"| {r['name']} | {seconds} | {r['target_seconds'] or '-'} "
            f"| {r['warp_instructions']:,} | {r['warp_instructions_per_cpu_second']:,} |"
        )
    options.json.write_text(
        json.dumps({"machine": before, "rounds": options.rounds, "results": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
