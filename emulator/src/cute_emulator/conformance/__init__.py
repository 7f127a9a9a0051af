"""Pairs of a bug, which a rule of the emulator must report, and its fixed twin, which it must not report.

`CASES` has them all. `python -m cute_emulator.conformance` runs them and prints a table; a tool that judges
PTX by other means can take the kernels from here (`Case.broken`, `Case.fixed`: text and launch).
Pairs of the host are scripts.
"""

from cute_emulator.conformance.cases import CASES
from cute_emulator.conformance.kernel import Case, Kernel, findings

__all__ = ["CASES", "Case", "Kernel", "findings"]
