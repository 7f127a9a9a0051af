"""Runs the PTX that CuTe DSL compiles for Hopper and Blackwell GPUs on a CPU, several ranks at once.

As a library: `Emulator`. As a command: ``python -m overlap_gemm.emulator script.py``.
"""

from overlap_gemm.emulator.errors import EmulatorError, Finding, Report
from overlap_gemm.emulator.host.emulator import Emulator, FindingsError
from overlap_gemm.emulator.host.memory import Symmetric, poison_
from overlap_gemm.emulator.run.scheduler import Schedule

__all__ = [
    "Emulator",
    "EmulatorError",
    "Finding",
    "FindingsError",
    "Report",
    "Schedule",
    "Symmetric",
    "poison_",
]
