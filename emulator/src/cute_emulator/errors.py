"""Errors of an emulated kernel, as exceptions and as findings of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cute_emulator import source


class EmulatorError(RuntimeError):
    """Error that ends the run; the message contains rank, CTA, warp, PTX line and address.

    Attributes:
        line: PTX line of the instruction, 0 if unknown.
    """

    def __init__(self, message: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.line = line
        self._shown = False

    def show(self, ptx: str) -> None:
        """Adds the instructions around the error's line to the message, once."""
        if self.line and not self._shown:
            self._shown = True
            self.add(source.excerpt(ptx, self.line))

    def add(self, text: str) -> None:
        """Adds lines to the message."""
        self.args = (f"{self}\n{text}",)


class CooperativeLaunchTooLargeError(ValueError):
    """Error for a cooperative launch of more CTAs than can be resident at once: CUDA's error 720."""

    code, name = 720, "cudaErrorCooperativeLaunchTooLarge"


class MemoryFault(EmulatorError):
    """Error for an access that is out of bounds, misaligned, or to memory that is not allocated."""


class Deadlock(EmulatorError):
    """Error for a state in which no warp can continue; the message lists each warp's position and wait."""


class UnsupportedInstruction(EmulatorError):
    """Error for an executed instruction (or a form of one) that the emulator does not model."""


class KernelTrap(EmulatorError):
    """Error for a kernel that executed `trap`."""


@dataclass(frozen=True)
class Finding:
    """Violation of a rule that a check reports without ending the run.

    Attributes:
        kind: Short name of the check, the name of a rule.
        message: Description with both parties and the location.
        line: PTX line, 0 if none applies.
        excerpt: Instruction at the line and three on either side, as far as known. The line of the Python
            source is above them, the other party's instruction below.
        places: Path and line of the source of the instruction and of the other party's, if known.
    """

    kind: str
    message: str
    line: int = 0
    excerpt: str = ""
    places: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        below = f"\n{self.excerpt}" if self.excerpt else ""
        return f"[{self.kind}] {self.message}{below}"


@dataclass(frozen=True)
class Usage:
    """Resources of the device that a launch uses.

    Attributes:
        entry: Name of the kernel.
        grid: CTAs along x, y, z.
        block: Threads of a CTA along x, y, z.
        cluster: CTAs of a cluster along x, y, z.
        smem: Bytes of shared memory of a CTA, static and dynamic.
        registers: Registers of a thread; 0 if the PTX does not define them (`.maxnreg`, `setmaxnreg`): the
            assembler chooses them.
        per_sm: CTAs that fit on one SM, as far as known.
        bound: Resource that limits the number of CTAs.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    registers: int
    per_sm: int
    bound: str

    def __str__(self) -> str:
        registers = self.registers or "unknown"
        return (
            f"{self.entry[:60]}: grid {self.grid}, block {self.block}, cluster {self.cluster}; "
            f"{self.smem} bytes of shared memory, registers {registers}; "
            f"{self.per_sm} CTAs on an SM, bound by {self.bound}"
        )


@dataclass(frozen=True)
class Coverage:
    """Coverage of a kernel over all its launches.

    Attributes:
        entry: Name of the kernel.
        ran: Instructions of the PTX that some warp executed.
        instructions: Instructions of the kernel and the functions that it called.
        missed: Lines of the Python source of which no instruction ran: file and number.
        judged: Number of executed instructions that a rule judges, by kind of finding.
    """

    entry: str
    ran: int
    instructions: int
    missed: tuple[tuple[str, int], ...]
    judged: Counter[str]

    def __str__(self) -> str:
        lines = ", ".join(f"{name}:{line}" for name, line in self.missed[:20])
        more = f" and {len(self.missed) - 20} more" if len(self.missed) > 20 else ""
        missed = f"; Python lines that did not run: {lines}{more}" if lines else ""
        judged = ", ".join(f"{kind} {self.judged[kind]}" for kind in sorted(self.judged))
        return (
            f"{self.entry[:60]}: {self.ran} of {self.instructions} instructions ran{missed}; "
            f"instructions judged by rules: {judged or 'none'}"
        )


@dataclass
class Report:
    """Observations of a machine.

    Attributes:
        findings: Distinct findings in the order of their detection.
        instructions: Warp instructions executed.
        seconds: Wall-clock time spent in `run`.
        output: Lines that the kernels printed.
        sent: (rank, other rank) -> bytes that kernels of the first stored into memory of the second. A store
            through a multicast address counts for each rank.
        usage: Resources of launches, with the number of launches that used the same.
        measure: Function that computes `coverage`.
        ignore: Kinds of findings that are discarded.
        ignored_in: Kinds of findings that are discarded for a kernel, by the PTX text of its module.
        ptx: PTX text of the running kernel.
        launched: Line of the script that launched the running kernel, if the host is recorded.
    """

    findings: list[Finding] = field(default_factory=list)
    instructions: int = 0
    seconds: float = 0.0
    output: list[str] = field(default_factory=list)
    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    usage: Counter[Usage] = field(default_factory=Counter)
    measure: Callable[[], list[Coverage]] = field(default=list, repr=False)
    ignore: frozenset[str] = frozenset()
    ignored_in: dict[str, frozenset[str]] = field(default_factory=dict, repr=False)
    ptx: str = field(default="", repr=False)
    launched: str = field(default="", repr=False)
    _seen: dict[tuple[str, str, object], int] = field(default_factory=dict, repr=False)

    @property
    def coverage(self) -> list[Coverage]:
        """Returns, for each kernel, what ran and how many instructions the rules judged."""
        return self.measure()

    def stored(self, rank: int, owner: int, nbytes: int) -> None:
        """Counts a store of a rank if it is into another rank's memory."""
        if owner != rank:
            self.sent[rank, owner] += nbytes

    def place(self, line: int) -> str:
        """Returns a line of the running kernel, with its position in the source if known."""
        return source.place(self.ptx, line)

    def add(
        self,
        kind: str,
        message: str,
        line: int = 0,
        key: object = None,
        other: int = 0,
        other_ptx: str | None = None,
        places: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Adds a finding once per kind, key and PTX text of the running kernel, for all runs together.

        Args:
            kind: Name of the check.
            message: Description with both parties and the location.
            line: PTX line of the instruction, 0 if none applies.
            key: Identity of the finding among those of its kind; the line by default.
            other: PTX line of the other party's instruction, 0 for none.
            other_ptx: PTX text of the other party's kernel, if it may differ from the running one.
            places: Lines of the source, if no instruction determines them.
        """
        if kind in self.ignore or kind in self.ignored_in.get(self.ptx, ()):
            return
        ident = (kind, self.ptx, line if key is None else key)
        self._seen[ident] = self._seen.get(ident, 0) + 1
        if self._seen[ident] == 1:
            shown = [source.excerpt(self.ptx, line)] if line else []
            if other:
                shown.append(source.other(self.ptx if other_ptx is None else other_ptx, other))
            if self.launched and line:
                shown.append(f"      launched by {self.launched}")
            ends = ((self.ptx, line), (self.ptx if other_ptx is None else other_ptx, other))
            known = [source.origin(text, number) for text, number in ends if number]
            excerpt = "\n".join(filter(None, shown))
            where = (*filter(None, known), *places)
            self.findings.append(Finding(kind, message, line, excerpt, where))

    @property
    def ok(self) -> bool:
        """Returns whether there are no findings."""
        return not self.findings
