"""Libraries that have something to do where their kernels are emulated."""

import subprocess
import sys
import types

import pytest

from cute_emulator import Emulator, clients


@pytest.fixture
def library(monkeypatch):
    """A module, not registered yet, that writes down what it is told."""
    module = types.ModuleType("library")
    module.told = []
    module.opened = module.told.append
    module.closed = lambda: module.told.append(None)
    monkeypatch.setitem(sys.modules, "library", module)
    monkeypatch.setattr(clients, "_modules", {})
    return module


def test_a_registered_library_is_told_of_every_emulator(library):
    clients.register("library")
    clients.register("library")
    assert library.told == []
    for _ in range(2):
        with Emulator() as emulator:
            assert library.told.pop() is emulator
        assert library.told.pop() is None
    assert library.told == []


def test_a_library_that_comes_later_is_told_at_once(library):
    with Emulator() as emulator:
        clients.register("library")
        assert library.told == [emulator]
    assert library.told == [emulator, None]


def test_a_library_that_fails_leaves_no_emulator_open(library):
    def broken(emulator):
        raise RuntimeError("not with me")

    told, library.opened = library.opened, broken
    clients.register("library")
    with pytest.raises(RuntimeError, match="not with me"), Emulator():
        pass
    assert Emulator.current() is None
    library.opened = told
    with Emulator() as emulator:
        assert library.told[-1] is emulator


def test_registering_costs_no_import():
    code = (
        "import sys; from cute_emulator.clients import register; register('nowhere'); "
        "print(sorted({'torch', 'numpy', 'cutlass', 'nowhere'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
