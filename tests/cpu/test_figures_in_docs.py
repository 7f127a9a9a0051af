"""Figures of speed in README, docs and benchmarks/README.md are computed from the data, and say its date."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

from overlap_gemm.backends.base import Problem
from overlap_gemm.backends.fused import Fused
from overlap_gemm.backends.reach import Reach
from overlap_gemm.backends.select import choose
from overlap_gemm.spec import op_named

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MODES = {"graph": True, "eager": False}
NO_WAYS = ("bound", "product", "collective", "auto")
"""What is timed beside the ways to carry an op out."""


def words(document):
    return " ".join((ROOT / document).read_text().split())


@cache
def report(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def against(name, mode, least=0, most=1 << 30, op=None):
    """`auto`'s time beside the faster of torch's own ways, where torch has one."""
    found = [
        result[mode]["ours"]["auto"]["against"]
        for result in report(name)["results"]
        if least <= result["m"] <= most and op in (None, result["op"])
    ]
    assert None not in found
    return found


def said(found):
    return f"{min(found):.2f} to {max(found):.2f}"


def slower(found):
    return f"{sum(one > 1 for one in found)} of {len(found)} shapes"


def beside_every_way(name, mode):
    """`auto`'s time beside the fastest of all ways that were timed, ours among them."""
    every = [result[mode]["seconds"] for result in report(name)["results"]]
    return [
        seconds["auto"] / min(time for way, time in seconds.items() if way not in NO_WAYS)
        for seconds in every
    ]


def chosen_otherwise(name, mode):
    """Shapes for which today's model takes another way than the one that was timed as `auto`."""
    different, results = 0, report(name)["results"]
    for result in results:
        op, m, n, k = (result[key] for key in ("op", "m", "n", "k"))
        width, across = (k, n) if op_named(op).width == "k" else (n, k)
        asked = Problem(
            op, m, width, torch.bfloat16, "cuda", result["ranks"], across=across,
            reach=Reach("sm_90a", 132, None), captured=MODES[mode],
        )  # fmt: skip
        with mock.patch.object(Fused, "why_not", return_value=None):
            different += choose(asked).backend.name != result[mode]["ours"]["auto"]["taken"]
    return f"{different} of {len(results)}"


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


FIGURES = {
    "README.md": [
        lambda: f"{said(against('h200x4', 'graph', 512))} of the time of the faster of torch's own ways",
        lambda: (
            f"{said(against('h200x4', 'eager', 512))} of it called eagerly "
            f"({slower(against('h200x4', 'eager', 512))} are slower)"
        ),
        lambda: (
            f"Below 512 rows: {said(against('h200x4', 'graph', 0, 511))} captured "
            f"({slower(against('h200x4', 'graph', 0, 511))} are slower), "
            f"{said(against('h200x4', 'eager', 0, 511))} eagerly "
            f"({slower(against('h200x4', 'eager', 0, 511))} are slower)"
        ),
        lambda: f"today's model chooses otherwise in {chosen_otherwise('h200x4', 'graph')} of these shapes",
    ],
    "benchmarks/README.md": [
        lambda: (
            f"within 5 % of it in {sum(one <= 1.05 for one in beside_every_way('h200x4', 'graph'))} of "
            f"{len(report('h200x4')['results'])} shapes, "
            f"at worst {max(beside_every_way('h200x4', 'graph')):.2f}"
        ),
    ],
    "docs/fused.md": [
        lambda: (
            f"`auto` takes {said(against('h200x2-shapes', 'graph', 512))} of the time of the faster of "
            f"torch's own ways for 512 to 8192 rows"
        ),
    ],
    "docs/evidence.md": [
        lambda: (
            f"all ops {said(against('h200x4', 'graph', 512))} of the faster of torch's ways from 512 rows on"
        ),
    ],
}
SOURCES = {
    "README.md": ["h200x4"],
    "benchmarks/README.md": ["h200x4"],
    "docs/fused.md": ["h200x2-shapes"],
}


@pytest.mark.parametrize(
    ("document", "number"), [(document, i) for document, every in FIGURES.items() for i in range(len(every))]
)
def test_a_figure_is_what_was_measured(document, number):
    figure = FIGURES[document][number]()
    assert figure in words(document), f"{document} should say: {figure}"


@pytest.mark.parametrize(("document", "name"), [(d, name) for d, names in SOURCES.items() for name in names])
def test_a_figure_says_of_when_its_data_is(document, name):
    """The date that the data has, and a commit of this history: that brought it, or whose code was timed."""
    found = re.search(rf"`{name}\.json`, (\S+), commit ([0-9a-f]{{7,}})", words(document))
    assert found is not None, f"{document} should say: `{name}.json`, DATE, commit HASH"
    assert found[1] == report(name)["machine"]["date"]
    whole = shutil.which("git") and git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    if whole:  # a whole checkout
        assert git("merge-base", "--is-ancestor", found[2], "HEAD").returncode == 0, found[2]


def test_the_readmes_layer_is_what_was_measured():
    layer = report("h200x4-layer")["results"]
    ratios = [r["ours_against"]["torch"]["ratio"] for r in layer if (r["model"], r["rows"]) == ("70B", 8192)]
    figure = "8192 tokens, eager: {:.2f} of torch's styles forward, {:.2f} with".format(*ratios)
    assert figure in words("README.md"), figure
