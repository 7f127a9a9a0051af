"""Old name of `cute_emulator.pytest_plugin`."""

from cute_emulator.pytest_plugin import *  # noqa: F403
from cute_emulator.pytest_plugin import emulator as emulator
