"""All pairs: those of the rules' files."""

from __future__ import annotations

from collections.abc import Mapping

from cute_emulator.conformance.kernel import Case, Kernel
from cute_emulator.conformance.script import Script
from cute_emulator.rules import ENDS, RULES, Pair, Rule


def case_of(rule: Rule, pair: Pair) -> Case:
    """Returns the case of a rule's pair, with placeholders replaced and names resolved."""
    bodies = (pair.body,) if isinstance(pair.body, str) else pair.body

    def texts(words: Mapping[str, str]) -> tuple[str, ...]:
        out = bodies
        for word, text in words.items():
            out = tuple(body.replace(word, text) for body in out)
        return out

    wrong, right = texts(pair.broken), texts(pair.fixed)
    suite, kinds = pair.suite or rule.rows[0].suite, tuple((pair.kinds or rule.kind).split())
    if pair.is_script:
        return Case(pair.name, suite, kinds, Script(pair.name, *wrong), Script(pair.name, *right))
    broken = Kernel(wrong, **{**pair.kernel, **pair.broken_kernel})
    return Case(pair.name, suite, kinds, broken, Kernel(right, **pair.kernel), pair.strict)


CASES: tuple[Case, ...] = tuple(case_of(rule, pair) for rule in (*RULES, *ENDS) for pair in rule.pairs)
