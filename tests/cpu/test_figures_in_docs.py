"""Figures of speed in README, docs and benchmarks/README.md are computed from the data, and say its date."""

import re
import shutil
import subprocess
from statistics import mean, median
from unittest import mock

import pytest
import torch

from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.peer_access import PeerAccess
from overlap_gemm.backends.select import choose
from tests.support.figures import LOOKS_MEASURED, ROOT, report, said, tables, words
from tests.support.problems import problem

DOCUMENTS = (
    "README.md",
    "benchmarks/README.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
)
MODES = {"graph": True, "eager": False}
NO_WAYS = ("bound", "product", "collective", "auto")
"""What is timed beside the ways to carry an op out."""


def against(name, mode, least=0, most=1 << 30, op=None):
    """`auto`'s time beside the faster of torch's own ways, where torch has one."""
    found = [
        result[mode]["ours"]["auto"]["against"]
        for result in report(name)["results"]
        if least <= result["m"] <= most and op in (None, result["op"])
    ]
    assert None not in found
    return found


def epilogue(way, case=""):
    """Returns the ratios of a way to apply an epilogue to the op alone."""
    results = report("h200x2-epilogues")["results"]
    return [one["ratio"][way] for one in results if way in one["ratio"] and case in one["case"]]


def blocks_beside(*parts):
    """Returns the times of `ParallelBlock`, relative to those of other calls together."""
    every = [one["graph"]["us"] for one in report("h200x2-block")["results"]]
    return [us["block"] / sum(us[part] for part in parts) for us in every]


def norms_beside_compiled():
    in_kernel, after = epilogue("epilogue, norm"), epilogue("compiled", "residual")
    return [one / other for one, other in zip(in_kernel, after, strict=True)]


def of_squares(now):
    """Returns the ratios of calls with sums of squares to the op alone, now or before."""
    results = report("h200-virtual-row-values")["results"]
    return [(one if now else one["before"])["ratio"]["squared"] for one in results]


def slower(found):
    return f"{sum(one > 1 for one in found)} of {len(found)} shapes"


def row(name, *rows):
    """Captured and eagerly, as README's table has them."""
    found = [against(name, mode, *rows) for mode in MODES]
    return " | ".join(f"{said(one)} ({slower(one)} are slower)" for one in found)


def beside_every_way(mode, *names):
    """`auto`'s time beside the fastest of all ways that were timed, ours among them."""
    every = [result[mode]["seconds"] for name in names for result in report(name)["results"]]
    return [
        seconds["auto"] / min(time for way, time in seconds.items() if way not in NO_WAYS)
        for seconds in every
    ]


def captured_everywhere():
    """Returns `auto`'s captured times relative to the fastest way, of all tables of two H200."""
    return beside_every_way("graph", "h200x2-shapes", "h200x2-e4m3", "h200x2-all-to-all")


def chosen_otherwise(name, mode):
    """Shapes for which today's model takes another way than the one that was timed as `auto`."""
    different, results = 0, report(name)["results"]
    for result in results:
        op, m, n, k = (result[key] for key in ("op", "m", "n", "k"))
        asked = problem(
            op, m, n, k, torch.bfloat16, "cuda", result["ranks"],
            peer_access=PeerAccess("sm_90a", 132, None), captured=MODES[mode],
        )  # fmt: skip
        with mock.patch.object(Fused, "why_not", return_value=None):
            different += choose(asked).backend.name != result[mode]["ours"]["auto"]["taken"]
    return f"{different} of {len(results)}"


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def errors(name, way):
    """How far the model is from what was measured, captured."""
    return [abs(result["graph"]["ours"][way]["error"]) for result in report(name)["results"]]


def layer(tokens):
    """Time relative to the fastest of torch's ways, which was asynchronous tensor parallelism each time."""
    every = [r for r in report("h200x4-layer")["results"] if (r["model"], r["rows"]) == ("70B", tokens)]
    assert all(
        max(r["ours_against"], key=lambda way: r["ours_against"][way]["ratio"]) == "async-tp" for r in every
    )
    return [r["ours_against"]["async-tp"]["ratio"] for r in every]


def decomposed_beside_sequential():
    return [r["speedup"] for r in report("h200x8-all-gather")["results"] if r["backend"] == "decomposed"]


def collective_beside_product():
    every = [r["seconds"] for name in ("prefill", "decode") for r in report(f"cpu-2-ranks-{name}")["results"]]
    return [seconds["comm"] / seconds["gemm"] for seconds in every]


def beyond_the_models_bytes():
    """What ranks send beside what the model says, less one: products of bfloat16."""
    m, n, k = report("scaling")["sizes"]
    travels = {"all_gather_gemm": m * k, "gemm_all_reduce": 2 * m * n}
    return [
        ranks[p]["bytes"] / (travels.get(op, m * n) * 2 * (int(p) - 1) / int(p)) - 1
        for ops in report("scaling")["results"].values()
        for op, ranks in ops.items()
        for p in ranks.keys() - {"1"}
    ]


def float8_beside_every_way():
    """Times of `auto` relative to the fastest of torch's backends, also those that do not promote sums."""
    return against("h200x2-e4m3", "graph")


def float8_beside_bfloat16():
    """Times of the fused ops relative to theirs with bfloat16 operands, of shapes that both files have."""

    def times(name):
        return {
            tuple(result[key] for key in ("op", "m", "n", "k")): result["graph"]["seconds"]["fused"]
            for result in report(name)["results"]
        }

    bfloat16 = times("h200x2-shapes")
    return [time / bfloat16[key] for key, time in times("h200x2-e4m3").items() if key in bfloat16]


def with_product(m):
    """Microseconds of rows quantised eagerly and multiplied, of the product alone, and in bfloat16."""
    [found] = [
        one["us"]
        for one in report("h200-quantize")["shapes"]
        if one.get("shape", [0])[0] == m and one["shape"][2] != 3584
    ]
    return [f"{found[way]:.0f}" for way in ("quantised eagerly, and product", "product alone", "bfloat16")]


def step(way):
    """Of a training step, to that of bfloat16, compiled if that is."""
    return report("h200-train-step")["ways"][way]["step_ratio"]


def quantised(*ways):
    """Microseconds of 8192 x 8192."""
    [shape] = [
        s for s in report("h200-quantize")["shapes"] if (s.get("rows"), s.get("width")) == (8192, 8192)
    ]
    return [f"{shape['us'][way]:.0f}" for way in ways]


def differing():
    """Returns how many elements have other bits than promised: between batches, and than one rank's."""
    every = [result["differing"] for result in report("h200x2-invariance")["results"]]
    return sum(one[promise][promise] for one in every for promise in ("batch", "ranks"))


def of_graphs(file, variant, op=None):
    """Returns the ratios of a variant to the first one of `benchmarks/one_kernel.py`."""
    return [r["graph"]["ratio"][variant] for r in report(file)["results"] if op in (None, r["op"])]


def of_norms(variant):
    """Returns the times of all-reduces of up to 64 rows with a norm, relative to the op alone."""
    every = [r["graph"]["seconds"] for r in report("h200x2-norms")["results"] if r["m"] <= 64]
    return [seconds[variant] / seconds["fused, alone"] for seconds in every]


def of_one_kernel(variant):
    """Returns a list's times with x's gradient by one kernel, relative to those of a variant."""
    every = [result["graph"]["us"] for result in report("h200x2-weight-list-gradients")["results"]]
    return [times["one"] / times[variant] for times in every]


def tokens(way, file="h200x2-tokens"):
    return f"{report(file)['ways'][way]['tokens_per_second'] / 1000:.1f}"


FIGURES = {
    "docs/jobs/finetune.md": [
        lambda: "{}; torch's styles {}, compiled as async TP {}; transformers' own {}; FSDP2 {}".format(
            *(
                tokens(way, "h200x2-tokens-8B")
                for way in ("ours", "torch", "async-tp", "transformers", "fsdp2")
            )
        ),
    ],
    "docs/jobs/pretrain.md": [
        lambda: (
            f"{tokens('ours')}, compiled {tokens('ours, compiled')}; torch's styles {tokens('torch')}, as "
            f"async TP {tokens('async-tp')} (with our ops {tokens('async-tp, ours')}); transformers' own "
            f"{tokens('transformers')}; FSDP2 {tokens('fsdp2')}, compiled {tokens('fsdp2, compiled')} "
        ),
    ],
    "README.md": [
        lambda: (
            f"take {said(against('h100x2-shapes', 'graph'))} of the time of the fastest of torch's ways "
            f"({slower(against('h100x2-shapes', 'graph'))} are slower)"
        ),
    ],
    "docs/index.md": [
        lambda: f"| two H100 | 512 to 8192 | {row('h100x2-shapes', 512)} |",
        lambda: f"| | below 512 | {row('h100x2-shapes', 0, 511)} |",
        lambda: f"| four H200 | 512 to 8192 | {row('h200x4', 512)} |",
        lambda: f"| | below 512 | {row('h200x4', 0, 511)} |",
        lambda: (
            f"today's model chooses otherwise in {chosen_otherwise('h200x4', 'graph')} of the latter's shapes"
        ),
        lambda: (
            "take {:.2f} of the time of the fastest of torch's ways (asynchronous tensor parallelism, "
            "compiled), and {:.2f} with backward. ".format(*layer(8192))
            + "Of 2048 tokens they take {:.2f} and {:.2f}.".format(*layer(2048))
        ),
        lambda: (
            f"take {said(float8_beside_every_way())} of it on two H200, captured "
            f"({slower(float8_beside_every_way())} are slower)"
        ),
    ],
    "benchmarks/README.md": [
        lambda: (
            f"Captured, `auto` takes {said(against('h100x2-shapes', 'graph'))} of the "
            "time of the fastest of torch's ways "
            f"({slower(against('h100x2-shapes', 'graph'))} are slower). Eagerly it takes "
            f"{said(against('h100x2-shapes', 'eager', 2048))} from 2048 rows on "
            f"({slower(against('h100x2-shapes', 'eager', 2048))} are slower). Below it takes "
            f"{said(against('h100x2-shapes', 'eager', 0, 2047))} "
            f"({slower(against('h100x2-shapes', 'eager', 0, 2047))} are slower)"
        ),
        lambda: (
            f"within 10 % in {sum(error <= 0.1 for error in errors('h200x4', 'fused'))} of "
            f"{len(errors('h200x4', 'fused'))} shapes, "
            f"at most {100 * max(errors('h200x4', 'fused')):.0f} % off"
        ),
        lambda: (
            "within 5 % of the fastest measured way in "
            f"{sum(one <= 1.05 for one in beside_every_way('graph', 'h200x4'))} of "
            f"{len(report('h200x4')['results'])} shapes, "
            f"at worst {max(beside_every_way('graph', 'h200x4')):.2f} of its time"
        ),
        lambda: f"Today's model chooses otherwise in {chosen_otherwise('h200x4', 'graph')} of these shapes",
        lambda: (
            f"below 512 rows {said(against('h200x4', 'eager', 0, 511))} of the time of the faster of torch's "
            f"ways ({slower(against('h200x4', 'eager', 0, 511))} are slower)"
        ),
        lambda: (
            f"`auto` takes at most {max(beside_every_way('graph', 'h200x2-shapes')):.2f} of the time of the "
            f"fastest measured way; it is within 2 % of it in "
            f"{sum(one <= 1.02 for one in beside_every_way('graph', 'h200x2-shapes'))} of "
            f"{len(report('h200x2-shapes')['results'])} shapes. Of these, 8-bit and all-to-all shapes it is "
            f"within 3 % in {sum(one <= 1.03 for one in captured_everywhere())} of "
            f"{len(captured_everywhere())} (median {median(captured_everywhere()):.2f}). It takes "
            f"{said(against('h200x2-shapes', 'graph'))} of the time of the faster of torch's own; the model "
            f"errs by {100 * mean(errors('h200x2-shapes', 'auto')):.0f} % in the mean"
        ),
        lambda: (
            f"Today's model chooses otherwise in {chosen_otherwise('h200x2-shapes', 'graph')} of these shapes"
        ),
        lambda: f"of each of {len(report('h200x2-kernels')['results'])} calls",
        lambda: f"the bits of {differing()} elements differ: between batches with **batch**",
        lambda: f"had {said(decomposed_beside_sequential())} of the speed of `sequential` (`h200x8-",
        lambda: f"within {100 * max(map(abs, beyond_the_models_bytes())):.1f} % (flags;",
        lambda: f"took {said(collective_beside_product())} of the time of the product alone",
    ],
    "docs/fp8.md": [
        lambda: (
            "took {} us on one H200 eagerly, {} compiled, and {} by torch's operations; a copy of as many "
            "bytes takes {}".format(
                *quantised("eager", "compiled", "eager, torch's operations", "copy of as many bytes")
            )
        ),
        lambda: "(`dynamic=True`) it took {}.".format(*quantised("compiled for any shape")),
        lambda: (
            "8192 x 8192 x 8192 took {} us, the product alone {}, bfloat16's {}; ".format(*with_product(8192))
            + "512 x 8192 x 7168 {}, {} and {}.".format(*with_product(512))
        ),
        lambda: (
            f"took {step('float8'):.2f} of bfloat16's time with `Float8()` and {step('float8, wgrad'):.2f} "
            f"with `Float8(wgrad=True)`; compiled {step('float8, compiled'):.2f} and "
            f"{step('float8, wgrad, compiled'):.2f} of bfloat16's, compiled"
        ),
        lambda: (
            f"take {said(float8_beside_every_way())} of the time of the fastest of torch's ways "
            f"({slower(float8_beside_every_way())} are slower)"
        ),
        lambda: f"They take {said(float8_beside_bfloat16())} of their time with bfloat16",
    ],
    "docs/epilogues.md": [
        lambda: (
            f"a residual takes {said(epilogue('residual'))} of the op's time, "
            f"with SwiGLU {said(epilogue('epilogue', 'swiglu'))}"
        ),
        lambda: (
            f"takes {said(blocks_beside('styles'))} of the time of the same layer by styles on two H200. "
            f"That is {said(blocks_beside('qkv', 'o', 'gate_up', 'down'))} of its four ops alone"
        ),
        lambda: f"takes longer than compiled operations after the op in {slower(norms_beside_compiled())}",
        lambda: (
            f"Sums of squares now take {said(of_squares(True))} of the op's time "
            f"(before: {said(of_squares(False))}) on two virtual ranks"
        ),
        lambda: (
            f"1 to 64 rows take {said(of_norms('fused'))} of the op's time, compiled operations after it "
            f"{said(of_norms('fused, norm, compiled'))}"
        ),
        lambda: (
            "a residual takes {} of the op's time, with sums of rows {}; SwiGLU {}. "
            "`swiglu_e4m3_blocks` takes {}, compiled operations after the op {}".format(
                *(
                    said(of_graphs("h200x2-scaled-epilogues", name, op))
                    for name, op in (
                        ("add_residual", "gemm_reduce_scatter"),
                        ("add_residual_squared", "gemm_reduce_scatter"),
                        ("swiglu", "all_gather_gemm"),
                        ("swiglu_e4m3_blocks", "all_gather_gemm"),
                        ("compiled swiglu_e4m3_blocks", "all_gather_gemm"),
                    )
                )
            )
        ),
    ],
    "docs/all-to-all.md": [
        lambda: (
            f"takes {said(against('h200x2-all-to-all', 'graph', op='gemm_all_to_all'))} of the time of "
            "torch's way (product, permute, NCCL), captured, and "
            f"{said(against('h200x2-all-to-all', 'eager', op='gemm_all_to_all'))} eagerly"
        ),
        lambda: (
            f"{said(against('h200x2-all-to-all', 'graph', op='all_to_all_gemm'))} captured, and "
            f"{said(against('h200x2-all-to-all', 'eager', op='all_to_all_gemm'))} eagerly"
        ),
        lambda: f"{said(of_graphs('h200x2-weight-lists', 'list'))} of the time of one for each weight",
        lambda: (
            f"with x's gradient {said(of_one_kernel('three'))}, and {said(of_one_kernel('torch'))} of torch's"
        ),
    ],
    "docs/evidence.md": [
        lambda: (
            f"all ops {said(against('h200x4', 'graph', 512))} of the faster of torch's ways from 512 rows on"
        ),
    ],
}
SOURCES = {
    "README.md": ["h100x2-shapes"],
    "docs/index.md": ["h100x2-shapes", "h200x4"],
    "benchmarks/README.md": [
        "h200x4", "h200x4-layer", "h200x2-layer", "h200x2-shapes", "h200x2-e4m3",
        "h200x2-invariance", "h200x2-all-to-all", "h200x2-epilogues",
        "h200x8-reduce-scatter-graphs", "cpu-2-ranks-decode", "h100x2-shapes", "emulator-speed",
    ],
    "docs/jobs/finetune.md": ["h200x2-tokens-8B"],
    "docs/jobs/pretrain.md": ["h200x2-tokens"],
    "docs/all-to-all.md": ["h200x2-all-to-all", "h200x2-weight-lists", "h200x2-weight-list-gradients"],
    "docs/epilogues.md": ["h200x2-epilogues", "h200x2-scaled-epilogues", "h200x2-norms", "h200x2-block"],
    "docs/evidence.md": ["h200x4"],
    "docs/fp8.md": ["h200x2-e4m3", "h200-quantize", "h200-train-step"],
}  # fmt: skip
NOT_TIMED = {
    ("docs/fp8.md", "3 %"): "checked by tests/multi/test_float8.py",
    ("docs/models.md", "3 %"): "tests/multi/test_model_optimizers.py holds it",
    ("docs/models.md", "1 times"): "tests/multi/test_model_loading.py holds it",
    ("docs/pipelines.md", "12 KB"): "the product that follows",
    ("docs/pipelines.md", "900 GB/s"): "NVLink 5's data sheet",
    ("docs/pipelines.md", "2 us"): "an assumption, said as one",
    ("docs/invariance.md", "9 of 10 "): "of one CPU, as an example of what varies",
    ("docs/stability.md", "3.11"): "the Python of the suite, and of a trial",
    ("docs/stability.md", "3.10"): "the Python of a trial",
    ("docs/stability.md", "3.13"): "the Python of a trial",
    ("docs/invariance.md", "4 us"): "tests/cpu/test_model.py holds it",
    ("docs/planner.md", "9 %"): "tests/cpu/test_model.py holds it",
    ("docs/planner.md", "15 %"): "tests/cpu/test_model.py holds it",
    ("docs/planner.md", "12 %"): "tests/cpu/test_model.py holds it",
}
"""What looks like a measured figure and is none, or is a bound of another test."""


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
    assert found[1] == report(name)["machine"].get("date", found[1])
    whole = shutil.which("git") and git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    if whole:  # a whole checkout
        assert git("merge-base", "--is-ancestor", found[2], "HEAD").returncode == 0, found[2]


def test_tables_are_what_was_measured():
    """Of h200x4.json the page has no table: it names the command that prints it."""
    text = (ROOT / "benchmarks/README.md").read_text()
    assert len(tables.COMMENT.findall(text)) == text.count("<!-- table:") >= 12
    assert text == tables.rendered(text), "python benchmarks/tables.py writes them anew"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_figure_is_without_its_data(document):
    text = re.sub(r"```.*?```", "", tables.COMMENT.sub("", (ROOT / document).read_text()), flags=re.DOTALL)
    text = " ".join(text.split())
    for figure in FIGURES.get(document, []):
        text = text.replace(figure(), "")
    left = [found for found in LOOKS_MEASURED.findall(text) if (document, found) not in NOT_TIMED]
    assert not left, f"{document}: no test computes {left}"


def test_what_is_no_measured_figure_is_there():
    for document, figure in NOT_TIMED:
        assert figure in words(document), (document, figure)
