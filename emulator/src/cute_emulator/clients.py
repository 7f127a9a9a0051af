"""Registration of libraries with an emulator that may open in their process; imports nothing.

A library that has work to do when its kernels are emulated registers a module for it when it is imported:

    cute_emulator.clients.register("library.emulated")

The module is imported when an emulator opens, not before. It defines both `opened(emulator)` and `closed()`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_emulator.host.emulator import Emulator

owned: dict[tuple[str, str], Callable[[], Any]] = {}
"""Initial values of globals that each rank has separately, by module and name."""

_modules: dict[str, None] = {}
_open: Emulator | None = None


def register(module: str) -> None:
    """Registers a module: `opened(emulator)` is called when an emulator opens, and `closed()` when it ends.

    If an emulator is already open, the module is imported and `opened` is called at once. A second
    registration has no effect. `closed` is called also if the emulator's block ends by an exception.
    """
    if module not in _modules:
        _modules[module] = None
        if _open is not None:
            import_module(module).opened(_open)


def per_process(module: str, **begins: Callable[[], Any]) -> None:
    """Declares globals of a module as per process: each rank has one, also if ranks are threads.

    Args:
        module: Full name of the module; it need not be imported yet.
        **begins: Factory of the first value, by the global's name: ``known=dict, is_open=bool``.
    """
    owned.update({(module, name): begin for name, begin in begins.items()})


def call_opened(emulator: Emulator) -> None:
    """Calls `opened` of each registered module; called by the emulator when it opens."""
    global _open
    _open = emulator
    for module in list(_modules):
        import_module(module).opened(emulator)


def call_closed() -> None:
    """Calls `closed` of each registered module; called by the emulator when it ends."""
    global _open
    _open = None
    for module in _modules:
        import_module(module).closed()
