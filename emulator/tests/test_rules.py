"""Rules are objects: each in a file of its own, which holds all that is particular to it."""

import ast
import contextlib
import functools
import importlib
import itertools
import re
import sys
import textwrap
from pathlib import Path

import pytest

from cute_emulator.conformance import findings
from cute_emulator.conformance.cases import case_of
from cute_emulator.errors import EmulatorError
from cute_emulator.execution import launch
from cute_emulator.rules import ENDS, KINDS, RULES, load, page

PLANTED = '''
"""The rule `planted`: no mbarrier has a count of 7."""

from cute_emulator.machine.events import MbarrierMade
from cute_emulator.rules.rule import Pair, Row, Rule


def _look(checks, event):
    checks.report.add("planted", f"no init is good: {event.group.warp}", event.line)


RULE = Rule(
    "planted",
    judges=r"mbarrier\\.init",
    rows=(
        Row("No mbarrier is initialised", suite="planted"),
        Row("None is used", "uses", "`used`", "strict"),
    ),
    on={MbarrierMade: _look},
    pairs=(Pair("an mbarrier", "|I|", {"|I|": "@%p0 mbarrier.init.shared.b64 [%r11], 1;"}, {"|I|": ""}),),
)
'''


def test_a_rule_is_one_file_with_its_pair(tmp_path, monkeypatch):
    folder = tmp_path / "more_rules"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "planted.py").write_text(textwrap.dedent(PLANTED))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    (rule,) = more = load([str(folder)], "more_rules")
    sys.modules.pop("more_rules.planted")
    monkeypatch.setattr(launch, "RULES", (*RULES, *more))
    (one,) = rule.pairs
    case = case_of(rule, one)
    assert findings(case.broken) == ["planted"]
    assert findings(case.fixed) == []
    assert page(more) == (
        "| No mbarrier is initialised | `planted` |  |  |\n| None is used | `used` | strict | `uses` |\n"
    )


def test_the_page_has_every_rule_as_its_file_says_it():
    text = (Path(__file__).parents[1] / "docs" / "rules.md").read_text()
    for rules in (RULES, ENDS):
        assert page(rules) in text, "put this between a table's head and what follows it:\n" + page(rules)


def test_each_rule_is_in_the_file_of_its_name():
    folder = Path(launch.__file__).parents[1] / "rules"
    files = {file.stem.replace("_", "-") for file in folder.glob("*.py")}
    assert files == {*KINDS, *(rule.kind for rule in ENDS), "--init--", "rule", "ptx"}


FOLDER = Path(launch.__file__).parents[1]


@functools.cache
def texts(file):
    """Pieces of text of a file, of several words, but those that end a run."""
    tree = ast.parse(file.read_text())
    errors = {id(n) for raised in ast.walk(tree) if isinstance(raised, ast.Raise) for n in ast.walk(raised)}
    constants = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in errors
    )
    pieces = {" ".join(piece.split()) for text in constants for piece in re.split(r"{\w+}", text)}
    return {piece for piece in pieces if len(piece) > 12 and " " in piece}


def test_findings_are_reported_by_rules_alone():
    for file in FOLDER.rglob("*.py"):
        calls = [
            ast.unparse(n.func) for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)
        ]
        inside = file.parent.name == "rules" and file.stem.replace("_", "-") in KINDS
        reports = any(call.endswith(("report.add", "Finding")) for call in calls)
        assert reports == inside or file.name == "errors.py", file


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_the_text_of_a_finding_is_in_its_rules_file_and_nowhere_else(rule):
    file = FOLDER / "rules" / f"{rule.kind.replace('-', '_')}.py"
    messages = set()
    for pair, mode in itertools.product(rule.pairs, ("immediate", "lazy")):
        case = case_of(rule, pair)
        with contextlib.suppress(EmulatorError):
            report = case.broken.run(mode=mode, strict=case.strict).report
            messages |= {finding.message for finding in report.findings if finding.kind == rule.kind}
    assert messages, "no pair of the rule shows its text"
    pieces = {text for text in texts(file) if any(text in message for message in messages)}
    assert all(any(piece in message for piece in pieces) for message in messages)
    others = {
        text: other for other in FOLDER.rglob("*.py") if other.parent != file.parent for text in texts(other)
    }
    assert {piece: others[piece] for piece in pieces & others.keys()} == {}
