"""All pairs."""

from __future__ import annotations

from cute_emulator.conformance import flags, lanes, launches, proxies, tensor_cores
from cute_emulator.conformance.kernel import Case, pair
from cute_emulator.rules import RULES

OF_RULES = tuple(
    pair(p.name, rule.rows[0].suite, rule.kind, p.body, p.broken, p.mended, **p.kernel)
    for rule in RULES
    for p in rule.pairs
)
CASES: tuple[Case, ...] = (
    *flags.CASES,
    *proxies.CASES,
    *lanes.CASES,
    *tensor_cores.CASES,
    *launches.CASES,
    *OF_RULES,
)
