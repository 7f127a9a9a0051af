"""Classes of rules; each rule is one object, in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A line of the page of rules.

    Attributes:
        text: The rule, with the section of the PTX ISA that says so.
        suite: Its name in the conformance suite.
        kinds: What is reported; the rule's kind by default.
        setting: When it is judged; the rule's by default.
    """

    text: str
    suite: str = ""
    kinds: str = ""
    setting: str = ""


@dataclass(frozen=True)
class Pair:
    """A bug and its correct twin, for the conformance suite (`conformance.cases`).

    Attributes:
        name: What is wrong, unique.
        body: PTX after the prelude (`conformance.kernel.PRELUDE`); several for several launches. Of a script:
            its Python (`conformance.script.Script`).
        broken: Word in the body -> the text that makes it wrong.
        fixed: The same that makes it right.
        kernel: Shape, architecture and the like (`conformance.kernel.Kernel`).
        suite: Name in the conformance suite; that of the rule's first row by default.
        kinds: Kinds and errors, apart by spaces, of which one reports it; the rule's kind by default.
        strict: Whether only checks off by default find it.
        broken_kernel: What of `kernel` differs where the pair is wrong.
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
    """Makes a pair of a rule with several names in the suite, or that several kinds report."""
    return Pair(name, body, broken, fixed, kernel, suite, kinds, strict)


def script(name: str, text: str, kinds: str = "") -> Pair:
    """Makes a pair of scripts of the host: `fixed` in the text is True or False."""
    return Pair(name, text, {"fixed": "False"}, {"fixed": "True"}, kinds=kinds, is_script=True)


@dataclass(frozen=True)
class Rule:
    """One kind of finding, or (`ends`) one way to end a run.

    Attributes:
        kind: Its name.
        judges: Pattern of how the names of instructions begin that it judges; empty where it judges none.
        rows: Of the page of rules.
        setting: `default`; `strict`: with ``--strict``; `scripts`: where the host is a party.
        check: Name of the check, one of `Machine(checks=)`, without which it is off; several rules may share
            one. Empty: it is always on.
        in_full: Name of a check with which it judges more than by default (``--also``).
        on: Class of an event -> what looks at it: (checks, event). Events come from `machine`, which
            keeps the order of accesses.
        pairs: Of the conformance suite.
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
