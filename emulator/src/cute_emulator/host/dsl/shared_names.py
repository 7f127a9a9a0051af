"""Names of a kernel's parts of shared memory, read from the module in compilation and stored with the PTX.

In CuTe DSL 4.8 and newer each allocation is an operation of the module. Its location is the source line, with
the fields of a `cute.struct`. The compiler lays out those of dynamic memory in program order. Older versions
compute addresses in Python, so that nothing has a name. A view of a part determines its stages and elements.
"""

from __future__ import annotations

import re

from cute_emulator.ptx.shared_names import Part, View, as_comment

_ALIAS = re.compile(r'^(?:(![\w$]+) = (.*)|(#loc\d+) = loc\("((?:[^"\\]|\\.)*)")', re.M)
_KERNEL = re.compile(r"^\s*cuda\.kernel @([\w$]+)\(")
_OPERATION = re.compile(
    r"^\s*(%[\w$#]+) = (cute\.memref\.alloca|cute_nvgpu\.arch\.alloc_smem|cute\.get_iter|cute\.recast_iter"
    r"|cute\.add_offset|cute\.make_view)\(([^)]*)\)\s*(.*?)\s* loc\((#loc\d+)\)$"
)
_TARGET = re.compile(r"\s*(\w+)\s*=[^=]")
_BYTES = re.compile(r'align<(\d+)>, "(\d+):1">$')
_ELEMENT = re.compile(r"!cute\.(?:ptr|memref)<[a-z]*?(\d+)\w*,")
_STATIC = re.compile(r'!cute\.int_tuple<"(\d+)">')
_LAYOUT = re.compile(r'"([^"]*)">$')
_FIELD = re.compile(r'"([^":]+):(\d+):(\d+)"')


def comments_of(text: str) -> str:
    """Returns comments for the PTX of a module, one for each kernel.

    Args:
        text: Text of the module before its compilation, with debug information.
    """
    aliases, sources = {}, {}
    for kind, meaning, place, source in _ALIAS.findall(text):
        aliases[kind], sources[place] = meaning, source
    out, kernel = [], _Kernel("", 0)
    for line in text.splitlines():
        if begin := _KERNEL.match(line):
            out.append(kernel)
            kernel = _Kernel(begin[1], kernel.variables)
        elif operation := _OPERATION.match(line):
            result, name, operands, rest, place = operation.groups()
            attributes, _, kinds = rest.rpartition(": ")
            kind = kinds.rpartition("-> ")[2].rpartition(" to ")[2]
            target = _TARGET.match(sources.get(place, ""))
            to = target[1] if target else ""
            kernel.see(name, result, operands.split(", "), attributes, kinds, aliases.get(kind, kind), to)
    out.append(kernel)
    return "".join(as_comment(k.name, k.parts) for k in out if k.parts)


class _Kernel:
    """Visitor of the operations of a kernel, in program order."""

    def __init__(self, name: str, variables: int) -> None:
        self.name = name
        self.variables = variables  # of static shared memory, counted through the module
        self.parts: list[Part] = []
        self._end = 0
        self._pointers: dict[str, tuple[str, int]] = {}  # to (symbol, byte) in shared memory

    def see(
        self, name: str, result: str, operands: list[str], attributes: str, kinds: str, kind: str, target: str
    ) -> None:
        """Visits an operation.

        Args:
            name: Name of the operation.
            result: Name of the result.
            operands: Names of the operands.
            attributes: Attributes of the operation.
            kinds: Types of operands and result.
            kind: Type of the result.
            target: Name in the source that the result is assigned to.
        """
        element, source = _ELEMENT.match(kind), self._pointers.get(operands[0])
        if element is None or " smem," not in kind and " smem>" not in kind:
            return
        bits = int(element[1])
        if name == "cute.memref.alloca":
            self._allocated(result, attributes, kind, target)
        elif name == "cute_nvgpu.arch.alloc_smem":
            symbol = f"__static_shmem__{self.variables}"
            self.variables += 1
            self.parts.append(Part(symbol, 0, int(operands[0]) * bits // 8, target or symbol))
            self._pointers[result] = symbol, 0
        elif source is not None:
            if name == "cute.add_offset":
                by = _STATIC.search(kinds)
                if by is None:
                    return
                source = source[0], source[1] + int(by[1]) * bits // 8
            elif name == "cute.make_view":
                self._viewed(*source, bits, kind)
            self._pointers[result] = source

    def _allocated(self, result: str, attributes: str, kind: str, target: str) -> None:
        shape = _BYTES.search(kind)
        if shape is None:
            return
        align, size = map(int, shape.groups())
        begin = -(-self._end // align) * align
        self._end = begin + size
        symbol = "__dynamic_shmem__0"
        self._pointers[result] = symbol, begin
        fields = _FIELD.findall(attributes)
        for what, nbytes, offset in fields:
            name = ".".join(filter(None, (target, what)))
            self.parts.append(Part(symbol, begin + int(offset), int(nbytes), name))
        if target and not fields:
            self.parts.append(Part(symbol, begin, size, target))

    def _viewed(self, symbol: str, at: int, bits: int, kind: str) -> None:
        layout = _LAYOUT.search(kind)
        for n, part in enumerate(self.parts):
            if layout and part.symbol == symbol and part.offset == at and part.view is None:
                self.parts[n] = part._replace(view=View(bits, layout[1].split(" o ")[-1]))
