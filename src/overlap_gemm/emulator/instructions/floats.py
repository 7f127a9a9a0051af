"""Inline Python for floating-point arithmetic, comparison and conversion (PTX ISA 9.7.3 to 9.7.7, 9.7.9)."""

from __future__ import annotations

from overlap_gemm.emulator.instructions import scalar
from overlap_gemm.emulator.instructions.emit import Emitter, Unsupported
from overlap_gemm.emulator.instructions.registry import Emit, inline
from overlap_gemm.emulator.instructions.scalar import is_float, type_of
from overlap_gemm.emulator.ptx.ir import TYPE_BYTES, Instruction, Operand

_ROUNDINGS = ("rn", "rz", "rm", "rp")


def _finish(e: Emitter, ins: Instruction, expression: str) -> None:
    """Applies `.sat` and `.ftz` to a single-precision result and stores it."""
    if "sat" in ins.parts:
        expression = f"sat({expression})"
    if "ftz" in ins.parts:
        expression = f"ftz({expression})"
    e.assign(ins.operands[0], expression, form="f")


def _rounding(ins: Instruction) -> str:
    return next((p for p in ins.parts if p in _ROUNDINGS), "rn")


def _single(e: Emitter, ins: Instruction, symbol: str) -> None:
    a, b = ins.operands[1:3]
    mode, kinds = _rounding(ins), [p for p in ins.parts if p in TYPE_BYTES]
    x = e.f(a)
    y = e.f(b)
    if len(kinds) == 2:  # mixed precision: `add.f32.bf16 d, a, c` takes a in the narrow type
        x = e.new(f"unpack_half({e.i(a, 16)}, {kinds[1]!r})")
    if mode == "rn":
        _finish(e, ins, f"{x} {symbol} {y}")
    else:
        _finish(e, ins, f"directed(f64({x}) {symbol} f64({y}), {mode!r})")


def _double(e: Emitter, ins: Instruction, symbol: str) -> None:
    if _rounding(ins) != "rn":
        raise Unsupported(ins.opcode)
    d, a, b = ins.operands
    e.assign(d, f"{e.d(a)} {symbol} {e.d(b)}", form="d")


def _packed(e: Emitter, ins: Instruction, template: str) -> None:
    """f32x2: the same operation on both halves."""
    if _rounding(ins) != "rn":
        raise Unsupported(ins.opcode)
    d, *sources = ins.operands
    halves = [e.pair(s) for s in sources]
    out = []
    for side in (0, 1):
        value = template.format(*[e._float(h[side]) for h in halves])
        out.append({"f": e.new(f"ftz({value})" if "ftz" in ins.parts else value)})
    e.set_pair(d, *out)  # type: ignore[arg-type]


def _halves(e: Emitter, ins: Instruction, template: str, arity: int) -> None:
    """f16, bf16 and their x2 forms: computed in single precision, rounded once."""
    kind = type_of(ins)
    d, *sources = ins.operands
    relu, satur = "relu" in ins.parts, "sat" in ins.parts
    wrap = (
        (lambda v: f"sat({v})") if satur else (lambda v: f"fmax_nan({v}, f32(0))") if relu else (lambda v: v)
    )
    if kind.endswith("x2"):
        parts = [e.new(f"unpack2({e.i(s, 32)}, {kind!r})") for s in sources[:arity]]
        lo, hi = (wrap(template.format(*[f"{p}[{n}]" for p in parts])) for n in (0, 1))
        e.assign(d, f"pack2({hi}, {lo}, {kind!r})", 32)
    else:
        parts = [e.new(f"unpack_half({e.i(s, 16)}, {kind!r})") for s in sources[:arity]]
        e.assign(d, f"pack_half({wrap(template.format(*parts))}, {kind!r})", 16)


def _arithmetic(symbol: str, integer: Emit) -> Emit:
    def emit(e: Emitter, ins: Instruction) -> None:
        kind = type_of(ins)
        if not is_float(kind):
            integer(e, ins)
        elif "f32x2" in ins.parts:
            _packed(e, ins, f"{{0}} {symbol} {{1}}")
        elif "f32" in ins.parts:
            _single(e, ins, symbol)
        elif kind == "f64":
            _double(e, ins, symbol)
        else:
            _halves(e, ins, f"{{0}} {symbol} {{1}}", 2)

    return emit


inline("add")(_arithmetic("+", scalar.add_int))
inline("sub")(_arithmetic("-", scalar.sub_int))
inline("mul")(_arithmetic("*", scalar.mul_int))


@inline("fma")
def _fma(e: Emitter, ins: Instruction) -> None:
    kinds = [p for p in ins.parts if p in TYPE_BYTES]
    kind, mode = kinds[0], _rounding(ins)
    d, a, b, c = ins.operands
    if kind == "f32x2":
        _packed(e, ins, "fma32({0}, {1}, {2})")
    elif kind == "f64":
        e.assign(d, f"{e.d(a)} * {e.d(b)} + {e.d(c)}", form="d")
    elif kind == "f32":
        x, y = e.f(a), e.f(b)
        if len(kinds) == 2:
            x, y = (e.new(f"unpack_half({e.i(o, 16)}, {kinds[1]!r})") for o in (a, b))
        if mode == "rn":
            _finish(e, ins, f"fma32({x}, {y}, {e.f(c)})")
        else:
            _finish(e, ins, f"directed(np.multiply({x}, {y}, dtype=f64) + {e.f(c)}, {mode!r})")
    else:
        _halves(e, ins, "fma32({0}, {1}, {2})", 3)


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
        if "xorsign" in ins.parts:
            raise Unsupported(ins.opcode)
        f = f"{name}_nan" if "NaN" in ins.parts else name
        sources = ins.operands[1:]
        template = "{0}"
        for n in range(1, len(sources)):
            template = f"{f}({template}, {{{n}}})"
        if kind == "f32":
            values = [e.f(s) for s in sources]
            if "abs" in ins.parts:
                values = [f"abs({v})" for v in values]
            _finish(e, ins, template.format(*values))
        elif kind == "f64":
            e.assign(ins.operands[0], template.format(*[e.d(s) for s in sources]), form="d")
        else:
            _halves(e, ins, template, len(sources))

    return emit


inline("min")(_extreme("fmin", scalar.min_int))
inline("max")(_extreme("fmax", scalar.max_int))


def _sign(xor: bool, integer: Emit) -> Emit:
    """`neg` and `abs` of floats act on the sign bit alone."""

    def emit(e: Emitter, ins: Instruction) -> None:
        kind = type_of(ins)
        if not is_float(kind):
            integer(e, ins)
            return
        d, a = ins.operands
        width = 8 * TYPE_BYTES[kind]
        sign = 0x80008000 if kind.endswith("16x2") else 1 << (width - 1)
        if kind == "f32" and "ftz" not in ins.parts:
            e.assign(d, f"-{e.f(a)}" if xor else f"abs({e.f(a)})", form="f")
        elif xor:
            e.assign(d, f"{e.i(a, width)} ^ {sign}", width)
        else:
            e.assign(d, f"{e.i(a, width)} & {((1 << width) - 1) & ~sign}", width)

    return emit


inline("neg")(_sign(True, scalar.neg_int))
inline("abs")(_sign(False, scalar.abs_int))


def _unary(single: str, double: str = "") -> Emit:
    def emit(e: Emitter, ins: Instruction) -> None:
        kind = type_of(ins)
        d, a = ins.operands
        if kind == "f32":
            _finish(e, ins, f"{single}({e.f(a)})")
        elif kind == "f64" and double:
            e.assign(d, f"{double}({e.d(a)})", form="d")
        elif kind in ("f16", "bf16", "f16x2", "bf16x2"):
            _halves(e, ins, f"{single}({{0}})", 1)
        else:
            raise Unsupported(ins.opcode)

    return emit


for _name, _args in {
    "ex2": ("ex2",), "lg2": ("lg2",), "sin": ("fsin",), "cos": ("fcos",), "tanh": ("ftanh",),
    "rcp": ("rcp", "rcp64"), "rsqrt": ("rsqrt", "rsqrt64"), "sqrt": ("np.sqrt", "np.sqrt"),
}.items():  # fmt: skip
    inline(_name)(_unary(*_args))


@inline("copysign")
def _copysign(e: Emitter, ins: Instruction) -> None:
    d, a, b = ins.operands
    if type_of(ins) == "f32":
        e.assign(d, f"copysign({e.f(b)}, {e.f(a)})", form="f")
    else:
        e.assign(d, f"copysign({e.d(b)}, {e.d(a)})", form="d")


@inline("testp")
def _testp(e: Emitter, ins: Instruction) -> None:
    d, a = ins.operands
    x = e.f(a) if type_of(ins) == "f32" else e.d(a)
    tests = {
        "finite": "np.isfinite({})",
        "infinite": "np.isinf({})",
        "number": "{0} == {0}",
        "notanumber": "{0} != {0}",
    }
    if ins.parts[1] not in tests:
        raise Unsupported(ins.opcode)
    e.assign(d, f"truth({tests[ins.parts[1]].format(x)})")


# -- comparison ----------------------------------------------------------------------------------


def _operand_float(e: Emitter, o: Operand | None, kind: str) -> str:
    if kind == "f32":
        return e.f(o)
    if kind == "f64":
        return e.d(o)
    return e.bf16(o) if kind == "bf16" else e.new(f"unpack_half({e.i(o, 16)}, {kind!r})")


_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNORDERED = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}


def _compare(e: Emitter, ins: Instruction) -> str:
    kind, name = [p for p in ins.parts if p in TYPE_BYTES][-1], ins.parts[1]
    if kind.endswith("x2"):
        raise Unsupported(ins.opcode)
    x, y = (_operand_float(e, o, kind) for o in ins.operands[1:3])
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


@inline("set")
def _set(e: Emitter, ins: Instruction) -> None:
    source = type_of(ins)
    target = [p for p in ins.parts if p in TYPE_BYTES][0]
    if any(p in ins.parts for p in ("and", "or", "xor")):
        raise Unsupported(ins.opcode)
    p = e.new(_compare(e, ins) if is_float(source) else scalar.compare_int(e, ins))
    e.assign(ins.operands[0], f"sel(32, {p}, {0x3F800000 if target == 'f32' else 0xFFFFFFFF}, 0)", 32)


# -- conversion ----------------------------------------------------------------------------------


_SMALL = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2")


@inline("cvt")
def _cvt(e: Emitter, ins: Instruction) -> None:
    kinds = [p for p in ins.parts[1:] if p in TYPE_BYTES]
    if len(kinds) != 2 or "scaled" in ins.opcode or "rs" in ins.parts:
        raise Unsupported(ins.opcode)
    target, source = kinds
    d, a = ins.operands[:2]
    if "pack" in ins.parts or len(ins.operands) > 3:
        raise Unsupported(ins.opcode)
    if not is_float(target) and not is_float(source):
        _cvt_integers(e, ins, target, source)
    elif len(ins.operands) == 3:
        _cvt_packed(e, ins, target)
    elif target in ("f16x2", "bf16x2") and source in _SMALL:
        e.assign(d, f"unpack_small({e.i(a, 8 * TYPE_BYTES[source])}, {source!r}, {ins.parts[1:]})", 32)
    elif target in _SMALL:
        pair = e.new(f"unpack2({e.i(a, 32)}, {source!r})")
        e.assign(d, f"pack_small({pair}[1], {pair}[0], {target!r}, {ins.parts[1:]})", 8 * TYPE_BYTES[target])
    elif target == "tf32":
        e.assign(d, f"tf32({e.f(a)}, {next(p for p in ins.parts if p in ('rna', 'rn', 'rz'))!r})", form="f")
    else:
        _cvt_float(e, ins, target, source)


def _cvt_integers(e: Emitter, ins: Instruction, target: str, source: str) -> None:
    width, own, sign = 8 * TYPE_BYTES[source], 8 * TYPE_BYTES[target], source[0] == "s"
    value = e.i(ins.operands[1], width)
    if "sat" in ins.parts:
        expression = f"clamp_int({value}, {width}, {sign}, {own}, {target[0] == 's'})"
    else:
        expression = e.resized(e.new(value), width, own, sign) if own != width else value
    e.assign(ins.operands[0], expression, own, target[0] == "s")


def _cvt_packed(e: Emitter, ins: Instruction, target: str) -> None:
    d, hi, lo = ins.operands
    plain = target == "bf16x2" and "relu" not in ins.parts
    x, y = (e.either(hi), e.either(lo)) if plain else (e.f(hi), e.f(lo))
    if target in ("bf16x2", "f16x2"):
        e.assign(d, f"pack2({x}, {y}, {target!r}, {_rounding(ins)!r}, {'relu' in ins.parts})", 32)
    elif target in _SMALL:
        e.assign(d, f"pack_small({x}, {y}, {target!r}, {ins.parts[1:]})", 8 * TYPE_BYTES[target])
    else:
        raise Unsupported(ins.opcode)


def _cvt_float(e: Emitter, ins: Instruction, target: str, source: str) -> None:
    d, a = ins.operands
    integral = next((p for p in ins.parts if p in ("rni", "rzi", "rmi", "rpi")), None)
    width = 8 * TYPE_BYTES[target]
    if not is_float(source):
        value = (
            f"int_to_float({e.i(a, 8 * TYPE_BYTES[source])}, {8 * TYPE_BYTES[source]}, {source[0] == 's'}, "
        )
        value += f"{target == 'f64'})"
    else:
        value = _operand_float(e, a, source)
    if not is_float(target):
        e.assign(
            d,
            f"float_to_int({value}, {width}, {target[0] == 's'}, {integral or 'rzi'!r})",
            width,
            target[0] == "s",
        )
        return
    if integral is not None:
        value = f"round_integral({value}, {integral!r})"
    if target == "f64":
        e.assign(d, f"f64({value})" if source != "f64" and is_float(source) else value, form="d")
        return
    if source == "f64":
        value = (
            f"directed({value}, {_rounding(ins)!r})" if _rounding(ins) != "rn" else f"({value}).astype(f32)"
        )
    if target == "f32":
        _finish(e, ins, value)
        return
    if "sat" in ins.parts:
        value = f"sat({value})"
    if "relu" in ins.parts:
        value = f"fmax_nan({value}, f32(0))"
    e.assign(d, f"pack_half({value}, {target!r}, {_rounding(ins)!r}, {'satfinite' in ins.parts})", 16)
