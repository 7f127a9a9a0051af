"""Coverage of a kernel: lines that ran, and instructions that the rules judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from cute_emulator.errors import Coverage
from cute_emulator.rules import RULES
from cute_emulator.source import line_of_source
from cute_emulator.translate.program import Program

_PATTERNS = {rule.kind: re.compile(rule.judges) for rule in RULES if rule.judges}


def coverage(program: Program, items: Iterable[int]) -> Coverage:
    """Returns the coverage of a program.

    Args:
        program: Translated program.
        items: Items that ran.
    """
    ran = {id(ins): ins for item in items for ins in program.instructions_of(item)}  # a line may hold several
    every = [ins for function in program.translated() for ins in function.instructions]
    text = program.module.text
    missed = {line_of_source(text, ins.line) for ins in every if id(ins) not in ran}
    missed -= {line_of_source(text, ins.line) for ins in ran.values()}
    judged = Counter(
        kind for ins in ran.values() for kind, pattern in _PATTERNS.items() if pattern.match(ins.opcode)
    )
    return Coverage(program.entry.name, len(ran), len(every), tuple(sorted(filter(None, missed))), judged)
