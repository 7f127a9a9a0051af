"""Runs the PTX that CuTe DSL compiles for sm_90a and sm_100a on a CPU, several ranks at once.

As a library: `Emulator`. As a command: ``python -m overlap_gemm.emulator script.py``.
"""

from .host.emulator import Emulator, FindingsError
from .host.memory import Symmetric, poison_
from .machine.errors import EmulatorError, Finding, Report
from .machine.sched import Schedule

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
