"""Rules are objects: each in a file of its own, found there by all who need it."""

import importlib
import sys
import textwrap
from pathlib import Path

from cute_emulator.conformance.kernel import findings, pair
from cute_emulator.execution import launch
from cute_emulator.rules import KINDS, RULES, load, page

PLANTED = '''
"""The rule `planted`: no mbarrier has a count of 7."""

from cute_emulator.machine.events import MbarrierMade
from cute_emulator.rules.rule import Pair, Row, Rule


def _look(checks, event):
    checks.report.add("planted", f"no init is good: {event.group.warp}", event.line)


RULE = Rule(
    "planted",
    judges=r"mbarrier\\.init",
    rows=(Row("No mbarrier is initialised", suite="planted"),),
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
    case = pair(one.name, rule.kind, rule.kind, one.body, one.broken, one.mended, **one.kernel)
    assert findings(case.broken) == ["planted"]
    assert findings(case.mended) == []
    assert page(more) == "| No mbarrier is initialised | `planted` | default | `planted` |\n"


def test_the_page_has_every_rule_as_its_file_says_it():
    text = (Path(__file__).parents[1] / "docs" / "rules.md").read_text()
    assert page() in text, "put this between the head of the table and what follows it:\n" + page()


def test_each_rule_is_in_the_file_of_its_name():
    folder = Path(launch.__file__).parents[1] / "rules"
    files = {file.stem.replace("_", "-") for file in folder.glob("*.py")}
    assert files == {*KINDS, "--init--", "rule", "kernels"}
