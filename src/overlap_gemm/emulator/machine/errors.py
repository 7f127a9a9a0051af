"""What can go wrong in an emulated kernel, as exceptions and as findings of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


class EmulatorError(RuntimeError):
    """The kernel did something that ends the run: the message names rank, CTA, warp, PTX line and address."""


class MemoryFault(EmulatorError):
    """An access that is out of bounds, misaligned, or to memory that is not (or no longer) allocated."""


class Deadlock(EmulatorError):
    """No warp can go on; the message lists every warp's position and what it waits for."""


class UnsupportedInstruction(EmulatorError):
    """An instruction (or a form of one) that the emulator does not model was executed."""


class KernelTrap(EmulatorError):
    """The kernel executed `trap`.

    Attributes:
        line: in its PTX.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Finding:
    """Something that a check found without ending the run.

    Attributes:
        kind: Short name of the check, such as `proxy-fence` or `exit-pending`.
        message: Who, where and what, both parties named.
        line: PTX line, 0 where none applies.
    """

    kind: str
    message: str
    line: int = 0

    def __str__(self) -> str:
        return f"[{self.kind}] {self.message}"


@dataclass
class Report:
    """What a machine observed.

    Attributes:
        findings: Distinct findings in the order they were made.
        instructions: Warp instructions executed.
        seconds: Wall-clock time spent in `run`.
        output: Lines the kernels printed.
        place: Names a PTX line of the kernel that is running now, with its place in the source if known.
    """

    findings: list[Finding] = field(default_factory=list)
    instructions: int = 0
    seconds: float = 0.0
    output: list[str] = field(default_factory=list)
    place: Callable[[int], str] = field(default=str, repr=False)
    _seen: dict[tuple[str, object], int] = field(default_factory=dict, repr=False)

    def add(self, kind: str, message: str, line: int = 0, key: object = None) -> None:
        """Adds a finding once per (kind, key); `key` defaults to the line."""
        ident = (kind, line if key is None else key)
        self._seen[ident] = self._seen.get(ident, 0) + 1
        if self._seen[ident] == 1:
            self.findings.append(Finding(kind, message, line))

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings
