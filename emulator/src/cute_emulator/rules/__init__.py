"""Rules: each is the object `RULE` of a file of this folder. No other file lists them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from cute_emulator.rules.rule import Pair, Row, Rule

__all__ = [
    "CHECKS", "ENDS", "KINDS", "OPTIONAL_CHECKS", "RULES", "STRICT_CHECKS", "Pair", "Row", "Rule",
    "listeners", "page",
]  # fmt: skip


def load(path: list[str], package: str = __name__) -> tuple[Rule, ...]:
    """Returns the rules of a folder, by kind."""
    modules = (import_module(f"{package}.{module.name}") for module in iter_modules(path))
    return tuple(sorted((m.RULE for m in modules if hasattr(m, "RULE")), key=lambda rule: rule.kind))


_ALL = load(__path__)
RULES = tuple(rule for rule in _ALL if not rule.ends)
"""Rules that report findings."""
ENDS = tuple(rule for rule in _ALL if rule.ends)
"""Rules that end a run."""
KINDS = tuple(rule.kind for rule in RULES)
"""Kinds of findings."""


def _checks(setting: str) -> tuple[str, ...]:
    return tuple(sorted({rule.check for rule in RULES if rule.check and rule.setting == setting}))


CHECKS = _checks("default")
STRICT_CHECKS = _checks("strict")
"""Checks that follow the ISA, but that correct kernels violate. Such kernels depend on the assembler's
tracking of registers, or leave an mbarrier incomplete when nothing is in flight to it and no thread waits."""
OPTIONAL_CHECKS = tuple(sorted({rule.in_full for rule in RULES if rule.in_full}))
"""Checks that follow the ISA, but that nearly every public kernel violates: enabled only by name."""


def listeners(
    rules: tuple[Rule, ...], enabled: Collection[str]
) -> dict[type, list[Callable[[Any, Any], None]]]:
    """Returns, by class of event, the handlers of the rules that some checks enable."""
    looks: dict[type, list[Callable[[Any, Any], None]]] = {}
    for rule in rules:
        if not rule.check or rule.check in enabled:
            for event, look in rule.on.items():
                looks.setdefault(event, []).append(look)
    return looks


def page(rules: tuple[Rule, ...] = RULES) -> str:
    """Returns the rows of a table in `docs/rules.md`, for `RULES` or for `ENDS`.

    Cells are empty for the default setting, and where the suite has the name of the kind.
    """
    lines = []
    for rule in rules:
        for row in rule.rows:
            kinds, setting = row.kinds or f"`{rule.kind}`", row.setting or rule.setting
            suite = f"`{row.suite}`" if row.suite and f"`{row.suite}`" != kinds else ""
            setting = "" if setting == "default" else setting
            cells = (row.text, rule.ends, suite) if rule.ends else (row.text, kinds, setting, suite)
            lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)
