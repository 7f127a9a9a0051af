"""Runs the PTX that CuTe DSL compiles for Hopper and Blackwell GPUs on a CPU, several ranks at once.

As a library: `Emulator`, and `run` for any other PTX. As a command: ``python -m cute_emulator script.py``.
The public names load on first use (PEP 562): a library can `clients.register` without paying for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cute_emulator.causes import FindingsError
    from cute_emulator.errors import EmulatorError, Finding, Report
    from cute_emulator.execution.scheduler import Schedule
    from cute_emulator.host.emulator import Emulator
    from cute_emulator.host.kernels import run
    from cute_emulator.host.memory import Symmetric, poison_
    from cute_emulator.host.nvrtc import compile_cuda

__version__ = "0.1.0"

HOMES = (
    "errors",
    "causes",
    "host.emulator",
    "host.kernels",
    "host.memory",
    "host.nvrtc",
    "execution.scheduler",
)
"""The modules that the public names come from."""

__all__ = [
    "Emulator",
    "EmulatorError",
    "Finding",
    "FindingsError",
    "Report",
    "Schedule",
    "Symmetric",
    "compile_cuda",
    "poison_",
    "run",
]

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for home in HOMES:
            found = vars(import_module(f".{home}", __name__))
            globals().update({public: found[public] for public in __all__ if public in found})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
