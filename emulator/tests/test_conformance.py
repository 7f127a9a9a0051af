"""Every pair of the conformance suite: the bug is found, its fixed twin is left alone."""

import contextlib
from pathlib import Path

import pytest

from cute_emulator.conformance import CASES, findings
from cute_emulator.conformance.__main__ import main
from cute_emulator.errors import EmulatorError
from cute_emulator.rules import KINDS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bug_is_found_and_its_mended_twin_is_not(case):
    assert set(findings(case.broken, case.strict)) & set(case.kinds)
    assert findings(case.fixed, case.strict) == []


FIRST = (
    "no ",
    "too narrow scopes",
    "the reader has observed no completion of",
    "not coherent",
)
"""Words with which a finding about order begins: what is missing."""
ORDER = {
    "race", "shared-race", "proxy-fence", "lane-race", "tmem-fence", "wgmma-fence", "wgmma-registers",
    "nc-load", "exit-pending",
}  # fmt: skip


def test_a_finding_about_order_begins_with_what_is_missing():
    said = {}
    for case in {case.rule: case for case in CASES}.values():
        with contextlib.suppress(EmulatorError):
            for finding in case.broken.run(strict=case.strict).report.findings:
                said.setdefault(finding.kind, []).append(finding.message)
    assert len(said.keys() & ORDER) >= 7
    assert all(m.startswith(FIRST) for kind in said.keys() & ORDER for m in said[kind]), said


def test_names_are_unique_and_kinds_exist():
    assert len({case.name for case in CASES}) == len(CASES)
    named = {kind for case in CASES for kind in case.kinds}
    assert named <= {*KINDS, "Deadlock", "EmulatorError"}


def test_the_command_prints_a_line_for_each_pair_and_counts_what_is_wrong(monkeypatch, capsys):
    some = CASES[:2]
    monkeypatch.setattr("cute_emulator.conformance.__main__.CASES", some)
    assert main() == 0
    assert [line.rsplit(maxsplit=1)[-1] for line in capsys.readouterr().out.splitlines()[:2]] == ["ok", "ok"]
    monkeypatch.setattr("cute_emulator.conformance.__main__.findings", lambda kernel, strict: ["race"])
    assert main() == 1


def test_the_page_of_rules_names_every_kind_and_every_rule_of_the_suite():
    page = (Path(__file__).parents[1] / "docs" / "rules.md").read_text()
    judged = page.split("## Judged")[1].split("## Not judged")[0]
    assert [kind for kind in KINDS if f"`{kind}`" not in judged] == []
    assert [rule for rule in {case.rule for case in CASES} if f"`{rule}`" not in judged] == []
