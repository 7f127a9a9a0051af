"""Ranges of pyproject.toml against what stacks pin, and the page against the runs in such environments."""

import importlib
import json
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from overlap_gemm_tools import __file__ as tools_file

ROOT = Path(tools_file).parents[2]
FOLDER = ROOT / "docs/integrations"
RECORD = json.loads((FOLDER / "versions.json").read_text())
PAGE = (FOLDER / "versions.md").read_text()
pytest.importorskip("tomllib")
versions = importlib.import_module("versions")
APART = {("llamafactory", package) for package in ("transformers", "accelerate", "peft")}
"""Requirements that our ranges do not meet; the page names them."""


def ranges() -> dict[str, SpecifierSet]:
    """Returns the versions of each package that we and our extras for models require."""
    return {requirement.name: requirement.specifier for requirement in versions.our_requirements()}


def candidates(*specifiers: SpecifierSet) -> list[Version]:
    """Returns versions at and near each border: two ranges have one in common if one of these meets both."""
    borders = {Version(one.version.removesuffix(".*")) for each in specifiers for one in each}
    around = {Version(f"{border.public}{end}") for border in borders for end in ("", ".1", ".post1")}
    below = {
        Version(f"{border.major}.{border.minor - 1}.9999") for border in borders if border.minor
    }  # below "<5.11"
    return sorted(borders | around | below)


@pytest.mark.parametrize("stack", RECORD["stacks"])
def test_our_ranges_meet_those_of_each_stack(stack):
    apart = set()
    for requirement in map(Requirement, RECORD["stacks"][stack]["requires"]):
        ours, theirs = ranges().get(requirement.name, SpecifierSet()), requirement.specifier
        common = [v for v in candidates(ours, theirs) if v in ours and v in theirs]
        if not common and len(ours) + len(theirs):
            apart.add((stack, requirement.name))
    assert apart == {pair for pair in APART if pair[0] == stack}
    if apart:
        assert f"| {stack} {RECORD['stacks'][stack]['version']} requires" in PAGE


def test_ranges_apart_are_seen():
    """Ranges with nothing in common have no candidate in both."""
    for ours, theirs, meet in (
        (">=5.23", "<5.21,>=5.16.1", False),
        (">=5.10", "<5.11,>=5.5.3", True),
        (">=5.10", "==5.9.0", False),
        (">=4.8.0", "==4.8.0", True),
        (">=2.13", "==2.14.1", True),
    ):
        both = SpecifierSet(ours), SpecifierSet(theirs)
        assert any(v in both[0] and v in both[1] for v in candidates(*both)) == meet, (ours, theirs)


def test_the_page_has_the_row_of_each_run():
    stated = re.findall(r"^\|.* passed, .*\|$", PAGE, re.MULTILINE)
    assert stated == [versions.row(run) for run in RECORD["runs"]] and stated


def test_environments_have_the_versions_of_their_names():
    stacks = RECORD["stacks"]
    assert versions.wanted("sglang", stacks) == stacks["sglang"]["requires"]
    assert versions.wanted("newest", stacks) == []
    assert versions.wanted("torch==2.15.0 peft==0.20.0", stacks) == ["torch==2.15.0", "peft==0.20.0"]
    lowest = dict(one.split("==") for one in versions.wanted("oldest", stacks))
    assert lowest.keys() == {*versions.PACKAGES} - {"numpy"}
    for package, lowest_version in lowest.items():
        version = Version(lowest_version.removesuffix(".*"))
        assert version in ranges()[package], package
        assert Version(f"{version.major}.{version.minor - 1}") not in ranges()[package], package
