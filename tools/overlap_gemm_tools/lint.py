"""Checks of a compiled kernel that do not run it: of its PTX, of the report of ptxas, and of its SASS.

Some mistakes have no effect on the result in practice: a release at ``.gpu`` scope, or ``wait_group.read`` on
hardware that waits for both. Others only reduce the speed: spills, serialised wgmma. The SASS is checked by
`sass`.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .sass import disassemble, sass_findings


@dataclass(frozen=True)
class PtxasReport:
    """Report of ``ptxas -v`` about a kernel.

    Attributes:
        registers: Registers per thread.
        barriers: Number of named barriers, including barrier 0.
        stack_bytes: Bytes of the stack frame of a thread.
        spill_bytes: Bytes of spill stores plus bytes of spill loads.
        warnings: Performance warnings (C75xx: wgmma serialised, setmaxnreg ignored, ...).
    """

    registers: int
    barriers: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Inspected:
    """PTX, machine code and ptxas report of a compiled kernel.

    Attributes:
        ptx: PTX of the module.
        cubin: Content of its cubin file.
        report: Report of the ptxas in the installed DSL, which generates the code that runs. It is that of
            CUDA 12, or of CUDA 13 with the DSL's extra ``cu13``.
    """

    ptx: str
    cubin: bytes
    report: PtxasReport

    def findings(self, exchanges: bool) -> list[str]:
        """Returns descriptions of all defects of the kernel; empty if it has none.

        Args:
            exchanges: Whether the kernel exchanges tiles with peers.

        Raises:
            RuntimeError: The kernel has ``setmaxnreg``, and nvdisasm, which reads its SASS, is not installed.
        """
        used = sass_findings(disassemble(self.cubin)) if "setmaxnreg" in self.ptx else []
        return ptx_findings(self.ptx, exchanges) + ptxas_findings(self.report) + used


def inspect(build: Callable[[str], Any], options: str = "") -> Inspected:
    """Compiles a kernel; returns its PTX, machine code and ptxas report.

    Args:
        build: Function that compiles the kernel with options of ``cute.compile``.
        options: Further options.

    Raises:
        RuntimeError: The DSL wrote no report of ptxas.
    """
    # The DSL names its files without the configuration: a folder per compile keeps them apart.
    with tempfile.TemporaryDirectory() as folder:
        remarks = Path(folder) / "remarks.yaml"
        outputs = (
            f"--keep-ptx --keep-cubin --dump-dir={folder} --remark-filter ptxas --remark-output {remarks}"
        )
        built = build(f"{outputs} {options}".strip())
        text = remarks.read_text() if remarks.exists() else ""
    if "registers" not in text:
        raise RuntimeError(f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')} wrote no report of its ptxas")
    return Inspected(built.__ptx__, built.__cubin__, report_of(text))


def report_of(text: str) -> PtxasReport:
    """Parses the output of ``ptxas -v``; returns the largest value of each figure."""

    def largest(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, text)), default=0)

    return PtxasReport(
        registers=largest(r"Used (\d+) registers"),
        barriers=largest(r"used (\d+) barriers"),
        stack_bytes=largest(r"(\d+) bytes stack frame"),
        spill_bytes=largest(r"(\d+) bytes spill stores") + largest(r"(\d+) bytes spill loads"),
        warnings=tuple(re.findall(r"\(C75\d\d\)[^\n]*", text)),
    )


def ptxas_findings(report: PtxasReport) -> list[str]:
    """Returns descriptions of the defects that ptxas reports; empty if there are none."""
    findings = list(report.warnings)
    if report.spill_bytes or report.stack_bytes:
        findings.append(f"{report.spill_bytes} bytes spilled, {report.stack_bytes} bytes of stack")
    return findings


def ptx_findings(ptx: str, exchanges: bool) -> list[str]:
    """Returns descriptions of the defects in a kernel's synchronisation; empty if there are none.

    Args:
        ptx: PTX of the module.
        exchanges: Whether the kernel exchanges tiles with peers: it must release, acquire and bound waits.
    """
    findings: list[str] = []
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    unwaited = False  # whether a bulk group has been committed with no full wait after it
    for number, line in enumerate(lines, 1):
        release = re.search(r"\b(?:(?:st|red)\.release|fence\.acq_rel)\.(\w+)", line)
        if line.startswith("cp.async.bulk.commit_group"):
            unwaited = True
        elif re.match(r"cp\.async\.bulk\.wait_group\s", line):
            unwaited = False
        elif line.startswith("cp.async.bulk.wait_group.read"):
            findings.append(f"line {number}: wait_group.read does not imply that the data is written")
        elif release:
            if release[1] != "sys":
                findings.append(f"line {number}: released at .{release[1]} scope; a peer needs .sys")
            if unwaited:
                findings.append(f"line {number}: released after a bulk store without a full wait_group")
    findings += _shuffles_for_barriers(lines)
    comm = [i for i, line in enumerate(lines) if re.match(r"cp\.async\.bulk\.(commit|wait)_group", line)]
    if comm and any("elect.sync" in line for line in lines[comm[0] : comm[-1]]):
        findings.append("elect.sync inside the comm lane's branch: it would wait for lanes that never come")
    if exchanges:
        words = [line for line in lines if re.search(r"(?<![.\w])(ld|st)\.relaxed\.sys\.global\.v4", line)]
        polls = sum("ld.relaxed.sys" in line for line in lines if line not in words)
        acquires = sum("ld.acquire.sys" in line for line in lines)
        traps = sum(line.startswith("trap") for line in lines)
        registers = sum("atom" in line and ".cas." in line for line in lines) - traps
        # A wait for LL packets has a bound, and no acquire.
        waits = polls - acquires
        bounds = traps > waits + registers if words else traps == waits + registers
        if not acquires or acquires - waits not in (0, 1) or not bounds:
            findings.append(
                f"{polls} polls, {acquires} acquires, {traps} bounds: a wait has 2, 1 and 1 of them; a test "
                f"without a wait, of which a kernel has at most one, has 1, 1 and 0"
            )
        if not any("st.release.sys" in line for line in lines):
            findings.append("nothing is released to a peer")
        if any("ld.global.nc" in line for line in lines):
            findings.append("a non-coherent load: slots change while the kernel runs")
    return findings


def _shuffles_for_barriers(lines: list[str]) -> list[str]:
    """Returns a finding for each shuffle after one lane's acquire that no barrier of the warp follows.

    The shuffle distributes the result of an atomic with acquire. It orders no memory: a later release by
    another lane would not be ordered after the acquire.
    """
    findings: list[str] = []
    acquired, shuffled = False, 0
    for number, line in enumerate(lines, 1):
        if line.startswith("bar.warp.sync"):
            acquired, shuffled = False, 0
        elif line.startswith("shfl.sync") and acquired:
            acquired, shuffled = False, number
        elif line.startswith("bra"):  # the next line is reached by jumps only
            acquired = False
        elif line.startswith(("atom.", "ret")) or ".release" in line:
            if shuffled:
                findings.append(
                    f"line {shuffled}: a shuffle tells of an acquire, and no bar.warp.sync follows it"
                )
            acquired, shuffled = line.startswith("atom.global.acq_rel"), 0
    return findings


def count_instructions(ptx: str) -> int:
    """Returns the number of instructions of the module."""
    return sum(bool(re.match(r"\t(@\S+ +\t?)?[a-z][\w.]*[\s;]", line)) for line in ptx.splitlines())


def inner_loop_instructions(ptx: str) -> int:
    """Returns the number of instructions of the mainloop's inner loop: the shortest loop with an MMA.

    Raises:
        ValueError: The module has no loop with an MMA.
    """
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"[\w$]+:", line)}
    lengths = []
    for end, line in enumerate(lines):
        branch = re.search(r"\bbra(?:\.uni)?\s+([\w$]+);", line)
        if branch and labels.get(branch[1], end) < end:
            body = [
                x for x in lines[labels[branch[1]] : end + 1] if x.endswith(";") and not x.startswith(".")
            ]
            if any("tcgen05.mma" in x or "wgmma.mma_async" in x for x in body):
                lengths.append(len(body))
    if not lengths:
        raise ValueError("no loop of this module holds an MMA")
    return min(lengths)
