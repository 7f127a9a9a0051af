"""How many warp instructions a second the emulator executes here, by kernels whose PTX is in the repository.

::

    OPENBLAS_NUM_THREADS=1 python emulator/public/speed.py [--rounds 5] [--json FILE]

Prints, of each kernel, warp instructions per second of CPU time with the default checks and with none: the
best of so many rounds, which other jobs on the machine disturb least. It needs this distribution alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy

from cute_emulator import Emulator
from cute_emulator.host.kernels import device_of
from cute_emulator.host.launch_files import run_file

KERNELS = Path(__file__).parents[1] / "tests" / "data" / "ptx"
LAUNCHES = 20
"""Of a kernel in a round, in one emulator."""


def processor() -> str:
    """The CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def rate(kernel: Path, folder: Path, rounds: int, **checks: tuple[str, ...]) -> int:
    """Warp instructions per second of CPU time."""
    text = kernel.read_text()
    (folder / "k.ptx").write_text(text)
    launch = KERNELS / f"{kernel.stem.rpartition('-')[0]}.json"
    (folder / "launch.json").write_text(launch.read_text())
    best = 0.0
    for _ in range(rounds + 1):  # the first translates the kernel
        emulator = Emulator(device_of(text), collect=True, **checks)
        begin = time.process_time()
        for _ in range(LAUNCHES):
            run_file(emulator, str(folder / "k.ptx"), str(folder / "launch.json"))
        best = max(best, emulator.report.instructions / (time.process_time() - begin))
    return round(best)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        for kernel in sorted(KERNELS.glob("*.ptx")):
            checked, bare = (
                rate(kernel, Path(name), options.rounds, **checks) for checks in ({}, {"checks": ()})
            )
            results.append({"kernel": kernel.stem, "per_second": checked, "per_second_unchecked": bare})
            print(f"{kernel.stem:28} {checked:>9,} {bare:>9,} warp instructions a second", flush=True)
    machine = {
        "processor": processor(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "date": date.today().isoformat(),
    }
    print(f"{machine['processor']}, load {machine['load']}, {machine['date']}: with default checks, and none")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "kernels": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
