"""What a rule is: one object, in a file of its own."""

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
    """A bug and its mended twin, for the conformance suite (`conformance.kernel.pair`).

    Attributes:
        name: What is wrong, unique.
        body: PTX after the prelude; several for several launches.
        broken: Word in the body -> the text that makes it wrong.
        mended: The same that makes it right.
        kernel: Shape, architecture and the like.
    """

    name: str
    body: str | tuple[str, ...]
    broken: Mapping[str, str]
    mended: Mapping[str, str]
    kernel: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """One kind of finding.

    Attributes:
        kind: Its name.
        judges: Pattern of how the names of instructions begin that it judges; empty where it judges none.
        rows: Of the page of rules.
        setting: `default`; `strict`: with ``--strict``; `also`: where ``--also`` names it; `scripts`:
            where the host
            is a party.
        on: Class of an event -> what looks at it: (checks, event). What of a rule is not here stands in
            `machine`, where the order of accesses is kept.
        pairs: Of the conformance suite; older rules' are in `conformance`.
    """

    kind: str
    judges: str
    rows: tuple[Row, ...]
    setting: str = "default"
    on: Mapping[type, Callable[[Any, Any], None]] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
