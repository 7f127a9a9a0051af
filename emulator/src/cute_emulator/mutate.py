"""Mutation test of synchronisation: removes or weakens one operation at a time, to see if a test notices.

A passing test shows little about synchronisation unless it fails without it. `enumerate_mutations` lists the
operations of a PTX module and how each can be broken, `apply` breaks one, and `run` breaks each in turn::

    def check(options):
        with Emulator("sm_100a", **options):
            compiled(a, b, c, stream)
        torch.testing.assert_close(c, reference)

    for outcome in mutate.run(check, mutate.settings(warps=6)):
        print(outcome)

A mutation is detected if the check raises under at least one setting: a wrong result, a deadlock, a fault or
a finding of the emulator's checks. An undetected mutation shows a gap in the test, an operation that is not
needed, or one that only documents. `reasons` records which of these applies.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cute_emulator.errors import KernelTrap
from cute_emulator.ptx.parse import parse
from cute_emulator.settings import Setting, settings

__all__ = ["Mutation", "Outcome", "Setting", "apply", "enumerate_mutations", "run", "settings"]

Check = Callable[[dict[str, Any]], object]

# -- mutations -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    """One change that breaks one operation.

    Attributes:
        function: Function that contains the operation.
        opcode: Opcode of the operation.
        ordinal: Number among the operations of the same opcode in the module, from 0.
        change: `remove`, or the weakened property: `wait for one group less`, `.sys -> .gpu`, ...
        line: PTX line of the operation.
        start: Start of the statement in the text.
        end: End of the statement, its semicolon included.
        replacement: Text that replaces the statement.
    """

    function: str
    opcode: str
    ordinal: int
    change: str
    line: int
    start: int = field(repr=False)
    end: int = field(repr=False)
    replacement: str = field(repr=False)

    @property
    def key(self) -> str:
        """Returns a name that is the same when the same kernel is compiled again: opcode, number and change.

        An operation of the same opcode that is added before it in the module changes the number.
        """
        return f"{self.opcode}#{self.ordinal}: {self.change}"


Rewrite = Callable[[str, str, str], str]  # (guard, opcode, operands) -> statement


def _remove(guard: str, opcode: str, operands: str) -> str:
    return ""


def _succeed(guard: str, opcode: str, operands: str) -> str:
    """Returns a wait that completes at once: its predicate is true."""
    return f"{guard}setp.eq.u32 {operands.split(',')[0].split('|')[0]}, 0, 0;"


def _one_group_less(guard: str, opcode: str, operands: str) -> str:
    return f"{guard}{opcode} {int(operands) + 1};"


def _reads_only(guard: str, opcode: str, operands: str) -> str:
    return f"{guard}{opcode}.read {operands};"


def _replace(old: str, new: str) -> Rewrite:
    def rewrite(guard: str, opcode: str, operands: str) -> str:
        return f"{guard}{opcode.replace(old, new)} {operands}".rstrip() + ";"

    return rewrite


_MEMORY = r"(ld|st|atom|red|multimem\.\w+)\b.*"
# (opcode, change, rewrite); every rule that matches an opcode yields a mutation.
_RULES: tuple[tuple[re.Pattern[str], str, Rewrite], ...] = tuple(
    (re.compile(pattern), change, rewrite)
    for pattern, change, rewrite in (
        (r"mbarrier\.(try|test)_wait\b.*", "remove", _succeed),
        (r"mbarrier\.arrive\b.*", "remove", _remove),
        (r"cp\.async\.mbarrier\.arrive\b.*", "remove", _remove),
        (r"tcgen05\.(commit|wait|fence)\b.*", "remove", _remove),
        (r"wgmma\.(fence|commit_group|wait_group)\b.*", "remove", _remove),
        (r"cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all)\b.*", "remove", _remove),
        (r"(cp\.async\.(bulk\.)?|wgmma\.)wait_group\b.*", "wait for one group less", _one_group_less),
        (r"cp\.async\.bulk\.wait_group$", "full -> .read", _reads_only),
        (r"(fence|membar)\b.*", "remove", _remove),
        (r"(bar|barrier)\.(cta\.)?(sync|arrive|warp\.sync|cluster\.(arrive|wait))\b.*", "remove", _remove),
        (r"griddepcontrol\.wait", "remove", _remove),
        (r"(st|red)\..*release.*", "remove", _remove),
        (rf"(fence.*|{_MEMORY})\.sys\b.*", ".sys -> .gpu", _replace(".sys", ".gpu")),
        (rf"{_MEMORY}\.acquire\b.*", ".acquire -> .relaxed", _replace(".acquire", ".relaxed")),
        (rf"{_MEMORY}\.release\b.*", ".release -> .relaxed", _replace(".release", ".relaxed")),
        (rf"{_MEMORY}\.acq_rel\b.*", ".acq_rel -> .relaxed", _replace(".acq_rel", ".relaxed")),
    )
)
_STATEMENT = re.compile(r"(?P<guard>@\s*!?\s*[\w$%]+\s+)?(?P<opcode>[A-Za-z_][\w.:]*)\s*(?P<operands>[^;]*);")
_STRONG_LOAD = re.compile(r"ld\.(volatile|relaxed|acquire)\b.*|multimem\.ld_reduce\.(relaxed|acquire)\b.*")
_SPIN_LENGTH = 24  # instructions; a longer loop around a strong load is not only a wait


def enumerate_mutations(ptx: str) -> list[Mutation]:
    """Returns all mutations of a PTX module, in the order of its text.

    - removed: `mbarrier.arrive` (of `cp.async`, too); `tcgen05.commit`, `.wait` and `.fence`; `wgmma.fence`
    - removed, too: commits and waits of groups (`wgmma`, `cp.async`, bulk); fences; barriers of the CTA, the
      warp and the cluster
    - removed, too: `griddepcontrol.wait`, and releasing `st` and `red`
    - `mbarrier.try_wait` and `.test_wait`: replaced by a true predicate, so that they complete at once
    - `wait_group` of one group less; `cp.async.bulk.wait_group` weakened to `.read`
    - memory operations: `.sys` (also of fences) to `.gpu`; acquire, release and acq_rel to relaxed
    - the backward branch of a spin loop: at most `_SPIN_LENGTH` = 24 instructions around a strong load,
      without stores
    """
    mutations: list[Mutation] = []
    counts: Counter[str] = Counter()
    place = _Places(ptx)

    def add(function: str, line: int, opcode: str, change: str, rewrite: Rewrite, ordinal: int) -> None:
        match = place.of(line, opcode, ordinal)
        text = rewrite(match["guard"] or "", opcode, match["operands"].strip())
        mutations.append(Mutation(function, opcode, ordinal, change, line, match.start(), match.end(), text))

    for function in parse(ptx).functions.values():
        for index, instruction in enumerate(function.instructions):
            opcode = instruction.opcode
            ordinal = counts[opcode]
            counts[opcode] += 1
            place.note(opcode, instruction.line)
            for pattern, change, rewrite in _RULES:
                if pattern.fullmatch(opcode):
                    add(function.name, instruction.line, opcode, change, rewrite, ordinal)
            if _ends_spin(function, index):
                add(function.name, instruction.line, opcode, "leave the spin loop at once", _remove, ordinal)
    return mutations


def apply(ptx: str, mutation: Mutation) -> str:
    """Returns the module with one operation broken; line numbers do not change."""
    removed = ptx[mutation.start : mutation.end]
    return ptx[: mutation.start] + mutation.replacement + "\n" * removed.count("\n") + ptx[mutation.end :]


def _ends_spin(function: Any, index: int) -> bool:
    """Returns whether an instruction is the backward branch of a loop that waits for memory to change."""
    branch = function.instructions[index]
    if branch.guard is None or not branch.opcode.startswith("bra"):
        return False
    target = function.labels.get(getattr(branch.operands[0], "name", ""))
    if target is None or not index - _SPIN_LENGTH <= target <= index:
        return False
    body = [i.opcode for i in function.instructions[target : index + 1]]
    return any(_STRONG_LOAD.fullmatch(o) for o in body) and not any(
        o.startswith(("st.", "red.")) for o in body
    )


class _Places:
    """Search for an instruction's statement in the text, where a line may contain several of one opcode."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.starts = [0, *(m.end() for m in re.finditer("\n", ptx))]
        self.first: dict[tuple[str, int], int] = {}
        self.count: Counter[str] = Counter()

    def note(self, opcode: str, line: int) -> None:
        self.first.setdefault((opcode, line), self.count[opcode])
        self.count[opcode] += 1

    def of(self, line: int, opcode: str, ordinal: int) -> re.Match[str]:
        number = ordinal - self.first[opcode, line]
        for match in _STATEMENT.finditer(self.ptx, self.starts[line - 1]):
            if match["opcode"] == opcode:
                if number == 0:
                    return match
                number -= 1
        raise AssertionError(f"no {opcode} on PTX line {line}")


# -- outcomes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Outcome of one mutation.

    Attributes:
        mutation: Mutation that was tried.
        detections: Settings that detected it, each with the exception's kind and first line.
        tried: Number of settings that were run.
        reached: Whether the operation was executed.
        reason: Reason why the mutation may remain undetected, from `reasons`.
    """

    mutation: Mutation
    detections: tuple[tuple[Setting, str], ...]
    tried: int
    reached: bool
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Returns `detected`, `not reached`, `explained` or `NOT DETECTED`."""
        if self.detections:
            return "detected"
        if self.reason:
            return "explained"
        return "NOT DETECTED" if self.reached else "not reached"

    def __str__(self) -> str:
        how = "; ".join(f"{setting}: {what}" for setting, what in self.detections[:1]) or self.reason
        return f"line {self.mutation.line}: {self.mutation.key}: {self.verdict}" + (
            f" ({how})" if how else ""
        )


def run(
    check: Check,
    tried: Sequence[Setting],
    *,
    select: str | Sequence[str] = "*",
    reasons: Mapping[str, str] | None = None,
    exhaustive: bool = False,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int, int, Mutation], None] | None = None,
) -> list[Outcome]:
    """Tries every mutation of every kernel that a check launches.

    Strict checks are enabled. Every mutation is tried under `tried[0]`. Then the undetected mutations that
    are executed under some setting are tried under the others, until one detects them. A mutated run
    ends by a `TimeoutError`, a detection, after 20 times the warp instructions of the longest unmodified run,
    and 20 million at least.

    Args:
        check: Function that runs the kernels in emulators opened as `Emulator(arch, ranks, **options)` and
            raises if a result is wrong. It must depend on its options alone.
        tried: Settings of the runs, usually `settings(...)`; put those that detect most first.
        select: Pattern (`fnmatch`) or list of patterns of the keys of mutations to try.
        reasons: Reasons why mutations may remain undetected: pattern of keys -> reason.
        exhaustive: Whether to try all settings, also after a detection.
        part: (i, n): the i-th of n parts that together are the complete run, for concurrent processes. A part
            tries the unmodified check under every n-th setting, and every n-th mutation under all settings.
        progress: Callback before each mutation, once for the first setting and once for the others. Its
            arguments are a running number, the total and the mutation.

    Returns:
        One outcome per mutation.

    Raises:
        Exception: The unmodified check raised it.
        ValueError: The check launched no kernel.
    """
    modules, longest = _launched(check, tried[part[0] :: part[1]] or tried[:1])
    trials = _Trials(check, _Watchdog(20 * max(longest, 1_000_000)), exhaustive)
    work = _chosen(modules, select)[part[0] :: part[1]]
    report = progress if progress is not None else lambda number, total, mutation: None
    detections: dict[tuple[str, Mutation], list[tuple[Setting, str]]] = {}
    for number, (ptx, mutation) in enumerate(work):
        report(number, 2 * len(work), mutation)
        detections[ptx, mutation] = trials.detect(ptx, mutation, tried[:1])
    # A mutation that is not executed cannot be detected: only the others are tried under more settings.
    reached = {
        ptx: trials.reached(ptx, [m for p, m in work if p == ptx and not detections[p, m]], tried)
        for ptx in modules
    }
    outcomes = []
    for number, (ptx, mutation) in enumerate(work, len(work)):
        report(number, 2 * len(work), mutation)
        detected = detections[ptx, mutation]
        is_reached = bool(detected) or mutation.start in reached[ptx]
        if is_reached and (exhaustive or not detected):
            detected += trials.detect(ptx, mutation, tried[1:])
        reason = "" if detected else _reason(mutation, reasons or {})
        outcomes.append(Outcome(mutation, tuple(detected), trials.runs[mutation], is_reached, reason))
    return outcomes


def _launched(check: Check, tried: Sequence[Setting]) -> tuple[list[str], int]:
    """Returns the modules that a check launches, and the largest number of warp instructions of a run."""
    modules: dict[str, None] = {}
    watchdog = _Watchdog(None)

    def keep(ptx: str) -> str:
        modules.setdefault(ptx)
        return ptx

    for setting in tried:
        check({**setting.options(), "rewrite": keep, "progress": watchdog})
    if not modules:
        raise ValueError("the check launched no kernel in the emulator")
    return list(modules), watchdog.most


def _chosen(modules: Iterable[str], select: str | Sequence[str]) -> list[tuple[str, Mutation]]:
    """Returns the mutations of modules whose key matches one of some patterns."""
    patterns = [select] if isinstance(select, str) else select
    return [
        (ptx, mutation)
        for ptx in modules
        for mutation in enumerate_mutations(ptx)
        if any(fnmatch.fnmatchcase(mutation.key, pattern) for pattern in patterns)
    ]


@dataclass
class _Trials:
    """Runs of a check with one module changed.

    Attributes:
        check: Check to run.
        watchdog: Limit that ends runs which a mutation made endless.
        exhaustive: Whether to continue after the first setting that detects the mutation.
        runs: Number of settings tried, by mutation.
    """

    check: Check
    watchdog: _Watchdog
    exhaustive: bool
    runs: Counter[Mutation] = field(default_factory=Counter)

    def attempt(self, setting: Setting, ptx: str, changed: str) -> Exception | None:
        """Returns the exception that the check raises if the module `ptx` is replaced by `changed`."""

        def rewrite(text: str) -> str:
            return changed if text == ptx else text

        try:
            self.check({**setting.options(), "rewrite": rewrite, "progress": self.watchdog})
        except Exception as error:  # every exception of the check is a detection
            return error
        return None

    def detect(self, ptx: str, mutation: Mutation, under: Iterable[Setting]) -> list[tuple[Setting, str]]:
        """Returns the settings that detect a mutation, each with its description."""
        changed, detections = apply(ptx, mutation), []
        for setting in under:
            self.runs[mutation] += 1
            if (error := self.attempt(setting, ptx, changed)) is not None:
                detections.append((setting, describe(error)))
                if not self.exhaustive:
                    break
        return detections

    def reached(self, ptx: str, mutations: Iterable[Mutation], tried: Iterable[Setting]) -> set[int]:
        """Returns the start of each statement that is executed under some setting.

        All statements are replaced by traps. The trap that ends a run is removed, until a run ends without a
        trap.
        """
        traps = {}
        for mutation in mutations:
            statement = _STATEMENT.match(ptx, mutation.start)
            assert statement is not None
            traps[mutation.start] = replace(mutation, replacement=f"{statement['guard'] or ''}trap;")
        every = set(traps)
        for setting in tried:
            while traps:
                changed = ptx
                for start in sorted(traps, reverse=True):
                    changed = apply(changed, traps[start])
                error = self.attempt(setting, ptx, changed)
                line = error.line if isinstance(error, KernelTrap) else None
                ends = [start for start in sorted(traps) if traps[start].line == line]
                if not ends:
                    break
                del traps[ends[0]]
        return every - set(traps)


def describe(error: Exception) -> str:
    """Returns an exception as one line: a finding's kind, or the class and the first line of its message."""
    findings = getattr(getattr(error, "report", None), "findings", None)
    if findings:
        return "finding: " + ", ".join(dict.fromkeys(f.kind for f in findings))
    if isinstance(error, AssertionError):
        return "wrong result"
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {first[:100]}"


def _reason(mutation: Mutation, reasons: Mapping[str, str]) -> str:
    return next((r for pattern, r in reasons.items() if fnmatch.fnmatchcase(mutation.key, pattern)), "")


class _Watchdog:
    """Limit on the number of warp instructions: ends runs that a mutation made endless."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.most = limit, 0

    def __call__(self, instructions: int) -> None:
        self.most = max(self.most, instructions)
        if self.limit is not None and instructions > self.limit:
            raise TimeoutError(f"the kernel does not end within {self.limit} warp instructions")
