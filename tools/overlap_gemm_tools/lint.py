"""What can be checked of a compiled kernel without running it.

Some mistakes never show in a run (a release at ``.gpu`` scope, ``wait_group.read`` where the hardware
happens to wait for both), some only in speed (spills, serialised wgmma). Both are visible in its PTX and in
what ptxas says about it; its machine code is read by `sass`.
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
    """What ``ptxas -v`` reports for a kernel.

    Attributes:
        registers: registers per thread.
        barriers: named barriers, barrier 0 included.
        stack_bytes: stack frame per thread.
        spill_bytes: spill stores plus spill loads.
        warnings: performance warnings (C75xx: wgmma serialised, setmaxnreg ignored, ...).
    """

    registers: int
    barriers: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Inspected:
    """A compiled kernel's text, and what its assembler said.

    Attributes:
        ptx: the module.
        cubin: its machine code, as a file.
        report: of the assembler in the installed DSL, which makes the code that runs: CUDA 12's in its
            default flavour, CUDA 13's with its extra ``cu13``. No other ptxas is asked.
    """

    ptx: str
    cubin: bytes
    report: PtxasReport

    def findings(self, exchanges: bool) -> list[str]:
        """All that is wrong with the kernel; empty if nothing is.

        Args:
            exchanges: see `ptx_findings`.

        Raises:
            RuntimeError: warps move registers, and there is no nvdisasm to read what they do then.
        """
        used = sass_findings(disassemble(self.cubin)) if "setmaxnreg" in self.ptx else []
        return ptx_findings(self.ptx, exchanges) + ptxas_findings(self.report) + used


def inspect(build: Callable[[str], Any], options: str = "") -> Inspected:
    """Compiles a kernel and keeps what is to be looked at.

    Args:
        build: compiles it, given options of ``cute.compile``.
        options: further ones.

    Raises:
        RuntimeError: the DSL gave no report of its assembler.
    """
    # The DSL names its files without the configuration: a folder per compile keeps them apart.
    with tempfile.TemporaryDirectory() as folder:
        remarks = Path(folder) / "remarks.yaml"
        asked = f"--keep-ptx --keep-cubin --dump-dir={folder} --remark-filter ptxas --remark-output {remarks}"
        built = build(f"{asked} {options}".strip())
        text = remarks.read_text() if remarks.exists() else ""
    if "registers" not in text:
        raise RuntimeError(f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')} gave no report of its ptxas")
    return Inspected(built.__ptx__, built.__cubin__, report_of(text))


def report_of(text: str) -> PtxasReport:
    """Reads what ``ptxas -v`` wrote; the largest of each figure."""

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
    """What is wrong with a kernel according to ptxas; empty if nothing is."""
    findings = list(report.warnings)
    if report.spill_bytes or report.stack_bytes:
        findings.append(f"{report.spill_bytes} bytes spilled, {report.stack_bytes} bytes of stack")
    return findings


def ptx_findings(ptx: str, exchanges: bool) -> list[str]:
    """What is wrong with a kernel's synchronisation according to its text; empty if nothing is.

    Args:
        ptx: the module.
        exchanges: whether the kernel exchanges tiles with peers: must release, acquire and bound its waits.
    """
    findings: list[str] = []
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    unwaited = False  # a bulk group committed in the text and no full wait after it
    for number, line in enumerate(lines, 1):
        release = re.search(r"\b(?:(?:st|red)\.release|fence\.acq_rel)\.(\w+)", line)
        if line.startswith("cp.async.bulk.commit_group"):
            unwaited = True
        elif re.match(r"cp\.async\.bulk\.wait_group\s", line):
            unwaited = False
        elif line.startswith("cp.async.bulk.wait_group.read"):
            findings.append(f"line {number}: wait_group.read does not say that the data is written")
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
        # Data that is its own flag has bounds of its own, and no acquire.
        waits = polls - acquires
        bounds = traps > waits + registers if words else traps == waits + registers
        if not acquires or acquires - waits not in (0, 1) or not bounds:
            findings.append(
                f"{polls} polls, {acquires} acquires, {traps} bounds: a wait is 2, 1 and 1 of them, a look "
                f"1, 1 and 0, of which there is one at most"
            )
        if not any("st.release.sys" in line for line in lines):
            findings.append("nothing is released to a peer")
        if any("ld.global.nc" in line for line in lines):
            findings.append("a non-coherent load: slots change while the kernel runs")
    return findings


def _shuffles_for_barriers(lines: list[str]) -> list[str]:
    """Shuffles that tell a warp what one lane's atomic has acquired, with no barrier of the warp after them.

    A shuffle orders no memory: what other lanes release then would come before what that lane has acquired.
    """
    findings: list[str] = []
    acquired, told = False, 0
    for number, line in enumerate(lines, 1):
        if line.startswith("bar.warp.sync"):
            acquired, told = False, 0
        elif line.startswith("shfl.sync") and acquired:
            acquired, told = False, number
        elif line.startswith("bra"):  # whoever comes to the next line jumps there
            acquired = False
        elif line.startswith(("atom.", "ret")) or ".release" in line:
            if told:
                findings.append(
                    f"line {told}: a shuffle tells of an acquire, and no bar.warp.sync follows it"
                )
            acquired, told = line.startswith("atom.global.acq_rel"), 0
    return findings


def count_instructions(ptx: str) -> int:
    """Instructions of the module."""
    return sum(bool(re.match(r"\t(@\S+ +\t?)?[a-z][\w.]*[\s;]", line)) for line in ptx.splitlines())


def inner_loop_instructions(ptx: str) -> int:
    """Instructions of the mainloop's inner loop: the shortest loop that holds an MMA.

    Raises:
        ValueError: no loop of the module holds one.
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
