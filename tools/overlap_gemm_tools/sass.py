"""What can be checked of a kernel's machine code: that warps which gave registers away use none of them.

Where `setmaxnreg` moves registers from producers to consumers (sm_90a), a producer may use those below its
new count alone; what it reads or writes above is undefined. No rule of PTX says that ptxas heeds this in
code that both kinds of warps run, as the receive role is: one copy after both branches, which has to get
along with the fewer registers of the two. ptxas does so in every kernel that we have read, and every kernel
that moves registers is read: what else producers run is held to the same.

Instructions come from NVIDIA's ``nvdisasm`` (wheel ``nvidia-cuda-nvdisasm``, or a CUDA toolkit's).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda.pathfinder import find_nvidia_binary_utility

JUMPS = ("BRA", "BRX", "BRXU", "CALL", "JMP", "JMX", "JMXU")
"""Must name where they lead: what a register says is not known here."""
ENDS = ("BPT.TRAP", "EXIT", "RET")
"""Never go on to the next one; of a call it is the caller that goes on."""

LABEL = re.compile(r"([.$\w]+):")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@(\S+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;.*")
INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with its modifiers.
        operands: as text.
        predicate: under which it is executed; empty: always.
        targets: which instructions its operands name: it goes there, or (BSSY) has a later one go there.
    """

    opcode: str
    operands: str
    predicate: str = ""
    targets: tuple[int, ...] = ()

    @property
    def root(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def registers(self) -> list[int]:
        """Numbers of the registers that it names: of several in a row, the first."""
        return [int(number) for number in re.findall(r"(?<!\w)R(\d+)", self.operands)]


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of a module of one kernel.

    Raises:
        RuntimeError: there is no nvdisasm, or it cannot read the module.
    """
    tool = find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        raise RuntimeError("no nvdisasm found: install nvidia-cuda-nvdisasm, or set CUDA_HOME to a toolkit")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        run = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"nvdisasm failed: {run.stderr.strip()}")
    return instructions(run.stdout)


def instructions(text: str) -> list[Instruction]:
    """Those of a disassembled section.

    Raises:
        RuntimeError: an instruction does not follow the one before: a line of the text was not understood.
    """
    labels: dict[str, int] = {}
    found: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if label := LABEL.fullmatch(line):
            labels[label[1]] = len(found)
        elif one := INSTRUCTION.fullmatch(line):
            if int(one[1], 16) != len(found) * INSTRUCTION_BYTES:
                raise RuntimeError(f"{len(found)} instructions are read before {line.strip()}")
            found.append((one[3], one[4], one[2] or ""))
    return [
        Instruction(*one, tuple(labels[name] for name in re.findall(r"`\(([.$\w]+)\)", one[1])))
        for one in found
    ]


def sass_findings(code: Sequence[Instruction]) -> list[str]:
    """What is wrong with a kernel whose producers give registers away; empty if nothing is.

    A group of up to 8 registers begins at a multiple of its length, and counts are multiples of 8: so the
    group's first one tells. Larger groups are the MMA's, which must not be there.

    Raises:
        ValueError: an instruction leads elsewhere in a way that is not known here.
    """
    given = [index for index, one in enumerate(code) if one.opcode.startswith("USETMAXREG.DEALLOC")]
    findings = [] if given else ["no registers are given away"]
    for index in given:
        count = int(code[index].operands, 16)
        ran = [code[i] for i in reached(code, index)]
        highest = max((number for one in ran for number in one.registers), default=0)
        if highest >= count:
            findings.append(f"producers keep {count} registers; what they run uses R{highest}")
        if any(one.root.endswith("GMMA") for one in ran):
            findings.append("producers run into an MMA")
    return findings


def reached(code: Sequence[Instruction], index: int) -> list[int]:
    """Which instructions may follow the one at ``index``, without passing one that takes registers back."""
    found, ahead = set(), [index + 1]
    while ahead:
        at = ahead.pop()
        if at not in found and not code[at].opcode.startswith("USETMAXREG"):
            found.add(at)
            ahead += _next(code, at)
    return sorted(found)


def _next(code: Sequence[Instruction], index: int) -> list[int]:
    """Which instructions may follow one at once; rather too many than too few."""
    one = code[index]
    if one.root in JUMPS and not one.targets:
        raise ValueError(f"no rule where {one.opcode} {one.operands} leads")
    if one.opcode.startswith(ENDS):
        return [index + 1] if one.predicate else []
    always = one.root in ("BRA", "JMP") and not one.predicate and "," not in one.operands
    return [*one.targets] if always else [*one.targets, index + 1]
