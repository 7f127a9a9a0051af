"""How many warp instructions a second the emulator executes here, by kernels whose PTX is in the repository.

::

    OPENBLAS_NUM_THREADS=1 python emulator/public/speed.py [--rounds 5] [--json FILE]

Prints, of each kernel, warp instructions per second of CPU time with the default checks and with none: of its
recorded launch of a few CTAs, and of one with 16 times as many. Then it prints nanoseconds of CPU time of
single instructions. Each is the best of so many rounds, which other jobs on the machine disturb least. It
needs this distribution alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy

from cute_emulator import Emulator
from cute_emulator.conformance.kernel import aligned, launch, module
from cute_emulator.execution.launch import Machine
from cute_emulator.host.kernels import device_of
from cute_emulator.host.launch_files import run_file

KERNELS = Path(__file__).parents[1] / "tests" / "data" / "ptx"
FACTOR = 16
GROWS = {
    "cuda-sum": (10000, 8), "cuda-transpose": (64,), "triton-add": (1000,), "triton-matmul": (128,),
    "triton-matmul_tma": (128, 768), "triton-softmax": (4,),
}  # fmt: skip
"""Extents and arguments of a kernel's launch that grow with its grid."""


TURNS = 200
SETUP = """
mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; cvt.u64.u32 %d5, %r1; add.s64 %d4, %d0, %d5; mov.u32 %r2, 0;
mov.u32 %r3, 5; mov.u32 %r4, %r0; mov.u32 %r5, buf; add.u32 %r6, %r5, %r1;
"""
LOOP = f"add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, {TURNS}; @%p0 bra L;"
COSTS = {
    "add of equal lanes": ("add.u32 %r3, %r3, %r2;", 16),
    "add by lane": ("add.u32 %r4, %r4, %r0;", 16),
    "shfl": ("shfl.sync.bfly.b32 %r4, %r4, 1, 31, -1;", 4),
    "ld.shared by lane": ("ld.shared.b32 %r7, [%r6];", 4),
    "st.shared by lane": ("st.shared.b32 [%r6], %r4;", 4),
    "ld.global by lane": ("ld.global.b32 %r7, [%d4];", 4),
    "st.global by lane": ("st.global.b32 [%d4], %r4;", 4),
    "bar.sync": ("bar.sync 0;", 4),
}
"""Instructions whose cost is measured by itself, with their number in a turn of the loop."""


def processor() -> str:
    """The CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def larger(name: str, small: dict[str, Any]) -> dict[str, Any]:
    """Returns a launch of a kernel with `FACTOR` times the CTAs."""

    def grown(value: Any) -> Any:
        if isinstance(value, list):
            return [grown(extent) for extent in value]
        if isinstance(value, dict):
            return value | {"shape": grown(value["shape"])}
        return value * FACTOR if value in GROWS[name] else value

    *others, last = [small["grid"]] if isinstance(small["grid"], int) else small["grid"]
    grid = [*others, last * FACTOR] if name == "cuda-transpose" else [FACTOR * (others or [last])[0], 1, 1]
    return small | {"grid": grid, "args": {key: grown(value) for key, value in small["args"].items()}}


def rate(text: str, described: dict[str, Any], count: int, rounds: int, **checks: tuple[str, ...]) -> int:
    """Warp instructions per second of CPU time, of `count` launches in one emulator.

    Raises:
        RuntimeError: The emulator reports something.
    """
    best = 0.0
    with tempfile.TemporaryDirectory() as name:
        kernel, file = Path(name) / "k.ptx", Path(name) / "launch.json"
        kernel.write_text(text)
        file.write_text(json.dumps(described))
        for _ in range(rounds + 1):  # the first translates the kernel
            emulator = Emulator(device_of(text), collect=True, **checks)
            begin = time.process_time()
            for _ in range(count):
                run_file(emulator, str(kernel), str(file))
            best = max(best, emulator.report.instructions / (time.process_time() - begin))
            if emulator.report.findings:
                raise RuntimeError(str(emulator.report))
    return round(best)


def cost(body: str, count: int, rounds: int, **checks: tuple[str, ...]) -> int:
    """Nanoseconds of CPU time of an instruction in a loop of four warps, in which it is repeated."""

    def seconds(repeats: int) -> float:
        out = aligned(128)
        text = module(f"{SETUP} L: {body * repeats} {LOOP}", 1, ".shared .align 128 .b8 buf[512];")
        best = math.inf
        for _ in range(rounds + 1):
            machine = Machine("sm_100a", **checks)
            machine.memory.register(out.ctypes.data, out.nbytes)
            machine.submit(launch(text, [out], block=(128, 1, 1)))
            begin = time.process_time()
            machine.run()
            best = min(best, time.process_time() - begin)
        return best

    return round((seconds(count) - seconds(0)) / (4 * TURNS * count) * 1e9)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for kernel in sorted(KERNELS.glob("*.ptx")):
        name, text = kernel.stem.rpartition("-")[0], kernel.read_text()
        small = json.loads((KERNELS / f"{name}.json").read_text())
        for described in small["args"].values():
            if isinstance(described, dict):
                described.pop("save", None)  # files are no part of the measurement
        row: dict[str, Any] = {"kernel": kernel.stem}
        for size, wanted, count in (("", small, 20), ("_large", larger(name, small), 1)):
            row[f"per_second{size}"] = rate(text, wanted, count, options.rounds)
            row[f"per_second{size}_unchecked"] = rate(text, wanted, count, options.rounds, checks=())
        results.append(row)
        print(
            f"{kernel.stem:24}",
            *[f"{value:>9,}" for value in row.values() if value != kernel.stem],
            flush=True,
        )
    costs = []
    for name, (body, count) in COSTS.items():
        checked, bare = (cost(body, count, options.rounds, **checks) for checks in ({}, {"checks": ()}))
        costs.append({"instruction": name, "ns": checked, "ns_unchecked": bare})
        print(f"{name:24} {checked:>9,} {bare:>9,} ns", flush=True)
    machine = {
        "processor": processor(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "date": date.today().isoformat(),
    }
    print(
        "warp instructions a second of small launches with default checks and none, of larger ones likewise; "
        f"{machine['processor']}, load {machine['load']}, {machine['date']}"
    )
    if options.json is not None:
        options.json.write_text(
            json.dumps({"machine": machine, "kernels": results, "costs": costs}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
