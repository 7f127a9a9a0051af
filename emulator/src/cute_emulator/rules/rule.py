"""Classes of rules; each rule is one object, in a separate file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A line of the page of rules.

    Attributes:
        text: Rule, with the section of the PTX ISA that states it.
        suite: Name in the conformance suite.
        kinds: Reported kinds of findings; the rule's kind by default.
        setting: Setting that enables the rule; the rule's by default.
    """

    text: str
    suite: str = ""
    kinds: str = ""
    setting: str = ""


@dataclass(frozen=True)
class Pair:
    """A bug and its correct twin, for the conformance suite (`conformance.cases`).

    Attributes:
        name: Description of the bug, unique.
        body: PTX after the prelude (`conformance.kernel.PRELUDE`); several for several launches. For a
            script: its Python (`conformance.script.Script`).
        broken: Placeholder in the body -> text of the bug.
        fixed: Placeholder in the body -> correct text.
        kernel: Shape, architecture and other properties (`conformance.kernel.Kernel`).
        suite: Name in the conformance suite; that of the rule's first row by default.
        kinds: Kinds and errors, separated by spaces, one of which must be reported; the rule's kind by
            default.
        strict: Whether only checks that are off by default detect it.
        broken_kernel: Properties in `kernel` that differ for the bug.
        is_script: Whether it is a script of the host.
    """

    name: str
    body: str | tuple[str, ...]
    broken: Mapping[str, str]
    fixed: Mapping[str, str]
    kernel: Mapping[str, Any] = field(default_factory=dict)
    suite: str = ""
    kinds: str = ""
    strict: bool = False
    broken_kernel: Mapping[str, Any] = field(default_factory=dict)
    is_script: bool = False


def pair(
    name: str, suite: str, kinds: str, body: str | tuple[str, ...], broken: Mapping[str, str],
    fixed: Mapping[str, str], strict: bool = False, **kernel: Any,
) -> Pair:  # fmt: skip
    """Returns a pair of a rule with several names in the suite, or one that several kinds report."""
    return Pair(name, body, broken, fixed, kernel, suite, kinds, strict)


def script(name: str, text: str, kinds: str = "") -> Pair:
    """Returns a pair of scripts of the host: `fixed` in the text is True or False."""
    return Pair(name, text, {"fixed": "False"}, {"fixed": "True"}, kinds=kinds, is_script=True)


@dataclass(frozen=True)
class Rule:
    """One kind of finding, or (`ends`) one kind of error that ends a run.

    Attributes:
        kind: Name of the kind.
        judges: Pattern of the beginning of the instructions that it judges; empty if it judges none.
        rows: Rows of the page of rules.
        setting: `default`; `strict`: with ``--strict``; `scripts`: if the host is recorded.
        check: Name of the check that enables it, one of `Machine(checks=)`; several rules may share one.
            Empty: it is always enabled.
        in_full: Name of a check with which it judges more than by default (``--also``).
        on: Class of an event -> handler: (checks, event). Events come from `machine`, which records the order
            of accesses.
        pairs: Pairs of the conformance suite.
        ends: `error` or `deadlock`: it reports no finding, but ends the run.
    """

    kind: str
    judges: str
    rows: tuple[Row, ...]
    setting: str = "default"
    check: str = ""
    in_full: str = ""
    on: Mapping[type, Callable[[Any, Any], None]] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    ends: str = ""
