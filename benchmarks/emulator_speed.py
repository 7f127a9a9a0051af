"""How fast the emulator runs a GEMM.

    OPENBLAS_NUM_THREADS=1 python benchmarks/emulator_speed.py [--size 1024]

Prints seconds of processor time (of the second call of each, so that translation is not in it), warp
instructions, and their ratio. The kernels are the emulator's own test kernels.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from overlap_gemm.emulator import Emulator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "emulator"))


def measure(gemm: Any, size: int, clusters: int, checks: tuple[str, ...] | None) -> tuple[float, int]:
    """Processor seconds and warp instructions of one `size`-cubed GEMM."""
    from kernels import build

    options = {} if checks is None else {"checks": checks}
    with Emulator(gemm.arch, **options) as emulator:
        compiled = build.compile_gemm(gemm)
        for _ in range(2):
            operands = build.operands(gemm, size, size, size)
            before, begin = emulator.report.instructions, time.process_time()
            build.call(compiled, gemm, operands, clusters)
            seconds = time.process_time() - begin
        return seconds, emulator.report.instructions - before


def main(size: Annotated[int, typer.Option(help="M = N = K.")] = 1024) -> None:
    """Measures the kernels of both architectures, with the default checks and with none."""
    from kernels.gemm_sm90 import GemmSm90
    from kernels.gemm_sm100 import GemmSm100

    kernels = {
        "sm_100a 128x128": (GemmSm100(tile=(128, 128)), 64),
        "sm_100a 2-CTA 256x256": (GemmSm100(tile=(256, 256), two_cta=True, cluster=(2, 1)), 16),
        "sm_90a": (GemmSm90(), 64),
    }
    print(f"{'kernel':24}{'checks':10}{'seconds':>9}{'instructions':>14}{'per second':>12}")
    for name, (gemm, clusters) in kernels.items():
        for label, checks in (("default", None), ("none", ())):
            seconds, count = measure(gemm, size, clusters, checks)
            print(f"{name:24}{label:10}{seconds:9.3f}{count:14,}{count / seconds:12,.0f}")


if __name__ == "__main__":
    typer.run(main)
