"""Frozen records of a PTX module, produced by the parser."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

TYPE_BYTES = {
    **dict.fromkeys(("b8", "u8", "s8", "e2m1x2"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "ue8m0x2"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "u16x2", "s16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 8),
    "b128": 16,
    "pred": 1,
}


@dataclass(frozen=True)
class Reg:
    """A virtual register: `slot` is unique inside its function, `type` its declared type without the dot."""

    name: str
    slot: int
    type: str


@dataclass(frozen=True)
class Imm:
    """A literal. `value` is an int, or the bits of a floating literal, whose `kind` is "f32" or "f64"."""

    value: int
    kind: str = "int"


@dataclass(frozen=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Sym:
    """A variable, function, label or call prototype, with a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Vec:
    """`{a, b}`; `_` (a sink) is None."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True)
class Args:
    """`(a, b)` of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Mem:
    """`[base + offset]`, with the tensor coordinates or further parts that the brackets hold."""

    base: Operand
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Not:
    """`!p`."""

    operand: Operand


@dataclass(frozen=True)
class Pair:
    """`a|b`: two destinations."""

    first: Operand | None
    second: Operand | None


Operand = Reg | Imm | Special | Sym | Vec | Args | Mem | Not | Pair


@dataclass(frozen=True)
class Instruction:
    """One instruction: `opcode` split at dots, operands, the guard predicate, its line in the text."""

    opcode: str
    operands: tuple[Operand | None, ...]
    guard: Reg | None
    guard_negated: bool
    line: int
    text: str

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Returns the opcode split at its dots."""
        return tuple(self.opcode.split("."))


@dataclass(frozen=True)
class Variable:
    """A variable or parameter: `space` is shared, global, const, local or param, `type` an element's."""

    name: str
    space: str
    type: str
    align: int
    nbytes: int
    init: bytes = b""
    extern: bool = False
    refs: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Function:
    """An `.entry` or `.func`. `labels` maps a label to the index of the instruction that follows it."""

    name: str
    is_entry: bool
    params: tuple[Variable, ...]
    returns: tuple[Variable, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    branch_targets: dict[str, tuple[str, ...]]
    variables: tuple[Variable, ...]
    registers: int
    directives: dict[str, tuple[int, ...]]
    line: int

    @cached_property
    def pools_registers(self) -> bool:
        """Returns whether it contains `setmaxnreg`."""
        return any(ins.parts[0] == "setmaxnreg" for ins in self.instructions)


@dataclass(frozen=True)
class Module:
    """A PTX module: its functions by name and its module-scope variables."""

    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]
    declared: frozenset[str]
    text: str = field(repr=False)
    """Without comments, save the marks of inline assembly."""
    original: str = field(repr=False)
