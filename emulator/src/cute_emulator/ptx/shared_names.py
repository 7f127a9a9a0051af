"""Names of a kernel's parts of shared memory, stored in comments of its PTX text, for messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

_MARK = "//cute_emulator.shared "
_STATIC = re.compile(r"[\d,()]+:[\d,()]+")


class View(NamedTuple):
    """Tensor on a part: bits of an element and the layout, `shape:stride` in CuTe's notation."""

    bits: int
    layout: str


class Part(NamedTuple):
    """Named bytes of shared memory.

    Attributes:
        symbol: PTX variable that contains the bytes.
        offset: Distance from the variable's beginning, in bytes.
        nbytes: Size in bytes.
        name: Name in the source, such as `storage.sA`.
        view: First tensor that is made on the part.
    """

    symbol: str
    offset: int
    nbytes: int
    name: str
    view: View | None = None

    def words(self, at: int) -> str:
        """Returns a description of the byte at offset `at` of the part."""
        if self.view is not None:
            spot = _spot(*self.view, at)
            if spot:
                return f"{spot} of {self.name}"
        return f"{self.name} + {at}" if at else self.name


def as_comment(kernel: str, parts: list[Part]) -> str:
    """Returns a line to append to a PTX text."""
    return f"{_MARK}{json.dumps([kernel, parts])}\n"


def name(ptx: str, kernel: str, symbols: Mapping[str, int], end: int, at: int) -> str:
    """Returns the name of an address of shared memory, such as `stage 1 of storage.sA`; empty if it has none.

    Args:
        ptx: Text of the module.
        kernel: Entry that runs.
        symbols: First address of each variable.
        end: End of the CTA's shared memory. A part beyond it shows that the layout is not the recorded one.
        at: Address.
    """
    symbols = {name.partition("@")[0]: begin for name, begin in symbols.items()}  # those of a scope, too
    parts = [p for p in _parts(ptx).get(kernel, ()) if p.symbol in symbols]
    if all(symbols[p.symbol] + p.offset + p.nbytes <= end for p in parts):
        for part in parts:
            inside = at - symbols[part.symbol] - part.offset
            if 0 <= inside < part.nbytes:
                return part.words(inside)
    return ""


@lru_cache(maxsize=64)
def _parts(ptx: str) -> dict[str, list[Part]]:
    out = {}
    for line in ptx[ptx.rfind("\n}") :].splitlines():
        if line.startswith(_MARK):
            kernel, parts = json.loads(line.removeprefix(_MARK))
            out[kernel] = [Part(*p)._replace(view=View(*p[4]) if p[4] else None) for p in parts]
    return out


def _spot(bits: int, layout: str, at: int) -> str:
    """Returns the stage or the element of a tensor; empty if the layout does not determine it."""
    shape, _, stride = layout.partition(":")
    if not _STATIC.fullmatch(layout):
        return ""
    extents, strides = _tree(shape), _tree(stride)
    left = at * 8 // bits
    if len(extents) < 3:
        return _element([*map(_leaves, extents)], [*map(_leaves, strides)], left)
    size, step = _leaves(extents[-1]), max(_leaves(strides[-1]))
    others = [
        (n - 1) * s
        for e, d in zip(extents[:-1], strides[:-1], strict=True)
        for n, s in zip(_leaves(e), _leaves(d), strict=True)
    ]
    if prod(size) < 2 or sum(others) >= step:
        return ""
    return f"stage {left // step}"


def _element(extents: list[list[int]], strides: list[list[int]], left: int) -> str:
    if any(len(n) > 1 for n in extents):
        return ""
    index = [0] * len(extents)
    for n in sorted(range(len(extents)), key=lambda n: -strides[n][0]):
        if extents[n][0] > 1 and strides[n][0] > 0:
            index[n] = min(left // strides[n][0], extents[n][0] - 1)
            left -= index[n] * strides[n][0]
    return "" if left else f"element {index}"


def _tree(text: str) -> list[Any]:
    """Returns the modes of `((8,16),4)`, or of `64`."""
    tree = json.loads(text.replace("(", "[").replace(")", "]"))
    return tree if isinstance(tree, list) else [tree]


def _leaves(tree: Any) -> list[int]:
    return [leaf for branch in tree for leaf in _leaves(branch)] if isinstance(tree, list) else [tree]
