"""The rules: each is the object `RULE` of a file of this folder, and found there; nothing else lists them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from cute_emulator.rules.rule import Pair, Row, Rule

__all__ = ["KINDS", "RULES", "Pair", "Row", "Rule", "listeners", "page"]


def load(path: list[str], package: str = __name__) -> tuple[Rule, ...]:
    """The rules of a folder, by kind."""
    modules = (import_module(f"{package}.{module.name}") for module in iter_modules(path))
    return tuple(sorted((m.RULE for m in modules if hasattr(m, "RULE")), key=lambda rule: rule.kind))


RULES = load(__path__)
KINDS = tuple(rule.kind for rule in RULES)
"""Of findings."""


def listeners(rules: tuple[Rule, ...]) -> dict[type, list[Callable[[Any, Any], None]]]:
    """Class of an event -> what looks at it."""
    found: dict[type, list[Callable[[Any, Any], None]]] = {}
    for rule in rules:
        for event, look in rule.on.items():
            found.setdefault(event, []).append(look)
    return found


def page(rules: tuple[Rule, ...] = RULES) -> str:
    """The rows of the table in `docs/rules.md`."""
    lines = []
    for rule in rules:
        for row in rule.rows:
            suite = f"`{row.suite}`" if row.suite else ""
            kinds, setting = row.kinds or f"`{rule.kind}`", row.setting or rule.setting
            lines.append(f"| {row.text} | {kinds} | {setting} | {suite} |\n")
    return "".join(lines)
