"""Inline Python for floating-point arithmetic and comparison (PTX ISA 9.7.3 to 9.7.7)."""

from __future__ import annotations

from cute_emulator.instructions import scalar
from cute_emulator.instructions.emit import Emitter, Unsupported
from cute_emulator.instructions.packed import or_pairs
from cute_emulator.instructions.registry import Emit, inline
from cute_emulator.instructions.scalar import is_float, only, type_of
from cute_emulator.numbers.lanes import MASK
from cute_emulator.ptx.ir import TYPE_BYTES, Instruction, Operand

_ROUNDINGS = ("rn", "rz", "rm", "rp")


def finish(e: Emitter, ins: Instruction, expression: str) -> None:
    """Applies `.sat` and `.ftz` to a single-precision result and stores it."""
    if "sat" in ins.parts:
        expression = f"sat({expression})"
    if "ftz" in ins.parts:
        expression = f"ftz({expression})"
    e.assign(ins.operands[0], expression, form="f")


def rounding(ins: Instruction, *modelled: str) -> str:
    """Returns the rounding of an opcode, `rn` by default; raises for others than `modelled`."""
    mode = next((p for p in ins.parts if p in _ROUNDINGS), "rn")
    if mode not in modelled:
        raise Unsupported(f"rounding .{mode}")
    return mode


def operand(e: Emitter, ins: Instruction, o: Operand | None, kind: str = "f32") -> str:
    """Returns a float operand as `float32` or `float64`; `.ftz` flushes subnormal values of its format."""
    if kind == "f64":
        return e.d(o)
    if kind == "f32":
        value = e.f(o)
    else:
        value = e.bf16(o) if kind == "bf16" else e.new(f"unpack_half({e.i(o, 16)}, {kind!r})")
    return e.new(f"flush({value}, {kind!r})") if "ftz" in ins.parts else value


def _single(e: Emitter, ins: Instruction, symbol: str) -> None:
    only(ins, *_ROUNDINGS, "ftz", "sat", *(("approx", "full") if symbol == "/" else ()))
    a, b = ins.operands[1:3]
    mode, kinds = rounding(ins, *_ROUNDINGS), [p for p in ins.parts if p in TYPE_BYTES]
    x = operand(e, ins, a, kinds[-1])  # mixed precision: `add.f32.bf16 d, a, c` takes a in the narrow type
    y = operand(e, ins, b)
    if mode == "rn":
        finish(e, ins, f"{x} {symbol} {y}")
    else:
        finish(e, ins, _towards(x, symbol, y).replace("{mode}", repr(mode)))


def _towards(x: str, symbol: str, y: str) -> str:
    """Returns the expression of `x symbol y` with the directed rounding `{mode}`."""
    if symbol in "+-":
        return f"add_directed({x}, {'-' if symbol == '-' else ''}{y}, {{mode}})"
    # The product is exact in double; an inexact quotient is, as a double, on the same side of each single.
    return f"directed(f64({x}) {symbol} f64({y}), {{mode}})"


def _double(e: Emitter, ins: Instruction, symbol: str) -> None:
    only(ins, *_ROUNDINGS)
    rounding(ins, "rn")
    d, a, b = ins.operands
    e.assign(d, f"{e.d(a)} {symbol} {e.d(b)}", form="d")


def _packed(e: Emitter, ins: Instruction, template: str, towards: str) -> None:
    """Emits an f32x2 operation: the same on both halves.

    `towards` is the template for directed roundings, named `{mode}`.
    """
    only(ins, *_ROUNDINGS, "ftz")
    mode = rounding(ins, *_ROUNDINGS)
    if mode != "rn":
        template = towards.replace("{mode}", repr(mode))
    d, *sources = ins.operands
    halves, flush = [e.pair(s) for s in sources], "ftz({})" if "ftz" in ins.parts else "{}"
    out = []
    for side in (0, 1):
        values = [flush.format(e._float(h[side])) for h in halves]
        out.append({"f": e.new(flush.format(template.format(*values)))})
    e.set_pair(d, *out)  # type: ignore[arg-type]


def _halves(e: Emitter, ins: Instruction, template: str, arity: int) -> None:
    """Emits operations on f16, bf16 and their x2 forms: computed in single precision, rounded once."""
    kind = type_of(ins)
    d, *sources = ins.operands
    ends, element = "{}", kind.removesuffix("x2")
    if "relu" in ins.parts:
        ends = "fmax_nan({}, f32(0))"
    elif "sat" in ins.parts:
        ends = "sat({})"
    starts = "{}"
    if "ftz" in ins.parts:
        starts = f"flush({{}}, {element!r})"
        ends = f"flush({ends}, {element!r})"
    if kind.endswith("x2"):
        parts = [e.new(f"unpack2({e.i(s, 32)}, {kind!r})") for s in sources[:arity]]
        values = ([e.new(starts.format(f"{p}[{n}]")) for p in parts] for n in (0, 1))
        lo, hi = (ends.format(template.format(*each)) for each in values)
        e.assign(d, f"pack2({hi}, {lo}, {kind!r})", 32)
    else:
        parts = [e.new(starts.format(f"unpack_half({e.i(s, 16)}, {kind!r})")) for s in sources[:arity]]
        e.assign(d, f"pack_half({ends.format(template.format(*parts))}, {kind!r})", 16)


def _arithmetic(symbol: str, integer: Emit) -> Emit:
    def emit(e: Emitter, ins: Instruction) -> None:
        kind = type_of(ins)
        if not is_float(kind):
            integer(e, ins)
        elif "f32x2" in ins.parts:
            _packed(e, ins, f"{{0}} {symbol} {{1}}", _towards("{0}", symbol, "{1}"))
        elif "f32" in ins.parts:
            _single(e, ins, symbol)
        elif kind == "f64":
            _double(e, ins, symbol)
        else:
            only(ins, "rn", "ftz", "sat")
            _halves(e, ins, f"{{0}} {symbol} {{1}}", 2)

    return emit


inline("add")(_arithmetic("+", or_pairs("add", scalar.add_int)))
inline("sub")(_arithmetic("-", scalar.sub_int))
inline("mul")(_arithmetic("*", scalar.mul_int))


@inline("fma")
def _fma(e: Emitter, ins: Instruction) -> None:
    kinds = [p for p in ins.parts if p in TYPE_BYTES]
    kind = kinds[0]
    d, a, b, c = ins.operands
    if kind == "f32x2":
        _packed(e, ins, "fma32({0}, {1}, {2})", "fma_directed({0}, {1}, {2}, {mode})")
    elif kind == "f64":
        only(ins, *_ROUNDINGS)
        rounding(ins, "rn")
        e.assign(d, f"fma64({e.d(a)}, {e.d(b)}, {e.d(c)})", form="d")
    elif kind == "f32":
        only(ins, *_ROUNDINGS, "ftz", "sat")
        mode = rounding(ins, *_ROUNDINGS)
        values = ", ".join(operand(e, ins, o, kinds[-1]) for o in (a, b)) + f", {operand(e, ins, c)}"
        finish(e, ins, f"fma32({values})" if mode == "rn" else f"fma_directed({values}, {mode!r})")
    else:
        only(ins, "rn", "ftz", "sat", "relu")
        _halves(e, ins, "fma_to_odd({0}, {1}, {2})", 3)


@inline("mad")
def _mad(e: Emitter, ins: Instruction) -> None:
    (_fma if is_float(type_of(ins)) else scalar.mad_int)(e, ins)


@inline("div")
def _divide(e: Emitter, ins: Instruction) -> None:
    kind = type_of(ins)
    if kind == "f32":
        _single(e, ins, "/")
    elif kind == "f64":
        _double(e, ins, "/")
    else:
        scalar.div_int(e, ins)


def _extreme(name: str, integer: Emit) -> Emit:
    def emit(e: Emitter, ins: Instruction) -> None:
        kind = type_of(ins)
        if not is_float(kind):
            integer(e, ins)
            return
        only(ins, "ftz", "NaN", "abs", "xorsign")
        f = f"{name}_nan" if "NaN" in ins.parts else name
        sources = ins.operands[1:]
        each = [f"abs({{{n}}})" if "abs" in ins.parts else f"{{{n}}}" for n in range(len(sources))]
        template = each[0]
        for further in each[1:]:
            template = f"{f}({template}, {further})"
        if "xorsign" in ins.parts:
            template = f"xorsign({template}, {{0}}, {{1}})"
        if kind == "f32":
            finish(e, ins, template.format(*[operand(e, ins, s) for s in sources]))
        elif kind == "f64":
            e.assign(ins.operands[0], template.format(*[e.d(s) for s in sources]), form="d")
        else:
            _halves(e, ins, template, len(sources))

    return emit


inline("min")(_extreme("fmin", or_pairs("min", scalar.min_int)))
inline("max")(_extreme("fmax", or_pairs("max", scalar.max_int)))


def _sign(xor: bool, integer: Emit) -> Emit:
    """Returns the emitter of `neg` or `abs` of floats.

    They change only the sign bit, and values that `.ftz` flushes.
    """

    def emit(e: Emitter, ins: Instruction) -> None:
        kind = type_of(ins)
        if not is_float(kind):
            integer(e, ins)
            return
        only(ins, "ftz")
        d, a = ins.operands
        width = 8 * TYPE_BYTES[kind]
        sign = 0x80008000 if kind.endswith("16x2") else 1 << (width - 1)
        if kind == "f32":
            e.assign(d, f"-{operand(e, ins, a)}" if xor else f"abs({operand(e, ins, a)})", form="f")
        elif "ftz" in ins.parts:
            _halves(e, ins, "-{0}" if xor else "abs({0})", 1)
        elif xor:
            e.assign(d, f"{e.i(a, width)} ^ {sign}", width)
        else:
            e.assign(d, f"{e.i(a, width)} & {((1 << width) - 1) & ~sign}", width)

    return emit


inline("neg")(_sign(True, scalar.neg_int))
inline("abs")(_sign(False, scalar.abs_int))


def _unary(single: str, double: str = "", directed: str = "") -> Emit:
    """Returns the emitter of a function of one operand.

    `directed` is the expression of its value in double precision, for directed roundings.
    """

    def emit(e: Emitter, ins: Instruction) -> None:
        kind = type_of(ins)
        d, a = ins.operands
        only(ins, "approx", "ftz", *(_ROUNDINGS if directed else ()))
        mode = rounding(ins, *(_ROUNDINGS if directed and kind == "f32" else ("rn",)))
        if kind == "f32" and mode != "rn":
            finish(e, ins, f"directed({directed.format(operand(e, ins, a))}, {mode!r})")
        elif kind == "f32":
            # 2 to the power of a subnormal is 1, as of zero.
            finish(e, ins, f"{single}({e.f(a) if single == 'ex2' else operand(e, ins, a)})")
        elif kind == "f64" and double:
            e.assign(d, f"{double}({e.d(a)})", form="d")
        elif kind in ("f16", "bf16", "f16x2", "bf16x2") and single in ("ex2", "ftanh"):
            _halves(e, ins, f"{single}({{0}})", 1)
        else:
            raise Unsupported(ins.opcode)

    return emit


for _name, _args in {
    "ex2": ("ex2",), "lg2": ("lg2",), "sin": ("fsin",), "cos": ("fcos",), "tanh": ("ftanh",),
    "rcp": ("rcp", "rcp64", "1.0 / f64({})"), "rsqrt": ("rsqrt", "rsqrt64"),
    "sqrt": ("np.sqrt", "np.sqrt", "np.sqrt(f64({}))"),
}.items():  # fmt: skip
    inline(_name)(_unary(*_args))


@inline("copysign")
def _copysign(e: Emitter, ins: Instruction) -> None:
    only(ins)
    d, a, b = ins.operands
    if type_of(ins) == "f32":
        e.assign(d, f"copysign({e.f(b)}, {e.f(a)})", form="f")
    else:
        e.assign(d, f"copysign({e.d(b)}, {e.d(a)})", form="d")


@inline("testp")
def _testp(e: Emitter, ins: Instruction) -> None:
    only(ins, "finite", "infinite", "number", "notanumber")
    d, a = ins.operands
    x = e.f(a) if type_of(ins) == "f32" else e.d(a)
    tests = {
        "finite": "np.isfinite({})",
        "infinite": "np.isinf({})",
        "number": "{0} == {0}",
        "notanumber": "{0} != {0}",
    }
    e.assign(d, f"truth({tests[ins.parts[1]].format(x)})")


# -- comparison ----------------------------------------------------------------------------------


_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNORDERED = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}


def _compare(e: Emitter, ins: Instruction) -> str:
    kind, name = [p for p in ins.parts if p in TYPE_BYTES][-1], ins.parts[1]
    if kind.endswith("x2"):
        raise Unsupported(ins.opcode)
    only(ins, *_ORDERED, *_UNORDERED, "num", "nan", "ftz", "and", "or", "xor")
    x, y = (operand(e, ins, o, kind) for o in ins.operands[1:3])
    nan = f"(({x} != {x}) | ({y} != {y}))"
    if name == "ne":
        return f"truth(({x} != {y}) & ({x} == {x}) & ({y} == {y}))"
    if name in _ORDERED:
        return f"truth({x} {_ORDERED[name]} {y})"
    if name == "equ":
        return f"truth(({x} == {y}) | {nan})"
    if name == "neu":
        return f"truth({x} != {y})"
    if name in _UNORDERED:
        return f"truth(({x} {_UNORDERED[name]} {y}) ^ True)"
    return f"truth({nan} ^ {name == 'num'})"


@inline("setp")
def _setp(e: Emitter, ins: Instruction) -> None:
    if is_float(type_of(ins)):
        scalar.set_predicates(e, ins, e.new(_compare(e, ins)))
    else:
        scalar.setp_int(e, ins)


_TRUE = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}
"""Value that `set` writes: 1.0 of a float type, all ones of another."""


@inline("set")
def _set(e: Emitter, ins: Instruction) -> None:
    source = type_of(ins)
    target = [p for p in ins.parts if p in TYPE_BYTES][0]
    if any(p in ins.parts for p in ("and", "or", "xor")) or target.endswith("x2"):
        raise Unsupported(ins.opcode)
    p = e.new(_compare(e, ins) if is_float(source) else scalar.compare_int(e, ins))
    width = 8 * TYPE_BYTES[target]
    value = f"sel({width}, {p}, {_TRUE.get(target, MASK[width])}, 0)"
    e.assign(ins.operands[0], value, width, target[0] == "s")
