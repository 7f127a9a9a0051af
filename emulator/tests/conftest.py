"""Fixtures and settings of the emulator's tests."""

import hypothesis
import pytest

from cute_emulator import Emulator

hypothesis.settings.register_profile("emulator", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("emulator")


@pytest.fixture
def emulate():
    """Opens emulators that close when the test ends: ``emu = emulate(ranks=2, mode="lazy")``."""
    opened = []

    def open_emulator(*args, **kwargs):
        opened.append(Emulator(*args, **kwargs))
        return opened[-1].__enter__()

    yield open_emulator
    for emulator in reversed(opened):
        emulator.__exit__(RuntimeError, None, None)  # a failed test may have left launches queued
