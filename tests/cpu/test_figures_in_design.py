"""Figures in docs/design and on the emulator's page are computed, or in the data file that is named there."""

import json
import re
from functools import cache

import pytest

from tests.support.figures import LOOKS_MEASURED, ROOT, report, said, words

FOLDER = ROOT / "docs" / "design"
PAGES = [f"docs/design/{page.name}" for page in sorted(FOLDER.glob("*.md"))] + ["emulator/docs/design.md"]
DATA = re.compile(r"`([a-z0-9-]+)\.json`")
MORE = re.compile(
    r"\d[\d.,]* (?:us )?(?:for|to|against) \d+(?:\.\d+)?(?![\d.]* ?(?:rows|ranks|GPUs|elements))|"
    r"(?<![\w.-])(?<!torch )(?<!cuDNN )\d+\.\d+(?![\w.])"
)
"""What looks measured on these pages, in addition: either number of a pair, and every decimal."""
RESULTS = ROOT / "benchmarks" / "results"
PROVENANCE = {"device", "date", "commit", "compared"}
"""Fields of a data file whose `figures` pages quote, in addition to them."""


def ratios(name, way, results="results", where=lambda _: True):
    return [one["ratio"][way] for one in report(name)[results] if way in one["ratio"] and where(one)]


def of_few_rows(result):
    """Rows whose kernels differ in nothing but their launch."""
    other_kernel = {("gemm_reduce_scatter", 16), ("all_gather_gemm", 16)}
    return result["m"] <= 128 and (result["op"], result["m"]) not in other_kernel


def instructions():
    """From a flag that is seen to the first load, of kernels that receive tiles."""
    every = [kernel for name, kernel in report("critical-path").items() if not re.search("AG-GEMM|,", name)]
    found = [kernel["flag acquired -> first load"]["instructions"] for kernel in every]
    return f"{min(found)} to {max(found)}"


def four_virtual_ranks(result):
    return result["case"] == "ag 512 8192 4096 P4"


def decomposed():
    seconds = [one["graph"]["seconds"] for one in report("h200x2-all-gather")["results"]]
    return [one["decomposed"] / one["fused"] for one in seconds]


def slices(many_columns):
    return ratios("h200x2-k-slices", "slices", where=lambda one: (one["n"] == 28672) == many_columns)


def joined(columns):
    """Times of the fastest kernel that joins shards, of torch's."""
    results = [one["us"] for one in report("h200x2-few-rows-gathers")["results"] if columns(one["n"])]
    return [min(us for name, us in one.items() if name != "torch") / one["torch"] for one in results]


def gathered_list(variant):
    """Returns the times of lists of weights in one kernel, relative to those of a variant."""
    every = [one["graph"]["us"] for one in report("h200x2-gathered-lists")["results"]]
    return [times["list"] / times[variant] for times in every]


def decomposed_lists():
    every = [one["graph"]["us"] for one in report("h200x2-list-choices")["results"]]
    return [times["list decomposed"] / times["list fused"] for times in every]


def constants():
    return json.loads((ROOT / "src/overlap_gemm/tuning/machines/h200.json").read_text())


def host(way):
    us = constants()["host"][way] * 1e6
    return f"{us:.1f}" if us < 50 else f"{us:.0f}"


def float8(*ways, to=None, least=512):
    """The best of some kernels: their ratios to torch's row-wise fast product, or to another's time."""
    shapes = [one for one in report("h200-fp8-gemm")["shapes"] if one["shape"][0] >= least]
    names = [f"sm_90a_{way}" for way in ways]
    if to is None:
        return [min(one["ratio"][name] for name in names) for one in shapes]
    return [min(one["us"][name] for name in names) / one["us"][to] for one in shapes]


def at_the_goal():
    """TFLOP/s of our best kernel with scales of blocks, and DeepGEMM's."""
    [us] = [one["us"] for one in report("h200-fp8-gemm")["shapes"] if one["shape"] == [4096, 7168, 16384]]
    best = min(us[f"sm_90a_{name}"] for name in OF_BLOCKS)
    return [2e-6 * 4096 * 7168 * 16384 / found for found in (best, us["DeepGEMM"])]


def few_rows_float8():
    [shape] = [one for one in report("h200-fp8-gemm")["shapes"] if one["shape"][0] == 64]
    return min(ratio for name, ratio in shape["ratio"].items() if "swap_ab" in name)


def roof(way):
    [cube] = [one for one in report("h200-fp8-roof")["results"] if one["m"] == one["n"] == one["k"] == 8192]
    return cube["us"][way]


def own_last(op):
    """Of two virtual ranks, each of two runs."""
    every = [one for one in report("h200-virtual-own-last")["results"] if one["op"] == op]
    return [ratio for one in every for ratio in one["ratio"].get("own last", [])]


def to_slots(way):
    every = [one["graph"]["us"] for one in report("h200x2-all-to-all-copies")["results"]]
    return said([us[way] / us["slots"] for us in every])


def since_one_receive_role():
    return [one["default to before"] for one in report("h200-virtual-own-last")["results"]]


def without_the_word(result):
    return re.fullmatch(r"gemm (8192|2048) 8192 2048", result["case"])


NAMES = ("c-cu12-name", "d-cu13-name")
FAST = "pingpong_128x128_c2x1_e4m3_obf16_sbf16_scale_fast"
COOPERATIVE = ("128x256_c2x1", "128x256_c1x2", "128x128_c2x1", "128x128_c1x1")
PROMOTED = [f"cooperative_{tile}_e4m3_obf16_sbf16_scale" for tile in COOPERATIVE]
OF_BLOCKS = [f"cooperative_{tile}_e4m3_obf16_sbf16_r8q2_b1x128x128" for tile in COOPERATIVE[:2]]
OF_BLOCKS += [f"cooperative_{tile}_e4m3_obf16_sbf16_b1x128x128" for tile in COOPERATIVE[2:]]
FIGURES = {
    "docs/design/tails.md": [
        lambda: f"now there are {instructions()} (`critical-path.json`",
        lambda: (
            said(ratios("h200-critical-path", "b-now", where=lambda one: not four_virtual_ranks(one)))
            + " of the time before of every call but one"
        ),
        lambda: f"takes {said(since_one_receive_role())} of the time before on one H200",
    ],
    "docs/design/all-gather.md": [
        lambda: "{:.2f} of the time with four virtual ranks".format(
            *ratios("h200-critical-path", "b-now", where=four_virtual_ranks)
        ),
        lambda: f"these kernels takes {said(joined(lambda n: n >= 10240))} of `torch`'s time",
        lambda: f"With 5120 it takes {said(joined(lambda n: n == 5120))}",
        lambda: (
            f"{said(gathered_list('joined'))} of one joined weight's time, {said(gathered_list('torch'))} "
            "of `torch`'s"
        ),
        lambda: f"`decomposed` multiplies each: {said(decomposed_lists())} of the kernel's",
        lambda: f"it takes {said(decomposed())} of the fused kernel's time in graphs",
        lambda: f"A gate costs about {constants()['gate'] * 1e6:.0f} us between",
        lambda: f"it pays {constants()['shard_host'] * 1e6:.0f} us of host time a shard (`shard_host`)",
    ],
    "docs/design/not-adopted.md": [
        lambda: f"{said(ratios('h200x2-symmetric-output', 'symmetric'))} of the default's time on two H200",
        lambda: (
            f"{said(ratios('h200x2-own-last', 'own last'))} of the default's time on two H200, less at "
            f"{sum(one < 1 for one in ratios('h200x2-own-last', 'own last'))} of "
            f"{len(ratios('h200x2-own-last', 'own last'))} shapes"
        ),
        lambda: (
            f"{said(own_last('gemm_reduce_scatter'))} of a reduce-scatter's time, "
            f"{said(own_last('gemm_all_reduce'))} of a two-shot all-reduce's"
        ),
        lambda: (
            f"{said(ratios('h200x2-publisher', 'publisher'))} of the default's time on two H200, with "
            f"tiles of 64x128 {said(ratios('h200x2-publisher', '64x128 publisher'))}"
        ),
        lambda: (
            f"{to_slots('own')} of the default's time on two H200; peers' tiles not copied either, as if "
            f"outputs were symmetric: {to_slots('skip')}"
        ),
        lambda: "{:.2f} of the fused kernel's time for 128 x 28672 x 8192".format(*slices(True)),
        lambda: f"other {len(slices(False))} shapes {said(slices(False))}",
    ],
    "docs/design/few-rows.md": [
        lambda: f"expects at most {constants()['ar_gain']} of the time",
        lambda: (
            "without a cluster reaches {:.2f} of the best rate on large cubes, and {:.2f} where all".format(
                *(constants()[of]["pingpong 128x128 1x1"] for of in ("efficiency", "one_wave"))
            )
        ),
        lambda: (
            f"{said(ratios('h200x2-dependent', 'dependent', where=of_few_rows))} of the time on two H200; "
            "with the weights' first tiles loaded before the wait, on request, "
            f"{said(ratios('h200x2-dependent', 'dependent weights', where=of_few_rows))} ("
        ),
    ],
    "docs/design/fp8.md": [
        lambda: (
            f"{2 * 8192**3 / roof('row fast') / 1e6:.0f} TFLOP/s, "
            f"{roof('bf16') / roof('row fast'):.2f} times bfloat16's speed"
        ),
        lambda: f"without promotion take {said(float8(FAST))} of that product's time from 512 rows on",
        lambda: f"with promotion {said(float8(*PROMOTED))} (the better one of each",
        lambda: f"{said(float8(*PROMOTED, to='torch row-wise'))} of torch's row-wise product with promotion",
        lambda: f"they take {said(float8(*OF_BLOCKS, to='torch blocks'))} of the time of torch's",
        lambda: f"and {said(float8(*OF_BLOCKS, to='DeepGEMM'))} of DeepGEMM's from 512 rows on",
        lambda: "{:.0f} TFLOP/s at 4096 x 7168 x 16384, where DeepGEMM reaches {:.0f}".format(*at_the_goal()),
        lambda: f"`swap_ab` takes {few_rows_float8():.2f}.",
    ],
    "docs/design/host.md": [
        lambda: (
            f"takes {host('fused')} us of host time, its launch included. `torch.mm` takes "
            f"{host('product')} us, torch's two calls {host('torch')} us "
            f"and `sequential` {host('sequential')} us"
        ),
    ],
    "docs/design/facts.md": [
        lambda: f"read a weight at {constants()['swap_ab_stream']:.2f} of the memory's rate",
        lambda: (
            f"take {said(ratios('h200-flavours', 'b-cu13'))} of each other's time over "
            f"{len(report('h200-flavours')['results'])} cases"
        ),
        lambda: (
            "kernel takes "
            + said([one for way in NAMES for one in ratios("h200-flavours", way, where=without_the_word)])
            + " of the time at K = 2048"
        ),
    ],
}
NOT_TIMED = {
    ("docs/design/facts.md", "12.9"): "of ptxas",
    ("docs/design/facts.md", "13.4"): "of ptxas",
    ("docs/design/fp8.md", "256.03125"): "256 and 2^-5",
    ("docs/design/fp8.md", "13 times"): "of 2^13",
    ("docs/design/testing.md", "137 of 150 "): "checked by test_host_mutations.py",
}
"""What looks like a measured figure and is none, or is checked by another test."""


def numbers_in(data):
    """Numbers anywhere in a tree of lists and dictionaries."""
    if isinstance(data, dict | list):
        for one in data.values() if isinstance(data, dict) else data:
            yield from numbers_in(one)
    elif isinstance(data, int | float):
        yield float(data)


@cache
def quoted():
    """Numbers of each data file that pages quote."""
    files = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    return {name: set(numbers_in(file["figures"])) for name, file in files.items() if "figures" in file}


def blocks(page):
    """Paragraphs, items of lists and rows of tables: a figure's data file is named within the same one."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    return re.split(r"\n\s*\n|\n(?=\s*(?:- |\| |\d\. ))", text)


def is_recorded(figure, names):
    """Returns whether one of the data files has all numbers of a figure."""
    numbers = {float(one.replace(",", "")) for one in re.findall(r"\d+(?:[.,]\d+)*", figure)}
    return any(numbers <= quoted().get(name, set()) for name in names)


@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page, every in FIGURES.items() for i in range(len(every))]
)
def test_a_figure_is_what_was_measured(page, number):
    figure = FIGURES[page][number]()
    assert figure in words(page), f"{page} should say: {figure}"


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_without_its_data(page):
    without = []
    for block in blocks(page):
        text, names = " ".join(block.split()), DATA.findall(block)
        for figure in FIGURES.get(page, []):
            text = text.replace(figure(), "")
        without += [
            (found, text)
            for looks in (LOOKS_MEASURED, MORE)
            for found in looks.findall(DATA.sub("", text))
            if (page, found) not in NOT_TIMED and not is_recorded(found, names)
        ]
    assert not without, f"{page}: no test computes these, and no data file there has them: {without}"


def test_what_is_no_measured_figure_is_there():
    for page, figure in NOT_TIMED:
        assert figure in words(page), (page, figure)


def test_every_measurement_has_its_provenance_and_is_quoted():
    documents = [ROOT / "benchmarks/README.md", *(ROOT / "docs").rglob("*.md"), *map(ROOT.joinpath, PAGES)]
    named = {name for page in documents for name in DATA.findall(page.read_text())}
    for name in quoted():
        file = json.loads((RESULTS / f"{name}.json").read_text())
        assert file.keys() == PROVENANCE | {"figures"}, name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", file["date"]) and re.fullmatch("[0-9a-f]{7}", file["commit"])
        assert name in named, f"no page quotes {name}.json"
    for page in PAGES:
        for name in DATA.findall((ROOT / page).read_text()):
            assert (RESULTS / f"{name}.json").exists(), f"{page}: {name}"


def test_tests_and_files_that_are_named_exist():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", text):
            assert f"def {test}(" in (ROOT / "tests" / "emulated" / file).read_text(), f"{page}: {test}"
        for file in re.findall(r"`((?:tests|src|benchmarks|emulator)/[\w/.-]+)`", text):
            assert (ROOT / file).exists(), f"{page}: {file}"
        for file in re.findall(
            r"`((?:kernels|runtime|device|backends|transports|spec|tuning)/[\w/]+\.\w+)`", text
        ):
            assert (ROOT / "src" / "overlap_gemm" / file).exists(), f"{page}: {file}"


def test_the_timelines_figures_are_measured():
    """In CONTRIBUTING.md, the only page with the picture."""
    [timeline] = re.findall(r"us after the first CTA.*?```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    found = re.findall(r"(\d+\.\d) +[a-z]", timeline)
    assert len(found) == 6 and set(map(float, found)) <= quoted()["h200x2-tail"], found
