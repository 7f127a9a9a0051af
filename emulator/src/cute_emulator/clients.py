"""What a library says to an emulator that may open in its process; imports nothing, so it costs nothing.

A library that has something to do where its kernels are emulated names a module for it, when it is imported:

    cute_emulator.clients.register("library.emulated")

and that module is imported when an emulator opens, not before. It has `opened(emulator)` and `closed()`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_emulator.host.emulator import Emulator

owned: dict[tuple[str, str], Callable[[], Any]] = {}
"""Globals that each rank has for itself, by module and name: how they begin."""

_modules: dict[str, None] = {}
_open: Emulator | None = None


def register(module: str) -> None:
    """Lets a module's `opened(emulator)` be called when an emulator opens, and `closed()` when it ends.

    Where one is open already, `opened` is called at once. A second time changes nothing.
    """
    if module not in _modules:
        _modules[module] = None
        if _open is not None:
            import_module(module).opened(_open)


def per_process(module: str, **begins: Callable[[], Any]) -> None:
    """Says which globals of a module are a process's own: ranks that are threads of one have one each.

    Args:
        module: Its full name; it need not be imported yet.
        **begins: By the global's name, what makes its first value: ``known=dict, is_open=bool``.
    """
    owned.update({(module, name): begin for name, begin in begins.items()})


def tell_opened(emulator: Emulator) -> None:
    """The emulator's own call, when it opens."""
    global _open
    _open = emulator
    for module in list(_modules):
        import_module(module).opened(emulator)


def tell_closed() -> None:
    """The emulator's own call, when it ends."""
    global _open
    _open = None
    for module in _modules:
        import_module(module).closed()
