"""What can go wrong in an emulated kernel, as exceptions and as findings of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cute_emulator import source


class EmulatorError(RuntimeError):
    """The kernel did something that ends the run: the message names rank, CTA, warp, PTX line and address.

    Attributes:
        line: of the instruction in its PTX, 0 where none is known.
    """

    def __init__(self, message: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.line = line
        self._shown = False

    def show(self, ptx: str) -> None:
        """Adds the instructions around its line to the message, once."""
        if self.line and not self._shown:
            self._shown = True
            self.add(source.excerpt(ptx, self.line))

    def add(self, text: str) -> None:
        """Adds lines to the message."""
        self.args = (f"{self}\n{text}",)


class CooperativeLaunchTooLargeError(ValueError):
    """A cooperative launch of more CTAs than can be resident at once: CUDA's error 720."""

    code, name = 720, "cudaErrorCooperativeLaunchTooLarge"


class MemoryFault(EmulatorError):
    """An access that is out of bounds, misaligned, or to memory that is not (or no longer) allocated."""


class Deadlock(EmulatorError):
    """No warp can go on; the message lists every warp's position and what it waits for."""


class UnsupportedInstruction(EmulatorError):
    """An instruction (or a form of one) that the emulator does not model was executed."""


class KernelTrap(EmulatorError):
    """The kernel executed `trap`."""


@dataclass(frozen=True)
class Finding:
    """Something that a check found without ending the run.

    Attributes:
        kind: Short name of the check, the name of a rule.
        message: Who, where and what, both parties named.
        line: PTX line, 0 where none applies.
        excerpt: The instruction there and three on either side, the line of the Python source above them
            and the other party's instruction below, as far as they are known.
        places: Path and line of the source of the instruction and of the other party's, if they are known.
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
    """What a launch took of the device.

    Attributes:
        entry: The kernel's name.
        grid: CTAs along x, y, z.
        block: Threads of a CTA along x, y, z.
        cluster: CTAs of a cluster along x, y, z.
        smem: Bytes of shared memory a CTA asked for, static and dynamic.
        registers: Of a thread; 0 where the PTX does not tell (`.maxnreg`, `setmaxnreg`): they are the
            assembler's choice.
        per_sm: CTAs that fit on one SM, by all that is known.
        bound: What lets no more of them fit.
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
    """What of a kernel ran, in all launches together.

    Attributes:
        entry: The kernel's name.
        ran: Instructions of the PTX that some warp executed.
        instructions: Those that there are, of the kernel and the functions that it called.
        missed: Lines of the Python source of which no instruction ran: file and number.
        judged: Kind of a finding -> instructions that ran and that it judges.
    """

    entry: str
    ran: int
    instructions: int
    missed: tuple[tuple[str, int], ...]
    judged: Counter[str]

    def __str__(self) -> str:
        lines = ", ".join(f"{name}:{line}" for name, line in self.missed[:20])
        more = f" and {len(self.missed) - 20} more" if len(self.missed) > 20 else ""
        said = f"; of these Python lines none did: {lines}{more}" if lines else ""
        judged = ", ".join(f"{kind} {self.judged[kind]}" for kind in sorted(self.judged))
        return (
            f"{self.entry[:60]}: {self.ran} of {self.instructions} instructions ran{said}; "
            f"rules had to judge {judged or 'none'}"
        )


@dataclass
class Report:
    """What a machine observed.

    Attributes:
        findings: Distinct findings in the order they were made.
        instructions: Warp instructions executed.
        seconds: Wall-clock time spent in `run`.
        output: Lines the kernels printed.
        sent: (rank, another rank) -> bytes that the one's kernels stored into the other's memory; what is
            stored through a multicast address counts for each rank.
        usage: What launches took of the device, and how many took the same.
        measure: Gives `coverage`.
        ignore: Kinds of findings that are not kept.
        ignored_in: The same of kernels, by the text of their module.
        ptx: Text of the kernel that is running now.
        launched: The line of the script that launched it, where the host is a party.
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
    _seen: dict[tuple[str, object], int] = field(default_factory=dict, repr=False)

    @property
    def coverage(self) -> list[Coverage]:
        """What of each kernel ran, and what the rules had to judge there."""
        return self.measure()

    def stored(self, rank: int, owner: int, nbytes: int) -> None:
        """Counts a store of a rank, if it is into another one's memory."""
        if owner != rank:
            self.sent[rank, owner] += nbytes

    def place(self, line: int) -> str:
        """Names a line of the kernel that is running now, with its place in the source if known."""
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
        """Adds a finding once per (kind, key).

        Args:
            kind: Name of the check.
            message: Who, where and what.
            line: PTX line of the instruction, 0 where none applies.
            key: What makes it different from another of its kind; the line by default.
            other: PTX line of the other party's instruction, 0 for none.
            other_ptx: The other party's kernel, where that may not be the one that is running.
            places: Lines of the source, where no instructions tell them.
        """
        if kind in self.ignore or kind in self.ignored_in.get(self.ptx, ()):
            return
        ident = (kind, line if key is None else key)
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
        """Whether nothing was found."""
        return not self.findings
