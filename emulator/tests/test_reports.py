"""Findings by their causes, and the files that `check` writes of them."""

import json

import pytest

from cute_emulator import report_files
from cute_emulator.causes import causes
from cute_emulator.check_command import side_by_side
from cute_emulator.errors import Finding
from cute_emulator.report_files import Outcome
from cute_emulator.rules import KINDS
from cute_emulator.settings import settings


def race(*lines, missing="no barrier between", kind="shared-race"):
    return Finding(kind, f"{missing}: lines {lines}", lines[0], places=tuple(("k.py", n) for n in lines))


def test_findings_that_share_lines_and_miss_the_same_are_one_cause():
    apart = race(40, 41)
    found = causes([race(10, 11), apart, race(10, 12), race(12, 13), race(10, 11, missing="no fence")])
    assert [len(cause.others) for cause in found] == [2, 0, 0]
    assert found[1].finding is apart and str(found[1]) == str(apart)
    assert "2 more findings follow from it: k.py:10, k.py:12, k.py:13" in str(found[0])


def test_groups_that_a_later_finding_links_become_one():
    found = causes([race(1, 2), race(3, 4), race(2, 3)])
    assert [len(cause.others) for cause in found] == [2]
    assert len(causes([race(1, 2), race(1, 2, kind="race")])) == 2


@pytest.fixture
def outcomes():
    bad = [race(10, 11), race(10, 12)]
    return [
        Outcome("immediate 0", "clean"),
        Outcome("lazy 0", "findings", [str(f) for f in bad], causes(bad), "python <repeat>", 1.5),
        Outcome("lazy 1", "findings", [str(f) for f in bad], causes(bad), "python again", 1.5),
        Outcome("random 0", "broke off", ["Deadlock: x < y"], [], "python other", 0.5),
    ]


def test_a_report_has_each_cause_once(tmp_path, outcomes):
    for suffix in report_files.SUFFIXES:
        report_files.write(tmp_path / f"r{suffix}", outcomes, "k.py")
    text = (tmp_path / "r.txt").read_text()
    assert text.startswith("k.py: 3 of 4 runs are not clean\n")
    assert text.count("1 more finding follows from it") == text.count("repeat: python <repeat>") == 1
    page = (tmp_path / "r.html").read_text()
    assert "python &lt;repeat&gt;" in page and "Deadlock: x &lt; y" in page and "again" not in page
    assert [o["verdict"] for o in json.loads((tmp_path / "r.json").read_text())] == [
        "clean", "findings", "findings", "broke off",
    ]  # fmt: skip


def test_sarif_names_rules_and_lines(tmp_path, outcomes):
    report_files.write(tmp_path / "r.sarif", outcomes, "k.py")
    (run,) = json.loads((tmp_path / "r.sarif").read_text())["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [*KINDS, "run"]
    first, second = run["results"]
    assert (first["ruleId"], second["ruleId"]) == ("shared-race", "run")
    places = [p["physicalLocation"] for p in (*first["locations"], *first["relatedLocations"])]
    assert [(p["artifactLocation"]["uri"], p["region"]["startLine"]) for p in places] == [
        ("k.py", 10), ("k.py", 11),
    ]  # fmt: skip


def test_a_report_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"r\.pdf must end in one of \.html, \.json, \.sarif, \.txt"):
        report_files.check_suffix(tmp_path / "r.pdf")


def _seed(setting):
    return setting.seed, setting.mode


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_side_by_side_come_in_order(jobs):
    every = settings(seeds=1)
    assert list(side_by_side(_seed, every, jobs)) == [_seed(setting) for setting in every]
