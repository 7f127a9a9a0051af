"""Execution of PTX, as CuTe DSL compiles it for Hopper and Blackwell GPUs, on a CPU, for several ranks.

As a library: `Emulator`, and `run` for any other PTX. As a command: ``python -m cute_emulator script.py``.
The public names are imported at first use (PEP 562): importing the package, for `clients.register`, imports
neither torch nor CuTe DSL.
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
"""Modules that define the public names."""

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

if not TYPE_CHECKING:  # with __getattr__ a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for home in HOMES:
            names = vars(import_module(f".{home}", __name__))
            globals().update({public: names[public] for public in __all__ if public in names})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
