"""Emitter of the Python source of one item: straight-line code with at most one head and one tail.

Every definition has a fresh local name. A register records the forms in which its value is available: bit
pattern, `float32`, `float64`, a pair of 32-bit halves. So float code is not converted back and forth, and
unpacking a value that was just packed costs nothing. Only registers that are live after the item are written
to the register file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cute_emulator.instructions.peephole import gather_runs, needed
from cute_emulator.numbers import lanes
from cute_emulator.numbers.lanes import MASK
from cute_emulator.ptx.ir import (
    TYPE_BYTES,
    Imm,
    Instruction,
    Mem,
    Not,
    Operand,
    Reg,
    Special,
    Sym,
    Vec,
)

BLOCK = -1  # the item waits: its warp is parked and the item runs again when woken
DIVERGED = -2  # the warp's groups changed
EXITED = -3  # the group has ended


@dataclass(frozen=True)
class Op:
    """Implementation of an instruction by a call instead of inline Python.

    Attributes:
        run: `run(group, mask, *inputs)`; returns the outputs (one value, or a tuple), or `BLOCK_RESULT` to
            wait: `run` has parked the group, and is called again when the group is woken.
        inputs: Operands evaluated for the call, in order.
        outputs: Registers that receive the result; None drops a part.
        head: Whether it may wait; then it begins an item.
        uses: Further registers that `run` reads from the register file.
        defs: Further registers that `run` writes to the register file.
        joins: Whether neighbours of its kind may be joined (`memory.stores`): then `run` is a `Store`.
    """

    run: Callable[..., Any]
    inputs: tuple[Operand | None, ...] = ()
    outputs: tuple[Reg | None, ...] = ()
    head: bool = False
    uses: tuple[Reg, ...] = ()
    defs: tuple[Reg, ...] = ()
    joins: bool = False


class Unsupported(Exception):
    """Error of the translation: the instruction is translated to a call that reports it when executed."""


def width_of(reg: Reg) -> int:
    """Returns the bits of a register; 0 for a predicate."""
    return 0 if reg.type == "pred" else 8 * max(2, TYPE_BYTES[reg.type])


@dataclass
class Emitter:
    """Source of one item.

    Attributes:
        base: Offset of a register's slot in the register file.
        symbols: Addresses known at translation; others are looked up per launch.
        shared: Offsets of shared variables in the CTA's window.
        names: Global names of the generated function; handlers are added to it.
        halves: By 16-bit local: the 32-bit local that contains it, and whether it is the low (0) or high (1)
            half.
        opposites: By predicate: the predicate that is its negation.
    """

    base: int
    symbols: dict[str, int]
    shared: dict[str, int]
    names: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    forms: dict[int, dict[str, Any]] = field(default_factory=dict)
    defs: dict[int, Reg] = field(default_factory=dict)
    halves: dict[str, tuple[str, int]] = field(default_factory=dict)
    opposites: dict[str, str] = field(default_factory=dict)
    guard: str | None = None
    counter: int = 0

    # -- names and values ------------------------------------------------------------------------

    def new(self, expression: str) -> str:
        """Binds an expression to a fresh local."""
        if re.fullmatch(r"v\d+|\d+|True|False", expression):
            return expression
        self.counter += 1
        self.lines.append(f"v{self.counter} = {expression}")
        return f"v{self.counter}"

    def constant(self, value: Any, prefix: str = "k") -> str:
        """Returns a global name for an object."""
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def _form(self, reg: Reg, form: str) -> Any:
        slot = self.base + reg.slot
        forms = self.forms.get(slot)
        if forms is None:
            forms = self.forms[slot] = {"i": self.new(f"R[{slot}]")}
        if form not in forms:
            if form == "i":
                if "f" in forms:
                    forms["i"] = self.new(f"I({forms['f']})")
                elif "d" in forms:
                    forms["i"] = self.new(f"J({forms['d']})")
                else:
                    lo, hi = forms["pair"]
                    forms["i"] = self.new(f"pair64({self._bits(lo)}, {self._bits(hi)})")
            elif form == "pair":
                value = self._form(reg, "i")
                forms["pair"] = ({"i": self.new(f"low32({value})")}, {"i": self.new(f"high32({value})")})
            else:
                forms[form] = self.new(f"{form.upper()}({self._form(reg, 'i')})")
        return forms[form]

    def _bits(self, forms: dict[str, str]) -> str:
        if "i" not in forms:
            forms["i"] = self.new(f"I({forms['f']})")
        return forms["i"]

    def _float(self, forms: dict[str, str]) -> str:
        if "f" not in forms:
            forms["f"] = self.new(f"F({forms['i']})")
        return forms["f"]

    def i(self, op: Operand | None, width: int = 0, sign: bool = False) -> str:
        """Returns the bit pattern of an operand; with `width`, truncated or extended to it."""
        if isinstance(op, Reg):
            value = self._form(op, "i")
            declared = width_of(op)
            if width and declared and declared != width:
                return self.new(self.resized(str(value), min(declared, width), width, sign))
            return str(value)
        if isinstance(op, Imm):
            return str(_literal(op, width))
        if isinstance(op, Sym):
            if op.name in self.shared:
                return self.new(f"g.warp.cta.base + {self.shared[op.name] + op.offset}")
            if op.name in self.symbols:
                return str(self.symbols[op.name] + op.offset)
            return self.new(f"g.warp.symbols[{op.name!r}] + {op.offset}")
        if isinstance(op, Special):
            return self.new(f"g.warp.special({op.name!r})")
        if isinstance(op, Not):
            return self.new(f"{self.p(op.operand)} ^ True")
        if isinstance(op, Vec):
            return "(" + "".join(f"{self.i(x) if x is not None else 0}, " for x in op.items) + ")"
        if isinstance(op, Mem):
            return self.address(op)
        raise Unsupported(f"operand {op}")

    def f(self, op: Operand | None) -> str:
        """Returns the `float32` value of a 32-bit operand."""
        if isinstance(op, Reg):
            return str(self._form(op, "f"))
        if isinstance(op, Imm):
            number = lanes.F(op.value) if op.kind == "f32" else lanes.np.float32(lanes.D(op.value))
            return self.constant(number)
        return self.new(f"F({self.i(op, 32)})")

    def either(self, op: Operand | None) -> str:
        """Returns a 32-bit operand as `float32` value or bit pattern, whichever is available."""
        if isinstance(op, Reg) and "f" not in self.forms.get(self.base + op.slot, {}):
            return self.i(op, 32)
        return self.f(op)

    def bf16(self, op: Operand | None) -> str:
        """Returns the `float32` value of a 16-bit operand that holds a bf16."""
        value = self.i(op, 16)
        if value in self.halves:
            word, half = self.halves[value]
            return self.new(f"bf16_{('low', 'high')[half]}({word})")
        return self.new(f"unpack_half({value}, 'bf16')")

    def d(self, op: Operand | None) -> str:
        """Returns the `float64` value of a 64-bit operand."""
        if isinstance(op, Reg):
            return str(self._form(op, "d"))
        if isinstance(op, Imm):
            return self.constant(
                lanes.np.float64(lanes.F(op.value)) if op.kind == "f32" else lanes.D(op.value)
            )
        return self.new(f"D({self.i(op, 64)})")

    def p(self, op: Operand | None) -> str:
        """Returns a predicate."""
        if isinstance(op, Imm):
            return str(op.value != 0)
        if isinstance(op, Reg) and op.type != "pred":
            return self.new(f"{self.i(op)} != 0")
        return self.i(op)

    def pair(self, op: Operand | None) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the two 32-bit halves of a 64-bit operand, each in its forms."""
        if isinstance(op, Reg):
            return self._form(op, "pair")  # type: ignore[no-any-return]
        value = int(self.i(op, 64))
        return {"i": str(value & MASK[32])}, {"i": str(value >> 32)}

    def half(self, op: Operand) -> dict[str, str]:
        """Returns the forms of a 32-bit operand, as half of a pair."""
        if isinstance(op, Reg):
            self.i(op) if self.base + op.slot not in self.forms else None
            return dict(self.forms[self.base + op.slot])
        return {"i": self.i(op, 32)}

    def address(self, op: Mem) -> str:
        """Returns the byte address of a memory operand."""
        if isinstance(op.base, Sym | Imm):
            base = self.i(op.base)
            return str(int(base) + op.offset) if base.isdigit() else self.new(f"{base} + {op.offset}")
        value = self.i(op.base)
        if not op.offset:
            return value
        bits = width_of(op.base) if isinstance(op.base, Reg) else 64
        return self.new(self.wrapped(f"{value} {op.offset:+d}", bits))

    def wrapped(self, expression: str, width: int) -> str:
        """Returns a sum, a product or the like modulo 2**width, which NumPy computes without further code."""
        return f"(t & {MASK[width]} if (t := {expression}).__class__ is int else t)"

    def resized(self, value: str, source: int, target: int, sign: bool) -> str:
        """Returns a local's value, or a constant, of `source` bits, truncated or extended to `target`."""
        if value.isdigit():
            return str(lanes.resize(int(value), source, target, sign))
        number = f"{value} & {MASK[min(source, target)]}"
        if sign and source < target:
            half = 1 << source - 1
            number = f"(({number} ^ {half}) - {half}) & {MASK[target]}"
        return f"({number} if {value}.__class__ is int else resize({value}, {source}, {target}, {sign}))"

    # -- results ---------------------------------------------------------------------------------

    def assign(
        self, dst: Operand | None, expression: str, width: int = 0, sign: bool = False, form: str = "i"
    ) -> None:
        """Assigns to a register; `width` is that of the expression if it may differ from the register's."""
        if dst is None:
            return
        assert isinstance(dst, Reg)
        declared = width_of(dst)
        if form == "i" and width and declared and declared != width:
            expression = self.resized(self.new(expression), min(width, declared), declared, sign)
        value = self.new(expression)
        if self.guard is not None:
            if form != "i":
                value = self.new(f"{'I' if form == 'f' else 'J'}({value})")
            value, form = self.new(f"sel({declared}, {self.guard}, {value}, {self._form(dst, 'i')})"), "i"
        self._store(dst, {form: value})

    def set_pair(self, dst: Reg, lo: dict[str, str], hi: dict[str, str]) -> None:
        """Assigns a 64-bit register from its halves."""
        if self.guard is not None:
            self.assign(dst, f"pair64({self._bits(lo)}, {self._bits(hi)})")
        else:
            self._store(dst, {"pair": (lo, hi)})

    def set_half(self, dst: Operand | None, forms: dict[str, str]) -> None:
        """Assigns a 32-bit register from one half of a pair."""
        if dst is None:
            return
        assert isinstance(dst, Reg)
        if self.guard is not None or width_of(dst) != 32:
            self.assign(dst, self._bits(forms), 32)
        else:
            self._store(dst, forms)

    def _store(self, dst: Reg, forms: dict[str, Any]) -> None:
        slot = self.base + dst.slot
        self.forms[slot] = forms
        self.defs[slot] = dst

    # -- calls -----------------------------------------------------------------------------------

    def call(self, op: Op, ins: Instruction) -> None:
        """Emits the call of an `Op`, under the instruction's guard if it has one."""
        inputs = "".join(f", {self._input(x, ins)}" for x in op.inputs)
        name = self.constant(op.run, "s" if op.joins and self.guard is None else "h")
        if self.guard is None:
            result = self.new(f"{name}(g, g.mask{inputs})")
            if op.head:
                self.lines.append(f"if {result} is BLOCK: return {BLOCK}")
            act = None
        else:
            act = self.new(f"g.mask & bits({self.guard})")
            result = self.new(f"{name}(g, {act}{inputs}) if {act} else SKIPPED")
            if op.head:
                self.lines.append(f"if {result} is BLOCK: return {BLOCK}")
        outputs = op.outputs
        several = len(outputs) > 1
        for n, dst in enumerate(outputs):
            if dst is None:
                continue
            value = f"{result}[{n}]" if several else result
            if act is not None:
                old = self._form(dst, "i")
                value = f"{old} if {result} is SKIPPED else merge_as({width_of(dst)}, {act}, {value}, {old})"
            self._store(dst, {"i": self.new(value)})

    def _input(self, x: Operand | None, ins: Instruction) -> str:
        """Returns an operand; a float literal has the instruction's type."""
        if isinstance(x, Vec) and any(isinstance(item, Imm) for item in x.items):
            return "(" + "".join(f"{self._input(item, ins) if item else 0}, " for item in x.items) + ")"
        if isinstance(x, Imm) and x.kind != "int":
            return self.i(x, next(8 * TYPE_BYTES[p] for p in reversed(ins.parts) if p in TYPE_BYTES))
        return self.i(x) if x is not None else "None"

    def flush(self, live: set[int]) -> None:
        """Writes the live definitions back to the register file."""
        values = [(slot, self._form(reg, "i")) for slot, reg in self.defs.items() if slot in live]
        self.lines.extend(f"R[{slot}] = {value}" for slot, value in values)

    def source(self, name: str) -> str:
        """Returns the text of the function."""
        body = "\n    ".join(needed(gather_runs(self.lines)))
        return f"def {name}(g):\n    R = g.R\n    {body}\n"


def _literal(op: Imm, width: int) -> int:
    """Returns a literal's pattern; a double is converted to single for 32 bits (PTX ISA 4.5.2)."""
    value = op.value
    if op.kind == "f64" and width == 32:
        return int(lanes.I(lanes.np.float32(lanes.D(value))))
    if op.kind != "int" and width and width != (32 if op.kind == "f32" else 64):
        raise Unsupported(f"a float literal of {width} bits")
    return value & MASK[width] if width else value


def namespace() -> dict[str, Any]:
    """Returns the global names of generated functions."""
    public: Sequence[str] = [n for n in vars(lanes) if not n.startswith("__")]
    return {**{n: getattr(lanes, n) for n in public}, "BLOCK": BLOCK_RESULT, "SKIPPED": SKIPPED}


class _Token:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


BLOCK_RESULT = _Token("BLOCK")
SKIPPED = _Token("SKIPPED")
