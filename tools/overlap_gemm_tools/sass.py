"""Check of a kernel's machine code: producers use no register that they have released.

`setmaxnreg` moves registers from producers to consumers (sm_90a). Afterwards a producer may use only
registers below its new count; an access above is undefined. The receive role is code that both kinds of warps
run, after both branches, so it must use the smaller count. PTX does not guarantee that ptxas respects this.
It does in every kernel compiled so far, and every kernel with `setmaxnreg` is checked, with all code that
producers may run.

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
"""Opcodes of jumps. Their operands must name the targets: the content of a register is not known here."""
ENDS = ("BPT.TRAP", "EXIT", "RET")
"""Opcodes after which the next instruction is not executed; after RET the caller continues."""

LABEL = re.compile(r"([.$\w]+):")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@(\S+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;.*")
INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: Opcode with modifiers.
        operands: Operands as text.
        predicate: Predicate of the execution; empty: none.
        targets: Indices of the instructions that its operands name: targets of a jump, or (BSSY) of a later
            instruction.
    """

    opcode: str
    operands: str
    predicate: str = ""
    targets: tuple[int, ...] = ()

    @property
    def root(self) -> str:
        """Returns the opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def registers(self) -> list[int]:
        """Returns the numbers of the registers in the operands; for a group of registers, the first."""
        return [int(number) for number in re.findall(r"(?<!\w)R(\d+)", self.operands)]


def disassemble(cubin: bytes) -> list[Instruction]:
    """Returns the instructions of a module with one kernel.

    Raises:
        RuntimeError: nvdisasm is not installed, or cannot read the module.
    """
    tool = find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        raise RuntimeError("nvdisasm is missing: install nvidia-cuda-nvdisasm, or set CUDA_HOME to a toolkit")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        run = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"nvdisasm failed: {run.stderr.strip()}")
    return instructions(run.stdout)


def instructions(text: str) -> list[Instruction]:
    """Returns the instructions of a disassembled section.

    Raises:
        RuntimeError: The address of an instruction is not the next one: a line before it was not parsed.
    """
    labels: dict[str, int] = {}
    parsed: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if label := LABEL.fullmatch(line):
            labels[label[1]] = len(parsed)
        elif one := INSTRUCTION.fullmatch(line):
            if int(one[1], 16) != len(parsed) * INSTRUCTION_BYTES:
                raise RuntimeError(f"{len(parsed)} instructions are read before {line.strip()}")
            parsed.append((one[3], one[4], one[2] or ""))
    return [
        Instruction(*one, tuple(labels[name] for name in re.findall(r"`\(([.$\w]+)\)", one[1])))
        for one in parsed
    ]


def sass_findings(code: Sequence[Instruction]) -> list[str]:
    """Returns descriptions of the defects of a kernel whose producers release registers; empty if none.

    A group of up to 8 registers begins at a multiple of its length, and counts are multiples of 8. So it is
    enough to compare the first register of a group. Only the MMA, which a producer must not run, has larger
    groups.

    Raises:
        ValueError: The target of a jump is not known.
    """
    releases = [index for index, one in enumerate(code) if one.opcode.startswith("USETMAXREG.DEALLOC")]
    findings = [] if releases else ["no registers are released"]
    for index in releases:
        count = int(code[index].operands, 16)
        ran = [code[i] for i in reached(code, index)]
        highest = max((number for one in ran for number in one.registers), default=0)
        if highest >= count:
            findings.append(f"producers keep {count} registers; what they run uses R{highest}")
        if any(one.root.endswith("GMMA") for one in ran):
            findings.append("producers run into an MMA")
    return findings


def reached(code: Sequence[Instruction], index: int) -> list[int]:
    """Returns the indices of the code that may follow ``index``, up to a change of the register count."""
    seen, ahead = set(), [index + 1]
    while ahead:
        at = ahead.pop()
        if at not in seen and not code[at].opcode.startswith("USETMAXREG"):
            seen.add(at)
            ahead += _next(code, at)
    return sorted(seen)


def _next(code: Sequence[Instruction], index: int) -> list[int]:
    """Returns the indices of a superset of the instructions that may directly follow one."""
    one = code[index]
    if one.root in JUMPS and not one.targets:
        raise ValueError(f"the target of {one.opcode} {one.operands} is not known: an operand must name it")
    if one.opcode.startswith(ENDS):
        return [index + 1] if one.predicate else []
    always = one.root in ("BRA", "JMP") and not one.predicate and "," not in one.operands
    return [*one.targets] if always else [*one.targets, index + 1]
