"""Errors the emulator raises to its user."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A kernel could not be run, or ran and broke a rule.

    Attributes:
        report: What the run recorded, where there was a run (`Emulator.report`); None otherwise.
    """

    def __init__(self, message: str, report: object | None = None) -> None:
        super().__init__(message)
        self.report = report
