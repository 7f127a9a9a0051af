"""Inline Python for conversions (PTX ISA 9.7.9, `cvt`)."""

from __future__ import annotations

from cute_emulator.instructions.emit import Emitter, Unsupported
from cute_emulator.instructions.floats import finish, operand, rounding
from cute_emulator.instructions.registry import inline
from cute_emulator.instructions.scalar import is_float, only
from cute_emulator.ptx.ir import TYPE_BYTES, Instruction

_SMALL = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2")
_INTEGRAL = ("rni", "rzi", "rmi", "rpi")
_ENDS = ("relu", "satfinite")


@inline("cvt")
def _cvt(e: Emitter, ins: Instruction) -> None:
    kinds = [p for p in ins.parts[1:] if p in TYPE_BYTES]
    if len(kinds) != 2 or len(ins.operands) > 3 + ("rs" in ins.parts):
        raise Unsupported(ins.opcode)
    target, source = kinds
    if "rs" in ins.parts:
        _cvt_random(e, ins, target, source)
    elif target in _SMALL or source in _SMALL:
        _cvt_small(e, ins, target, source)
    elif len(ins.operands) == 3:
        _cvt_packed(e, ins, target)
    elif target == "tf32":
        _cvt_tf32(e, ins)
    elif is_float(target):
        _cvt_to_float(e, ins, target, source)
    elif is_float(source):
        _cvt_to_integer(e, ins, target, source)
    else:
        _cvt_integers(e, ins, target, source)


def _cvt_integers(e: Emitter, ins: Instruction, target: str, source: str) -> None:
    only(ins, "sat")
    width, target_width, sign = 8 * TYPE_BYTES[source], 8 * TYPE_BYTES[target], source[0] == "s"
    value = e.i(ins.operands[1], width)
    if "sat" in ins.parts:
        expression = f"clamp_int({value}, {width}, {sign}, {target_width}, {target[0] == 's'})"
    else:
        expression = e.resized(e.new(value), width, target_width, sign) if target_width != width else value
    e.assign(ins.operands[0], expression, target_width, target[0] == "s")


def _cvt_small(e: Emitter, ins: Instruction, target: str, source: str) -> None:
    """Emits conversions between pairs of small formats and pairs of 16 bits, and from two singles."""
    only(ins, *_ENDS, *(("rz", "rp") if target == "ue8m0x2" else ("rn",)))
    d, *sources = ins.operands
    if source in _SMALL:
        if target not in ("f16x2", "bf16x2"):
            raise Unsupported(ins.opcode)
        a = e.i(sources[0], 8 * TYPE_BYTES[source])
        e.assign(d, f"unpack_small({a}, {source!r}, {ins.parts[1:]})", 32)
        return
    if len(sources) == 2:
        hi, lo = (e.f(s) for s in sources)
    else:
        pair = e.new(f"unpack2({e.i(sources[0], 32)}, {source!r})")
        hi, lo = f"{pair}[1]", f"{pair}[0]"
    e.assign(d, f"pack_small({hi}, {lo}, {target!r}, {ins.parts[1:]})", 8 * TYPE_BYTES[target])


def _cvt_packed(e: Emitter, ins: Instruction, target: str) -> None:
    """Emits the conversion of two singles to `f16x2` or `bf16x2`."""
    only(ins, "rn", "rz", *_ENDS)
    if target not in ("bf16x2", "f16x2"):
        raise Unsupported(ins.opcode)
    d, hi, lo = ins.operands
    relu, satfinite = (end in ins.parts for end in _ENDS)
    plain = target == "bf16x2" and not (relu or satfinite)
    x, y = (e.either(hi), e.either(lo)) if plain else (e.f(hi), e.f(lo))
    further = ", True" if satfinite else ""
    e.assign(d, f"pack2({x}, {y}, {target!r}, {rounding(ins, 'rn', 'rz')!r}, {relu}{further})", 32)


def _cvt_random(e: Emitter, ins: Instruction, target: str, source: str) -> None:
    """Emits the conversion of two singles to a pair of 16 bits, rounded by random bits of the program."""
    only(ins, "rs", *_ENDS)
    if target not in ("bf16x2", "f16x2") or source != "f32" or len(ins.operands) != 4:
        raise Unsupported(ins.opcode)
    d, hi, lo, random = ins.operands
    ends = ", ".join(str(end in ins.parts) for end in _ENDS)
    e.assign(d, f"pack2_random({e.f(hi)}, {e.f(lo)}, {e.i(random, 32)}, {target!r}, {ends})", 32)


def _cvt_tf32(e: Emitter, ins: Instruction) -> None:
    only(ins, "rna", "rn", "rz", *_ENDS)
    d, a = ins.operands
    mode = next((p for p in ("rna", "rn", "rz") if p in ins.parts), None)
    if mode is None:
        raise Unsupported(ins.opcode)
    relu, satfinite = (end in ins.parts for end in _ENDS)
    e.assign(d, f"tf32({e.f(a)}, {mode!r}, {relu}, {satfinite})", form="f")


def _cvt_to_integer(e: Emitter, ins: Instruction, target: str, source: str) -> None:
    only(ins, "ftz", "sat", *_INTEGRAL)
    d, a = ins.operands
    mode = next((p for p in ins.parts if p in _INTEGRAL), "rzi")
    width, sign = 8 * TYPE_BYTES[target], target[0] == "s"
    e.assign(d, f"float_to_int({_source(e, ins, source)}, {width}, {sign}, {mode!r})", width, sign)


def _source(e: Emitter, ins: Instruction, source: str) -> str:
    """Returns a float operand; `.ftz` flushes operands of single precision only, and results."""
    a = ins.operands[1]
    if source in ("f16", "bf16") and "ftz" in ins.parts:
        return e.new(f"unpack_half({e.i(a, 16)}, {source!r})")
    return operand(e, ins, a, source)


def _cvt_to_float(e: Emitter, ins: Instruction, target: str, source: str) -> None:
    halves = target in ("f16", "bf16")
    only(ins, "rn", "rz", "rm", "rp", "ftz", "sat", *_INTEGRAL, *(_ENDS if halves else ()))
    mode = rounding(ins, "rn", "rz") if halves else rounding(ins, "rn", "rz", "rm", "rp")
    integral = next((p for p in ins.parts if p in _INTEGRAL), None)
    if is_float(source):
        value = _source(e, ins, source)
        if integral is not None:
            value = f"round_integral({value}, {integral!r})"
        wide = source == "f64"
    else:
        bits = 8 * TYPE_BYTES[source]
        value = f"{e.i(ins.operands[1], bits)}, {bits}, {source[0] == 's'}"
        wide = halves or mode != "rn" and target == "f32"
        if target == "f64" and mode != "rn" and bits == 64:
            raise Unsupported(ins.opcode)
        value = f"int_to_odd({value})" if wide else f"int_to_float({value}, {target == 'f64'})"
    if target == "f64":
        _to_double(e, ins, value, source)
    elif target == "f32":
        if wide:
            value = f"({value}).astype(f32)" if mode == "rn" else f"directed({value}, {mode!r})"
        finish(e, ins, value)
    else:
        _to_half(e, ins, f"to_odd32({value})" if wide else value, mode)


def _to_double(e: Emitter, ins: Instruction, value: str, source: str) -> None:
    if "sat" in ins.parts:
        raise Unsupported(ins.opcode)
    e.assign(ins.operands[0], f"f64({value})" if is_float(source) and source != "f64" else value, form="d")


def _to_half(e: Emitter, ins: Instruction, value: str, mode: str) -> None:
    target = next(p for p in ins.parts if p in TYPE_BYTES)
    if "sat" in ins.parts:
        value = f"sat({value})"
    if "relu" in ins.parts:
        value = f"fmax_nan({value}, f32(0))"
    e.assign(ins.operands[0], f"pack_half({value}, {target!r}, {mode!r}, {'satfinite' in ins.parts})", 16)
