"""Inline Python for integers, predicates and data movement (PTX ISA 9.7.1, 9.7.2, 9.7.6, 9.7.8, 9.7.9).

Each function here emits one instruction into an `Emitter`. Integer expressions such as `(a + b) & M` apply to
ints and arrays; a signed comparison flips the sign bits of both operands.
"""

from __future__ import annotations

from cute_emulator.instructions.emit import Emitter, Unsupported, width_of
from cute_emulator.instructions.registry import Emit, inline
from cute_emulator.numbers.lanes import LANE_BITS, MASK
from cute_emulator.ptx.ir import TYPE_BYTES, Imm, Instruction, Pair, Reg, Special, Sym, Vec


def type_of(ins: Instruction) -> str:
    """Returns the last type in an opcode, which is the instruction's type."""
    for part in reversed(ins.parts):
        if part in TYPE_BYTES:
            return part
    raise Unsupported(ins.opcode)


def is_float(kind: str) -> bool:
    """Returns whether `floats` implements the arithmetic of a type."""
    return kind.startswith(("f", "bf", "e", "ue8m0")) or kind == "tf32"


def _integer(ins: Instruction) -> tuple[int, bool]:
    kind = type_of(ins)
    if is_float(kind) or kind in ("pred", "b128") or kind.endswith("x2"):
        raise Unsupported(ins.opcode)
    if kind[0] != "b" and any(isinstance(o, Imm) and o.kind != "int" for o in ins.operands):
        raise Unsupported(f"a float literal of type .{kind}")
    return 8 * TYPE_BYTES[kind], kind[0] == "s"


def only(ins: Instruction, *allowed: str) -> None:
    """Raises `Unsupported` for modifiers that the emitter does not model."""
    unknown = [p for p in ins.parts[1:] if p not in TYPE_BYTES and p not in allowed]
    if unknown:
        raise Unsupported(f"modifier .{unknown[0]}")


def _binary(expression: str, wraps: bool = False) -> Emit:
    def emit(e: Emitter, ins: Instruction) -> None:
        only(ins)
        width, sign = _integer(ins)
        d, a, b = ins.operands
        value = expression.format(a=e.i(a, width), b=e.i(b, width), w=width, s=sign)
        e.assign(d, e.wrapped(value, width) if wraps else value, width, sign)

    return emit


add_int = _binary("{a} + {b}", wraps=True)
sub_int = _binary("{a} - {b}", wraps=True)


def _extreme(largest: bool) -> Emit:
    def emit(e: Emitter, ins: Instruction) -> None:
        only(ins, "relu")
        width, sign = _integer(ins)
        d, a, b = ins.operands
        value = f"extreme({e.i(a, width)}, {e.i(b, width)}, {width}, {sign}, {largest})"
        if "relu" in ins.parts:
            value = f"extreme({e.new(value)}, 0, {width}, True, True)"
        e.assign(d, value, width, sign)

    return emit


min_int, max_int = _extreme(False), _extreme(True)
div_int = _binary("divide({a}, {b}, {w}, {s}, False)")
inline("rem")(_binary("divide({a}, {b}, {w}, {s}, True)"))


def _bitwise(symbol: str) -> Emit:
    def emit(e: Emitter, ins: Instruction) -> None:
        only(ins)
        d, a, b = ins.operands
        if type_of(ins) == "pred":
            e.assign(d, f"{e.p(a)} {symbol} {e.p(b)}")
        else:
            width, _ = _integer(ins)
            e.assign(d, f"{e.i(a, width)} {symbol} {e.i(b, width)}", width)

    return emit


inline("and")(_bitwise("&"))
inline("or")(_bitwise("|"))
inline("xor")(_bitwise("^"))


@inline("not")
def _not(e: Emitter, ins: Instruction) -> None:
    only(ins)
    d, a = ins.operands
    if type_of(ins) == "pred":
        value = e.p(a)
        opposite = e.new(f"{value} ^ True")
        e.opposites[opposite] = value
        e.assign(d, opposite)
    else:
        width, _ = _integer(ins)
        e.assign(d, f"{e.i(a, width)} ^ {MASK[width]}", width)


@inline("cnot")
def _cnot(e: Emitter, ins: Instruction) -> None:
    only(ins)
    width, _ = _integer(ins)
    e.assign(ins.operands[0], f"sel({width}, {e.i(ins.operands[1], width)} == 0, 1, 0)", width)


def neg_int(e: Emitter, ins: Instruction) -> None:
    """Emits `neg.sN`."""
    only(ins)
    width, _ = _integer(ins)
    e.assign(ins.operands[0], e.wrapped(f"0 - {e.i(ins.operands[1], width)}", width), width)


def abs_int(e: Emitter, ins: Instruction) -> None:
    """Emits `abs.sN`."""
    only(ins)
    width, _ = _integer(ins)
    e.assign(ins.operands[0], f"absolute({e.i(ins.operands[1], width)}, {width})", width)


def mul_int(e: Emitter, ins: Instruction) -> None:
    """Emits `mul.{lo,hi,wide}`."""
    only(ins, "lo", "hi", "wide")
    width, sign = _integer(ins)
    d, a, b = ins.operands
    x, y = e.i(a, width), e.i(b, width)
    if "wide" in ins.parts:
        e.assign(d, f"mul_wide({x}, {y}, {width}, {sign})", 2 * width)
    elif "hi" in ins.parts:
        e.assign(d, f"mul_hi({x}, {y}, {width}, {sign})", width)
    else:
        e.assign(d, e.wrapped(f"{x} * {y}", width), width, sign)


@inline("mul24")
def _mul24(e: Emitter, ins: Instruction) -> None:
    only(ins, "lo")
    (d, a, b), (_, sign) = ins.operands, _integer(ins)
    x, y = (e.new(f"shr(shl({e.i(o, 32)}, 8, 32), 8, 32, {sign})") for o in (a, b))
    e.assign(d, e.wrapped(f"{x} * {y}", 32), 32)


def mad_int(e: Emitter, ins: Instruction) -> None:
    """Emits an integer `mad` of the low or high half of the product, or of the full product."""
    only(ins, "lo", "hi", "wide")
    width, sign = _integer(ins)
    d, a, b, c = ins.operands
    x, y = e.i(a, width), e.i(b, width)
    if "wide" in ins.parts:
        wide = 2 * width
        e.assign(d, e.wrapped(f"mul_wide({x}, {y}, {width}, {sign}) + {e.i(c, wide)}", wide), wide)
    elif "hi" in ins.parts:
        e.assign(d, e.wrapped(f"mul_hi({x}, {y}, {width}, {sign}) + {e.i(c, width)}", width), width)
    else:
        # The product alone first: of two uniform values it may have 64 bits, which no lanes' value can add.
        product = e.new(e.wrapped(f"{x} * {y}", width))
        e.assign(d, e.wrapped(f"{product} + {e.i(c, width)}", width), width)


@inline("sad")
def _sad(e: Emitter, ins: Instruction) -> None:
    only(ins)
    (width, sign), (d, a, b, c) = _integer(ins), ins.operands
    x, y = e.i(a, width), e.i(b, width)
    low, high = (e.new(f"extreme({x}, {y}, {width}, {sign}, {big})") for big in (False, True))
    between = e.new(e.wrapped(f"{high} - {low}", width))
    e.assign(d, f"({between} + {e.i(c, width)}) & {MASK[width]}", width)


@inline("shl")
def _shl(e: Emitter, ins: Instruction) -> None:
    only(ins)
    width, _ = _integer(ins)
    d, a, n = ins.operands
    if isinstance(n, Imm) and 0 <= n.value < width:
        e.assign(d, e.wrapped(f"{e.i(a, width)} << {n.value}", width), width)
    else:
        e.assign(d, f"shl({e.i(a, width)}, {e.i(n, 32)}, {width})", width)


@inline("shr")
def _shr(e: Emitter, ins: Instruction) -> None:
    only(ins)
    width, sign = _integer(ins)
    d, a, n = ins.operands
    if isinstance(n, Imm) and (LANE_BITS if sign else 0) <= n.value < width:
        value = e.i(a, width)
        value = e.new(f"shr({value}, {n.value}, {width}, True)" if sign else f"{value} >> {n.value}")
        if n.value >= LANE_BITS:
            value = e.new(f"{value} if {value}.__class__ is int else uniform({value})")
        e.assign(d, value, width, sign)
    else:
        e.assign(d, f"shr({e.i(a, width)}, {e.i(n, 32)}, {width}, {sign})", width, sign)


@inline("shf")
def _shf(e: Emitter, ins: Instruction) -> None:
    only(ins, "l", "r", "clamp", "wrap")
    d, a, b, n = ins.operands
    amount = e.i(n, 32)
    amount = e.new(f"{amount} & 31" if "wrap" in ins.parts else f"extreme({amount}, 32, 32, False, False)")
    wide = e.new(f"pair64({e.i(a, 32)}, {e.i(b, 32)})")
    if "l" in ins.parts:
        e.assign(d, f"high32(shl({wide}, {amount}, 64))", 32)
    else:
        e.assign(d, f"low32(shr({wide}, {amount}, 64, False))", 32)


# -- comparison and selection --------------------------------------------------------------------

_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
            "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip


def compare_int(e: Emitter, ins: Instruction) -> str:
    """Returns the comparison of `setp`/`set` on integers."""
    only(ins, *_COMPARE, "and", "or", "xor")
    width, sign = _integer(ins)
    a, b = ins.operands[1:3]
    if (name := ins.parts[1]) not in _COMPARE:
        raise Unsupported(ins.opcode)
    x, y = e.i(a, width), e.i(b, width)
    if sign and name not in ("eq", "ne"):
        flip = 1 << (width - 1)
        x = f"({x} ^ {flip})"
        y = str(int(y) ^ flip) if y.isdigit() else f"({y} ^ {flip})"
    return f"{x} {_COMPARE[name]} {y}"


def set_predicates(e: Emitter, ins: Instruction, result: str) -> None:
    """Stores a comparison, combined with a further predicate if the opcode has one."""
    value = e.new(result)
    d = ins.operands[0]
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    negated = e.new(f"{value} ^ True") if second is not None else ""
    combine = next((s for n, s in (("and", "&"), ("or", "|"), ("xor", "^")) if n in ins.parts), None)
    if combine is not None:
        other = e.p(ins.operands[3])
        value = e.new(f"{value} {combine} {other}")
        negated = e.new(f"{negated} {combine} {other}") if negated else ""
    e.assign(first, value)
    if second is not None:
        e.assign(second, negated)


def setp_int(e: Emitter, ins: Instruction) -> None:
    """Emits `setp` on integers."""
    set_predicates(e, ins, compare_int(e, ins))


@inline("selp")
def _selp(e: Emitter, ins: Instruction) -> None:
    only(ins)
    d, a, b, p = ins.operands
    width = 8 * TYPE_BYTES[type_of(ins)]
    x, y, c = e.i(a, width), e.i(b, width), e.p(p)
    e.assign(d, f"({x} if {c} else {y}) if {c}.__class__ is bool else sel({width}, {c}, {x}, {y})", width)


@inline("slct")
def _slct(e: Emitter, ins: Instruction) -> None:
    only(ins, "ftz")
    d, a, b, c = ins.operands
    kind = ins.parts[-1]
    width = 8 * TYPE_BYTES[ins.parts[-2]]
    number = (f"ftz({e.f(c)})" if "ftz" in ins.parts else e.f(c)) if kind == "f32" else ""
    p = e.new(f"truth({number} >= 0)" if number else f"{e.i(c, 32)} < {1 << 31}")
    x, y = e.i(a, width), e.i(b, width)
    e.assign(d, f"({x} if {p} else {y}) if {p}.__class__ is bool else sel({width}, {p}, {x}, {y})", width)


# -- movement ------------------------------------------------------------------------------------


@inline("mov")
def _mov(e: Emitter, ins: Instruction) -> None:
    only(ins)
    d, a = ins.operands
    kind = type_of(ins)
    if kind == "pred":
        e.assign(d, e.p(a))
    elif isinstance(d, Vec):
        _unpack(e, d, a, kind)
    elif isinstance(a, Vec):
        _pack(e, d, a, kind)
    elif isinstance(a, Special):
        e.assign(d, e.i(a), 64 if kind.endswith("64") else 32)
    elif isinstance(a, Sym):
        e.assign(d, e.i(a), 8 * TYPE_BYTES[kind])
    elif isinstance(d, Reg) and isinstance(a, Reg) and e.guard is None and width_of(d) == width_of(a):
        e.i(a) if e.base + a.slot not in e.forms else None
        e._store(d, dict(e.forms[e.base + a.slot]))
    else:
        width = 8 * TYPE_BYTES[kind]
        e.assign(d, e.i(a, width) if width <= 64 else e.i(a), width if width <= 64 else 0)


def _pack(e: Emitter, d: object, a: Vec, kind: str) -> None:
    assert isinstance(d, Reg)
    width, count = 8 * TYPE_BYTES[kind], len(a.items)
    if any(x is None for x in a.items):
        raise Unsupported("sink in a packed source")
    if width == 64 and count == 2:
        lo, hi = a.items
        assert lo is not None and hi is not None
        e.set_pair(d, e.half(lo), e.half(hi))
    elif width == 128:
        e.assign(d, e.i(a))
    else:
        part = width // count
        parts = "".join(f"{e.i(x, part)}, " for x in a.items)
        e.assign(d, f"join(({parts}), {part}, {width})", width)


def _unpack(e: Emitter, d: Vec, a: object, kind: str) -> None:
    width, count = 8 * TYPE_BYTES[kind], len(d.items)
    part = width // count
    if width == 64 and count == 2:
        halves = e.pair(a)  # type: ignore[arg-type]
        for dst, forms in zip(d.items, halves, strict=True):
            e.set_half(dst, dict(forms))
        return
    value = e.i(a)  # type: ignore[arg-type]
    parts = value if width == 128 else e.new(f"split({value}, {part}, {count})")
    for n, dst in enumerate(d.items):
        if width == 32 and count == 2 and dst is not None:
            half = e.new(f"{parts}[{n}]")
            e.halves[half] = value, n
            e.assign(dst, half, part)
        else:
            e.assign(dst, f"{parts}[{n}]", part)


_WINDOWS = {"shared": 1, "param": 2, "local": 4, "const": 8, "global": 0}  # top bytes of generic addresses


@inline("cvta")
def _cvta(e: Emitter, ins: Instruction) -> None:
    d, a = ins.operands
    base = next((_WINDOWS[s] << 56 for p in ins.parts if (s := p.split("::")[0]) in _WINDOWS), 0)
    value = e.i(a, 64)
    if base and "to" in ins.parts:
        e.assign(d, f"{value} & {MASK[32]}", 64)
    elif base:  # an address of parameters or constants has these bits, unless a 32-bit register held it
        e.assign(d, f"{value} | {base}", 64)
    else:
        e.assign(d, value, 64)


@inline("isspacep")
def _isspacep(e: Emitter, ins: Instruction) -> None:
    d, a = ins.operands
    value = e.new(f"({e.i(a, 64)} >> 56) == {_WINDOWS[ins.parts[1].split('::')[0]]}")
    if ins.parts[1] in ("shared", "shared::cta"):
        value = e.new(f"{value} & ((({e.i(a, 64)} >> 24) & 255) == g.warp.cta.rank_in_cluster)")
    e.assign(d, value)


@inline("mapa")
def _mapa(e: Emitter, ins: Instruction) -> None:
    d, a, rank = ins.operands
    width, _ = _integer(ins)
    keep = MASK[width] & ~0xFF000000
    target = e.new(f"resize({e.i(rank, 32)}, 32, {width}) << 24")
    e.assign(d, f"({e.i(a, width)} & {keep}) | {target}", width)


@inline("getctarank")
def _getctarank(e: Emitter, ins: Instruction) -> None:
    d, a = ins.operands
    width, _ = _integer(ins)
    e.assign(d, f"({e.i(a, width)} >> 24) & 255", width)


# -- bits ----------------------------------------------------------------------------------------


def _function(name: str, arguments: int, *, result: int = 0) -> Emit:
    def emit(e: Emitter, ins: Instruction) -> None:
        only(ins)
        width, sign = _integer(ins)
        d, *rest = ins.operands
        if len(rest) != arguments:
            raise Unsupported(f"{ins.opcode} of {len(rest)} operands")
        values = [e.i(rest[0], width)]
        values += [e.i(o, width if name == "bfi" and n == 0 else 32) for n, o in enumerate(rest[1:arguments])]
        e.assign(d, f"{name}({', '.join(values)}, {width}, {sign})", result or width, sign and not result)

    return emit


inline("popc")(_function("popc", 1, result=32))
inline("clz")(_function("clz", 1, result=32))
inline("brev")(_function("brev", 1))
inline("bfe")(_function("bfe", 3))
inline("bfi")(_function("bfi", 4))


@inline("bfind")
def _bfind(e: Emitter, ins: Instruction) -> None:
    only(ins, "shiftamt")
    width, sign = _integer(ins)
    shift = "shiftamt" in ins.parts
    e.assign(ins.operands[0], f"bfind({e.i(ins.operands[1], width)}, {width}, {sign}, {shift})", 32)


@inline("prmt")
def _prmt(e: Emitter, ins: Instruction) -> None:
    mode = next((p for p in ins.parts if p in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")), None)
    if mode is not None:
        raise Unsupported(f"prmt.{mode}")
    d, a, b, c = ins.operands
    e.assign(d, f"prmt({e.i(a, 32)}, {e.i(b, 32)}, {e.i(c, 32)})", 32)


@inline("lop3")
def _lop3(e: Emitter, ins: Instruction) -> None:
    only(ins)
    d, a, b, c, table = ins.operands
    if not isinstance(table, Imm):
        raise Unsupported("a table that is no literal")
    x, y, z, t = e.i(a, 32), e.i(b, 32), e.i(c, 32), table.value
    terms = []
    for n in range(8):
        if t >> n & 1:
            factors = [v if n >> (2 - k) & 1 else f"({v} ^ {MASK[32]})" for k, v in enumerate((x, y, z))]
            terms.append("(" + " & ".join(factors) + ")")
    e.assign(d, " | ".join(terms) or "0", 32)


@inline("dp4a", "dp2a")
def _dot(e: Emitter, ins: Instruction) -> None:
    name, *mode, left, right = ins.parts
    d, *sources = ins.operands
    a, b, c = (e.i(o, 32) for o in sources)
    e.assign(d, f"{name}({a}, {b}, {c}, {left == 's32'}, {right == 's32'}, {'hi' in mode})", 32)


@inline("fns", "szext", "bmsk", "addc", "subc", "madc")
def _missing(e: Emitter, ins: Instruction) -> None:
    raise Unsupported(ins.opcode)
