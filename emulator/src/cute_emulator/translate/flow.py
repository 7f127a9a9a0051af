"""Control flow of a function: its items, their successors, and the registers live across them.

An item begins at a label, after a branch, or at an instruction that may wait. It ends with a branch or call,
or before the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_emulator.instructions.emit import Op
from cute_emulator.ptx.ir import Args, Function, Instruction, Mem, Not, Operand, Pair, Reg, Sym, Vec

TERMINATORS = ("bra", "brx", "ret", "exit", "call", "trap", "brkpt")


def registers_of(operand: Operand | None) -> list[Reg]:
    """Lists every register in an operand."""
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Vec | Args):
        return [r for x in operand.items for r in registers_of(x)]
    if isinstance(operand, Mem):
        return registers_of(operand.base) + [r for x in operand.extra for r in registers_of(x)]
    if isinstance(operand, Not):
        return registers_of(operand.operand)
    if isinstance(operand, Pair):
        return registers_of(operand.first) + registers_of(operand.second)
    return []


@dataclass(frozen=True)
class Step:
    """An instruction with the slots of the registers that it reads and writes."""

    ins: Instruction
    op: Op | None
    uses: tuple[int, ...]
    defs: tuple[int, ...]

    @property
    def ends_item(self) -> bool:
        """Returns whether the instruction ends an item: a branch, a call, a return, an exit or a trap."""
        return self.ins.parts[0] in TERMINATORS


class Flow:
    """Items of a function.

    Args:
        function: Function to analyse.
        steps: Instructions of the function.
        start: Number of the function's first item.

    Attributes:
        items: Steps of each item.
        targets: Item that follows each label.
        live_in: Slots live before each item.
        live_out: Slots live after each item.
    """

    def __init__(self, function: Function, steps: list[Step], start: int) -> None:
        self.function, self.start = function, start
        starts = {0, *function.labels.values()}
        for n, s in enumerate(steps):
            if s.op is not None and s.op.head:
                starts.add(n)
            if s.ends_item:
                starts.add(n + 1)
        cuts = sorted(x for x in starts if x < len(steps))
        self.items = [steps[a:b] for a, b in zip(cuts, [*cuts[1:], len(steps)], strict=True)]
        item_of = {first: start + n for n, first in enumerate(cuts)} | {len(steps): start + len(cuts)}
        self.targets = {name: item_of[index] for name, index in function.labels.items()}
        self.live_in, self.live_out = self._liveness()

    def successors(self, item: int) -> list[int]:
        """Returns the items that may follow an item.

        For a conditional branch these are the next item, then the target.
        """
        ins = self.items[item - self.start][-1].ins
        name = ins.parts[0]
        if name == "bra":
            assert isinstance(ins.operands[0], Sym)
            target = self.targets[ins.operands[0].name]
            return [target] if ins.guard is None else [item + 1, target]
        if name == "brx":
            table = ins.operands[1]
            assert isinstance(table, Sym)
            return [self.targets[t] for t in self.function.branch_targets[table.name]]
        if name in ("ret", "exit") and ins.guard is None:
            return []
        return [item + 1]

    def _liveness(self) -> tuple[list[set[int]], list[set[int]]]:
        n = len(self.items)
        gen, kill = [0] * n, [0] * n
        for i, steps in enumerate(self.items):
            for s in steps:
                for slot in s.uses:
                    gen[i] |= (1 << slot) & ~kill[i]
                for slot in s.defs:
                    kill[i] |= 1 << slot
        follow = [
            [t - self.start for t in self.successors(self.start + i) if t - self.start < n] for i in range(n)
        ]
        live, out, changed = [0] * n, [0] * n, True
        while changed:
            changed = False
            for i in range(n - 1, -1, -1):
                out[i] = 0
                for j in follow[i]:
                    out[i] |= live[j]
                new = gen[i] | (out[i] & ~kill[i])
                if new != live[i]:
                    live[i], changed = new, True
        return [_slots(x) for x in live], [_slots(x) for x in out]

    def hammocks(self) -> dict[int, set[int]]:
        """Returns items that end with a forward branch around one item that cannot wait.

        Returns:
            By item: slots that the skipped item writes and the branch's target reads.
        """
        entered, written = set(self.targets.values()), {}
        for n in range(len(self.items) - 2):
            number, end, body = self.start + n, self.items[n][-1].ins, self.items[n + 1]
            if end.parts[0] != "bra" or end.guard is None or number + 1 in entered:
                continue
            inner = body[-1].ins
            if body[-1].ends_item and not (inner.parts[0] == "bra" and inner.guard is None):
                continue
            if any(s.op is not None and s.op.head for s in body):
                continue
            target = self.successors(number)[1]
            if self.successors(number + 1) != [target]:
                continue
            place = target - self.start
            after = self.live_in[place] if place < len(self.live_in) else set()
            written[number] = {slot for s in body for slot in s.defs} & after
        return written


def _slots(mask: int) -> set[int]:
    out = set()
    while mask:
        low = mask & -mask
        out.add(low.bit_length() - 1)
        mask ^= low
    return out
