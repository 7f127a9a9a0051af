"""Peephole optimizer of an item's source: joins operations of one kind, and removes unused ones."""

from __future__ import annotations

import re
from collections.abc import Callable

_ITEM = re.compile(r"(v\d+) = (v\d+)\[(\d+)\]")
_PACK = re.compile(r"(v\d+) = pack2\((\w+), (\w+), 'bf16x2', 'rn', False\)")
_PAIR = re.compile(r"(v\d+) = pair64\((v\d+), (v\d+)\)")
_HALF = re.compile(r"(v\d+) = (low|high)32\((v\d+)\)")
_BF16 = re.compile(r"(v\d+) = bf16_(low|high)\((v\d+)\)")
_STORE = re.compile(r"v\d+ = (s\d+)\(g, g\.mask, (\w+), (\(.*\))\)")
_ASSIGN = re.compile(r"(v\d+) = (.*)")
_ASSIGNS = re.compile(r"v\d+(, v\d+)*,? = .*")
_EFFECT = re.compile(r"\b[hs]\d+\(|\bg\.")  # handlers, and special registers: reading a clock has an effect
_LOCAL = re.compile(r"\bv\d+\b")


def gather_runs(lines: list[str]) -> list[str]:
    """Joins neighbouring conversions from and to bf16, and register pairs, to one operation each.

    An epilogue has dozens of them in a row, each with more overhead than work.
    """
    halves = {m[1]: (m[2], m[3]) for m in map(_HALF.fullmatch, lines) if m}
    items = {m[1]: (m[2], int(m[3])) for m in map(_ITEM.fullmatch, lines) if m}

    def pack(runs: list[tuple[str, ...]]) -> str:
        names, his, los = (", ".join(parts) for parts in zip(*runs, strict=True))
        words = [halves.get(lo, ("", ""))[1] for _, _, lo in runs]
        if all(
            halves.get(hi) == ("high", w) and halves[lo] == ("low", w)
            for (_, hi, lo), w in zip(runs, words, strict=True)
        ):
            return f"{names}, = pack2_words(({', '.join(words)},))"
        return f"{names}, = pack2_run(({his},), ({los},))"

    def pair(runs: list[tuple[str, ...]]) -> str:
        names, los, his = (", ".join(parts) for parts in zip(*runs, strict=True))
        registers, first = items.get(runs[0][1], ("", 0))
        numbers = [items.get(lo, ("", 0))[1] // 2 for _, lo, _ in runs]
        if first % 2 == 0 and all(
            (items.get(lo), items.get(hi)) == ((registers, 2 * n), (registers, 2 * n + 1))
            for (_, lo, hi), n in zip(runs, numbers, strict=True)
        ):
            return f"{names}, = pair64_rows({registers}, ({', '.join(map(str, numbers))},))"
        return f"{names}, = pair64_run(({los},), ({his},))"

    def widen(runs: list[tuple[str, ...]]) -> str:
        lows, highs = (
            [(name, word) for name, half, word in runs if half == kind] for kind in ("low", "high")
        )
        names, words = (", ".join(column) for column in zip(*lows, *highs, strict=True))
        return f"{names}, = bf16_run(({words},), {len(lows)})"

    return _stores(_sink(_sink(_sink(lines, _BF16, widen), _PACK, pack), _PAIR, pair))


def needed(lines: list[str]) -> list[str]:
    """Returns the lines without assignments to unused locals whose expression has no effect."""
    out: list[str] = []
    used: set[str] = set()
    for line in reversed(lines):
        match = _ASSIGN.fullmatch(line)
        if match and match[1] not in used and not _EFFECT.search(match[2]):
            continue
        used.update(_LOCAL.findall(match[2] if match else line))
        out.append(line)
    return out[::-1]


def _stores(lines: list[str]) -> list[str]:
    """Joins stores to one call if only arithmetic on locals is between them."""
    out: list[str] = []
    waiting: list[tuple[str, re.Match[str]]] = []

    def flush() -> None:
        if len(waiting) > 1:
            stores, addresses, values = (", ".join(m[n] for _, m in waiting) for n in (1, 2, 3))
            out.append(f"stores(g, ({stores}), ({addresses}), ({values}))")
        else:
            out.extend(line for line, _ in waiting)
        waiting.clear()

    for line in lines:
        if match := _STORE.fullmatch(line):
            waiting.append((line, match))
            continue
        if waiting and (_EFFECT.search(line) or not _ASSIGNS.fullmatch(line)):
            flush()
        out.append(line)
    flush()
    return out


def _sink(
    lines: list[str], pattern: re.Pattern[str], together: Callable[[list[tuple[str, ...]]], str]
) -> list[str]:
    """Moves the lines of a pattern down to the first use of any, where all are joined.

    Locals are assigned once, so a line may move down to the first use of its result.
    """
    out: list[str] = []
    waiting: dict[str, tuple[str, ...]] = {}

    def flush() -> None:
        if waiting:
            out.append(together(list(waiting.values())))
            waiting.clear()

    for line in lines:
        if match := pattern.fullmatch(line):
            if waiting.keys() & set(match.groups()):
                flush()
            waiting[match[1]] = match.groups()
            continue
        if waiting and waiting.keys() & set(_LOCAL.findall(line)):
            flush()
        out.append(line)
    flush()
    return out
