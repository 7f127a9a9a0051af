"""PTX text to frozen records (PTX ISA, "Syntax" and "Abstracting the ABI").

Nothing is interpreted here: opcodes stay text, so that a module with unknown instructions still parses.
Registers and labels are resolved to their scope (inline assembly repeats names inside `{ }` blocks).
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from dataclasses import replace

from cute_emulator.ptx.ir import (
    TYPE_BYTES,
    Args,
    Function,
    Imm,
    Instruction,
    Mem,
    Module,
    Not,
    Operand,
    Pair,
    Reg,
    Special,
    Sym,
    Variable,
    Vec,
)
from cute_emulator.source import INLINE


class PtxSyntaxError(ValueError):
    """Error for text that this parser cannot read; the message contains the line."""


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", re.S)
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_OPCODE = re.compile(r"[A-Za-z_][\w.:]*")
_GUARD = re.compile(r"@\s*(!?)\s*([\w$%]+)\s*")
_INT = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_FLOAT = re.compile(r"[+-]?(\d+\.\d*([eE][+-]?\d+)?|\d+[eE][+-]?\d+)$")
_BITS = re.compile(r"([+-]?)0([fF][0-9a-fA-F]{8}|[dD][0-9a-fA-F]{16})$")
_REG_RANGE = re.compile(r"([\w$%]+)<(\d+)>$")
_BRACKETS = re.compile(r"[\[{(]")
_NUMBERED = re.compile(r"(.*?)(\d+)$")
_VARIABLE = re.compile(
    r"(?:\.ptr\s*)?(?:\.(?:global|shared|const|local)\s*)?(?:\.align\s+(\d+)\s*)?"
    r"\.(\w+)\s+(?:\.ptr\s*)?(?:\.(?:global|shared|const|local)\s*)?(?:\.align\s+\d+\s*)?([\w$%]+)\s*((?:\[[^\]]*\]\s*)*)$"
)
_LISTS = ("mma", "wgmma", "tcgen05", "ldmatrix", "stmatrix")
"""First parts of opcodes whose braces list registers: `{%r1}` is a list of one."""
_DIRECTIVE_LINE = re.compile(r"\.(loc|file)\b[^\n]*")


def _split(text: str) -> list[str]:
    """Splits at commas that are not inside brackets."""
    if not _BRACKETS.search(text):
        parts = [part.strip() for part in text.split(",")]
        return parts if parts[-1] else parts[:-1]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def _literal(text: str) -> Imm | None:
    """Returns a literal (PTX ISA 4.5), or `None` if the text is not a literal."""
    if m := _INT.match(text):
        digits = m[2]
        octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
        value = int(digits, 8 if octal else 0)
        return Imm(-value if m[1] == "-" else value)
    if m := _BITS.match(text):
        kind, width = ("f32", 32) if m[2][0] in "fF" else ("f64", 64)
        return Imm(int(m[2][1:], 16) ^ ((m[1] == "-") << width - 1), kind)
    if _FLOAT.match(text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], "f64")
    return None


def _float_bits(literal: Imm, width: int) -> int:
    """Returns the pattern of a float literal in `width` bytes."""
    source, target = ("<f" if size == 4 else "<d" for size in (4 if literal.kind == "f32" else 8, width))
    if source == target:
        return literal.value
    (number,) = struct.unpack(source, literal.value.to_bytes(struct.calcsize(source), "little"))
    return int.from_bytes(struct.pack(target, number), "little")


def _element_of_one(operand: Operand | None) -> Operand | None:
    return operand.items[0] if isinstance(operand, Vec) and len(operand.items) == 1 else operand


def _blank(match: re.Match[str]) -> str:
    text = match.group()
    return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)


def _blank_save_marks(match: re.Match[str]) -> str:
    return match.group() if match.group().endswith(INLINE) else _blank(match)


class _Scope:
    """Names visible inside one `{ }`."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, str] = {}
        self.vectors: dict[str, int] = {}
        self.ranges: dict[str, tuple[int, str]] = {}
        self.slots: dict[str, Reg] = {}
        self.labels: dict[str, str] = {}

    def vector(self, name: str) -> int | None:
        """Returns the number of elements of a vector register, or `None` for any other name."""
        if name in self.vectors:
            return self.vectors[name]
        return self.parent.vector(name) if self.parent is not None else None


class _FunctionParser:
    def __init__(self, outer: _ModuleParser) -> None:
        self.outer = outer
        self.scope = _Scope(None)
        self.nslots = 0
        self.raw: list[tuple[_Scope, int, str]] = []
        self.labels: dict[str, int] = {}
        self.targets: list[tuple[_Scope, str, str]] = []
        self.variables: list[Variable] = []

    def body(self, pos: int) -> int:
        """Reads `{ ... }` from `pos`; returns the position after it."""
        text, depth, base = self.outer.text, 1, self.scope
        pos += 1
        while depth:
            while text[pos].isspace():
                pos += 1
            c = text[pos]
            if c == "{":
                depth += 1
                self.scope = _Scope(self.scope)
                pos += 1
            elif c == "}":
                depth -= 1
                self.scope = self.scope.parent or base
                pos += 1
            elif c == ";":
                pos += 1
            elif m := _DIRECTIVE_LINE.match(text, pos):
                pos = m.end()
            elif m := _LABEL.match(text, pos):
                name, pos = m.group(1), m.end()
                rest = text[pos:].lstrip()
                if rest.startswith(".callprototype"):
                    pos = text.index(";", pos) + 1
                elif rest.startswith(".branchtargets"):
                    end = text.index(";", pos)
                    unique = f"{name}@{len(self.targets)}"
                    self.scope.labels[name] = unique
                    self.targets.append((self.scope, unique, text[pos:end].split(".branchtargets", 1)[1]))
                    pos = end + 1
                else:
                    unique = f"{name}@{len(self.labels)}" if self.scope is not base else name
                    self.scope.labels[name] = unique
                    self.labels[unique] = len(self.raw)
            else:
                end = text.index(";", pos)
                self.statement(text[pos:end].strip(), pos)
                pos = end + 1
        return pos

    def statement(self, stmt: str, pos: int) -> None:
        if stmt.startswith(".reg"):
            _, kind, names = stmt.split(None, 2)
            parts = int(kind[2:]) if kind in (".v2", ".v4") else 0
            if parts:
                kind, names = names.split(None, 1)
            for name in _split(names):
                if parts:
                    self.scope.vectors[name] = parts
                    self.scope.registers |= dict.fromkeys([f"{name}.{p}" for p in "xyzw"[:parts]], kind[1:])
                elif m := _REG_RANGE.match(name):
                    self.scope.ranges[m.group(1)] = (int(m.group(2)), kind[1:])
                else:
                    self.scope.registers[name] = kind[1:]
        elif stmt.startswith((".local", ".shared", ".param", ".const", ".global")):
            variable = self.outer.variable(stmt, pos)
            # Functions and scopes repeat names; each call declares its parameters anew, of other types.
            unique = f"{variable.name}@{pos}"
            self.scope.labels[variable.name] = unique
            self.variables.append(replace(variable, name=unique))
        elif stmt.startswith(".pragma"):
            pass
        elif stmt.startswith("."):
            raise self.outer.error(pos, f"unknown directive {stmt!r}")
        else:
            self.raw.append((self.scope, pos, stmt))

    def register(self, scope: _Scope, name: str) -> Reg | None:
        s: _Scope | None = scope
        while s is not None:
            if name in s.slots:
                return s.slots[name]
            kind = s.registers.get(name)
            if kind is None and (m := _NUMBERED.match(name)) and m.group(1) in s.ranges:
                count, ranged = s.ranges[m.group(1)]
                kind = ranged if int(m.group(2)) < count else None
            if kind is not None:
                reg = s.slots[name] = Reg(name, self.nslots, kind)
                self.nslots += 1
                return reg
            s = s.parent
        return None

    def operand(self, scope: _Scope, text: str, line: int) -> Operand | None:
        text = text.strip()
        if text == "_":
            return None
        if text[0] == "{":
            return Vec(tuple(self.operand(scope, t, line) for t in _split(text[1:-1])))
        if text[0] == "(":
            return Args(
                tuple(o for t in _split(text[1:-1]) if (o := self.operand(scope, t, line)) is not None)
            )
        if text[0] == "[":
            first, *extra = _split(text[1:-1])
            offset = 0
            m = re.match(r"(.*\S)\s*([+-])\s*(-?\w+)$", first)
            if m and (number := _literal(m[3])) is not None and number.kind == "int":
                first, offset = m[1], -number.value if m[2] == "-" else number.value
            base = self.operand(scope, first.rstrip("+ "), line)
            assert base is not None
            return Mem(base, offset, self.present(scope, extra, line))
        if text[0] == "!":
            inner = self.operand(scope, text[1:], line)
            assert inner is not None
            return Not(inner)
        if "|" in text:
            a, b = text.split("|")
            return Pair(self.operand(scope, a, line), self.operand(scope, b, line))
        if (reg := self.register(scope, text)) is not None:
            return reg
        if (parts := scope.vector(text)) is not None:
            return Vec(tuple(self.register(scope, f"{text}.{p}") for p in "xyzw"[:parts]))
        if (literal := _literal(text)) is not None:
            return literal
        if text[0] == "%" or text == "WARP_SZ":
            return Special(text)
        m = re.match(r"([A-Za-z_$][\w$]*)\s*\+\s*(\w+)$", text)
        if m and (number := _literal(m[2])) is not None and number.kind == "int":
            return Sym(self.label(scope, m[1]), number.value)
        if re.match(r"(?!\d)[\w$.]+$", text):
            return Sym(self.label(scope, text))
        raise PtxSyntaxError(f"line {line}: cannot read operand {text!r}")

    def present(self, scope: _Scope, texts: list[str], line: int) -> tuple[Operand, ...]:
        return tuple(o for t in texts if (o := self.operand(scope, t, line)) is not None)

    def label(self, scope: _Scope, name: str) -> str:
        s: _Scope | None = scope
        while s is not None:
            if name in s.labels:
                return s.labels[name]
            s = s.parent
        return name

    def instructions(self) -> tuple[Instruction, ...]:
        out = []
        for scope, pos, stmt in self.raw:
            line, guard, negated, rest = self.outer.line(pos), None, False, stmt
            if m := _GUARD.match(rest):
                guard, negated, rest = self.register(scope, m.group(2)), m.group(1) == "!", rest[m.end() :]
                if guard is None:
                    raise PtxSyntaxError(f"line {line}: unknown guard predicate in {stmt!r}")
            m = _OPCODE.match(rest)
            if m is None:
                raise PtxSyntaxError(f"line {line}: not an instruction: {stmt!r}")
            operands = tuple(self.operand(scope, t, line) for t in _split(rest[m.end() :].strip()))
            if not m.group().startswith(_LISTS):  # elsewhere a vector of one is its element, as for ptxas
                operands = tuple(map(_element_of_one, operands))
            out.append(Instruction(m.group(), operands, guard, negated, line, " ".join(stmt.split())))
        return tuple(out)

    def branch_targets(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(self.label(scope, t) for t in _split(targets))
            for scope, name, targets in self.targets
        }


class _ModuleParser:
    def __init__(self, text: str) -> None:
        self.text, self.original = _COMMENT.sub(_blank, text), text
        self.newlines = [m.start() for m in re.finditer("\n", text)]

    def line(self, pos: int) -> int:
        return bisect_right(self.newlines, pos - 1) + 1

    def error(self, pos: int, what: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"line {self.line(pos)}: {what}")

    def variable(self, stmt: str, pos: int, space: str = "") -> Variable:
        """Reads one variable declaration, with its initialiser if it has one."""
        head, _, init = stmt.partition("=")
        extern = ".extern" in head
        head = re.sub(r"\.(visible|extern|weak|common|attribute\([^)]*\))\s*", "", head).strip()
        if not space:
            m = re.match(r"\.(local|shared|param|const|global)\b\s*", head)
            if m is None:
                raise self.error(pos, f"cannot read declaration {stmt!r}")
            space, head = m.group(1), head[m.end() :]
        m = _VARIABLE.match(head.strip())
        if m is None:
            raise self.error(pos, f"cannot read declaration {stmt!r}")
        align, kind, name, dims = m.groups()
        size = TYPE_BYTES.get(kind)
        if size is None:
            raise self.error(pos, f"unknown type .{kind}")
        width, empty = size, False
        for dim in re.findall(r"\[([^\]]*)\]", dims):
            empty |= not dim.strip()
            size *= int(dim, 0) if dim.strip() else 0
        data, refs = self.initialiser(init.strip(), kind, pos)
        if len(data) > size and not empty or "{" in init.strip()[1:] and len(data) < size:
            raise self.error(pos, f"an initialiser of {len(data) // width} elements: {stmt!r}")
        return Variable(
            name, space, kind, int(align or width), len(data) if empty and data else size, data, extern, refs
        )

    def initialiser(self, init: str, kind: str, pos: int) -> tuple[bytes, tuple[tuple[int, str], ...]]:
        data, refs, width = bytearray(), [], TYPE_BYTES[kind]
        for item in _split(init.replace("{", "").replace("}", "")):
            literal = _literal(item)
            if literal is not None and literal.kind == "int" and (kind[0] in "bsu" or not literal.value):
                value = literal.value
            elif literal is not None and literal.kind != "int" and kind in ("f32", "f64", "b32", "b64"):
                value = _float_bits(literal, width)
            elif literal is None and re.match(r"(generic\()?[A-Za-z_$][\w$]*\)?$", item):
                refs.append((len(data), item.removeprefix("generic(").rstrip(")")))
                value = 0
            else:
                raise self.error(pos, f"cannot read initialiser {item!r}")
            data += (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        return bytes(data), tuple(refs)

    def params(self, text: str, pos: int) -> tuple[Variable, ...]:
        return tuple(self.variable(p.strip()[len(".param") :], pos, "param") for p in _split(text))

    def module(self) -> Module:
        text, pos = self.text, 0
        target, functions, variables, declared = "", {}, {}, set()
        while True:
            m = re.compile(r"\s*").match(text, pos)
            pos = m.end() if m else pos
            if pos >= len(text):
                break
            if m := re.compile(r"\.(version|address_size|target)\s+([^\n]*)").match(text, pos):
                target = m.group(2).split(",")[0].strip() if m.group(1) == "target" else target
                pos = m.end()
            elif m := _DIRECTIVE_LINE.match(text, pos):
                pos = m.end()
            elif text.startswith(".section", pos):
                pos = text.index("}", pos) + 1
            elif m := re.compile(r"(?:\.(?:visible|extern|weak)\s+)*\.(entry|func)\b").match(text, pos):
                function, pos = self.function(m.group(1) == "entry", m.start(), m.end())
                if function is None:
                    continue
                if function.instructions:
                    functions[function.name] = function
                else:
                    declared.add(function.name)
            else:
                end = text.index(";", pos)
                if not text.startswith(".pragma", pos):
                    v = self.variable(text[pos:end].strip(), pos)
                    variables[v.name] = v
                pos = end + 1
        shown = _COMMENT.sub(_blank_save_marks, self.original)
        return Module(target, functions, variables, frozenset(declared), shown, self.original)

    def function(self, is_entry: bool, start: int, pos: int) -> tuple[Function | None, int]:
        text = self.text
        body, semi = text.find("{", pos), text.find(";", pos)
        declaration = body < 0 or (0 <= semi < body)
        end = semi if declaration else body
        head = text[pos:end]
        m = re.match(r"\s*(\(([^)]*)\))?\s*([\w$]+)\s*(\(([^)]*)\))?", head)
        if m is None:
            raise self.error(pos, "cannot read function header")
        returns, params = self.params(m.group(2) or "", pos), self.params(m.group(5) or "", pos)
        directives = {
            d: tuple(int(x) for x in re.findall(r"\d+", v))
            for d, v in re.findall(
                r"\.(reqntid|maxntid|reqnctapercluster|minnctapersm|maxnreg)\b([^.]*)", head
            )
        }
        parser, line = _FunctionParser(self), self.line(start)
        if declaration:
            empty = Function(m.group(3), is_entry, params, returns, (), {}, {}, (), 0, directives, line)
            return empty, end + 1
        pos = parser.body(body)
        instructions = parser.instructions()
        return (
            Function(
                m.group(3), is_entry, params, returns, instructions, parser.labels, parser.branch_targets(),
                tuple(parser.variables), parser.nslots, directives, line,
            ),
            pos,
        )  # fmt: skip


def parse(text: str) -> Module:
    """Parses a PTX module.

    Args:
        text: PTX text of the module.

    Returns:
        Functions and variables of the module.

    Raises:
        PtxSyntaxError: A line cannot be read; the message contains its number.
    """
    return _ModuleParser(text).module()


def entry_params(ptx: str, entry: str) -> list[tuple[int, int]]:
    """Lists (bytes, alignment) of each parameter of `entry`, in order.

    Raises:
        KeyError: The module has no such entry.
    """
    match = re.search(rf"\.entry\s+{re.escape(entry)}\s*\(([^)]*)\)", ptx)
    if match is None:
        raise KeyError(f"no .entry {entry} in this PTX module")
    return [(p.nbytes, p.align) for p in _ModuleParser(ptx).params(match.group(1), match.start())]
