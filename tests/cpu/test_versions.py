"""Ranges of pyproject.toml against what stacks pin, and the page against the runs in such environments."""

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
tomllib = pytest.importorskip("tomllib")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
APART = {("llamafactory", package) for package in ("transformers", "accelerate", "peft")}
"""Requirements that our ranges do not meet; the page names them."""


def ranges() -> dict[str, SpecifierSet]:
    """Returns the versions of each package that we and our extras for models require."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["hf"], *(one for one in extras["dev"] if "peft" in one)]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, wanted)}


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


def row(run):
    versions = run["versions"]
    columns = [run["for"], run["python"]]
    columns += [versions[name] for name in ("torch", "transformers", "peft", "accelerate")]
    columns += [versions["nvidia-cutlass-dsl"], f"{run['passed']} passed, {run.get('failed', 0)} failed"]
    return f"| {' | '.join(columns)} | {run['date']}, {run['commit']} |"


@pytest.mark.parametrize("number", range(len(RECORD["runs"])))
def test_each_run_is_on_the_page(number):
    assert row(RECORD["runs"][number]) in PAGE


def test_the_page_has_no_other_row():
    stated = re.findall(r"^\|.* passed, .*\|$", PAGE, re.MULTILINE)
    assert stated == [row(run) for run in RECORD["runs"]] and stated
