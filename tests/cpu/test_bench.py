"""`overlap-gemm bench` in a world of one; tests/multi runs it on several ranks."""

import importlib
import io
import json
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

import overlap_gemm
from overlap_gemm.backends.scales import mx_scales as mx
from overlap_gemm.cli import app
from overlap_gemm.cli.command_options import epilogue_named
from overlap_gemm.runtime.group import Group, resolve
from overlap_gemm.spec import OPS
from overlap_gemm.testing.workload import Scales, Workload
from overlap_gemm.tuning.driver import Load
from overlap_gemm.tuning.prediction import Facts, predict
from overlap_gemm.tuning.timing import Replay, Timings
from overlap_gemm_tools import baselines
from overlap_gemm_tools.bench import _those_that_work, read_shapes
from overlap_gemm_tools.epilogue_calls import EpilogueCalls
from overlap_gemm_tools.results import EAGER, GRAPH, Measured, Skipped, row, summary, table
from tests.support.ops import SHARDED

bench_module = importlib.import_module("overlap_gemm_tools.bench")

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes.json"


@pytest.fixture(autouse=True)
def _leave_the_world():
    yield
    overlap_gemm.finalize()


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_data_table_and_picture(tmp_path):
    data, picture = tmp_path / "new" / "out.json", tmp_path / "pictures" / "out.png"
    result = bench("--m", 6, "--m", 9, "--n", 8, "--k", 4, "--rounds", 2, "--json", data, "--plot", picture)
    assert result.exit_code == 0, result.output
    report = json.loads(data.read_text())
    assert [(r["op"], r["m"]) for r in report["results"]] == [(op, m) for op in OPS for m in (6, 9)]
    seconds = [r["eager"]["seconds"] for r in report["results"]]
    assert all(time > 0 for times in seconds for time in times.values())
    assert all(times["bound"] == times["product"] for times in seconds), "a rank alone sends nothing"
    assert set(seconds[0]) == {"product", "bound", "auto", "decomposed"}
    assert report["results"][0]["eager"]["ours"]["decomposed"]["taken"] == "decomposed"
    assert report["machine"]["ranks"] == 1
    assert {"overlap_gemm", "date", "sms"} <= set(report["machine"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "best other" in result.output


def test_rounds_that_differ_are_flagged_and_the_load_of_each_is_kept():
    steady, unsteady = (10e-6, 10.1e-6, 10e-6, 10e-6), (10e-6, 12e-6, 9e-6, 14e-6)
    timings = Timings({"product": steady, "auto": unsteady, "torch": steady}).with_bound(0.0)
    measured = Measured(["auto"], None, [], {EAGER: {"auto": "torch"}}, {EAGER: timings})
    measured.loads[EAGER] = [Load(1500, 690), Load(1400, 700)]
    result = row(Workload("", "gemm_all_reduce", 8, 8, 8, torch.float32), measured, 2)
    assert result[EAGER]["unsteady"] == ["auto"]
    assert result[EAGER]["clocks_mhz"] == [1500, 1400] and result[EAGER]["power_w"] == [690, 700]
    report = {"machine": {"ranks": 2, "processor": "a GPU"}, "results": [result]}
    console = Console(file=io.StringIO(), width=200)
    console.print(table(report | {"link_rates": {}, "protocol": ""}))
    text = console.file.getvalue()
    assert "11.0~" in text and "10.0~" not in text


def test_the_committed_shapes_can_be_read_and_m_overrides_theirs():
    shapes = list(read_shapes(SHAPES, None, torch.float32))
    assert {shape.name.split()[0] for shape in shapes} == {"Llama-8B", "Llama-70B"}
    assert {shape.m for shape in shapes} == {1, 16, 128, 512, 2048, 8192}
    assert {shape.op for shape in shapes} == {*SHARDED}
    assert {shape.m for shape in read_shapes(SHAPES, [7], torch.float32)} == {7}


def test_what_was_measured_is_not_lost_with_a_later_shape(tmp_path, monkeypatch):
    honest = bench_module.run

    def run(workload, *arguments):
        if workload.m == 9:
            raise MemoryError("the second shape is too large")
        return honest(workload, *arguments)

    monkeypatch.setattr(bench_module, "run", run)
    data = tmp_path / "out.json"
    sizes = ["--n", 8, "--k", 4, "--rounds", 1, "--op", "gemm_all_reduce"]
    assert bench("--m", 6, "--m", 9, *sizes, "--json", data).exit_code != 0
    assert [result["m"] for result in json.loads(data.read_text())["results"]] == [6]


def test_wrong_arguments_are_named():
    assert "not among" in bench("--op", "gemm").output
    assert bench("--dtype", "int8").exit_code == 2
    assert bench("--shapes", SHAPES, "--only", "no such model").exit_code == 2
    assert "pass --shapes" in bench("--only", "llama").output
    assert bench("--rounds", 0).exit_code == 2
    assert "are for 8-bit operands" in bench("--scales", "rows").output
    assert "is not available" in bench("--backends", "auto,fast").output
    assert "torch is a baseline" in " ".join(bench("--backends", "auto,torch").output.split())


@pytest.mark.parametrize("scales", get_args(Scales))
def test_operands_of_8_bits(scales, tmp_path):
    data = tmp_path / "out.json"
    sizes = ["--m", 6, "--n", 272, "--k", 288, "--rounds", 1, "--op", "gemm_all_reduce", "--backends", "auto"]
    result = bench(*sizes, "--dtype", "float8_e4m3fn", "--scales", scales, "--json", data)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(data.read_text())["results"]
    assert (found["dtype"], found["scales"]) == ("float8_e4m3fn", scales)
    assert found["eager"]["seconds"]["auto"] > 0
    assert f"({scales})" in result.output


@pytest.mark.parametrize("scales", get_args(Scales))
def test_8_bit_operands_are_those_of_16_bits_rounded(scales):
    group, cpu, sizes = Group("", 0, 1), torch.device("cpu"), ("", "gemm_reduce_scatter", 70, 200, 288)
    halves = Workload(*sizes, torch.bfloat16).operands(group, cpu)
    found = Workload(*sizes, torch.float8_e4m3fn, scales).operands(group, cpu)
    wanted = {"rows": ((70, 1), (200, 1)), "tensor": ((1, 1), (1, 1)), "blocks": ((70, 3), (2, 3))}
    wanted["mx"] = (3 * 512,), (2 * 3 * 512,)
    assert (found.scale_x.shape, found.scale_w.shape) == wanted[scales]
    for values, scale, exact in zip(found[:2], found[2:], halves[:2], strict=True):
        if scales == "mx":
            scale = mx.rows_of(scale, *values.shape).float().repeat_interleave(32, 1)
        for dim, extent in enumerate(values.shape):
            if scale.shape[dim] not in (1, extent):
                scale = scale.repeat_interleave(128, dim).narrow(dim, 0, extent)
        error = (values.float() * scale - exact.float()).abs()
        assert (error <= 2.0**-4 * exact.float().abs() + 2.0**-10 * scale).all()


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    "op", ["all_gather_gemm", "gemm_all_gather", "gemm_reduce_scatter", "gemm_all_reduce"]
)
def test_operands_are_this_ranks_shards(op, rank):
    x, weight, *_ = Workload("", op, 7, 5, 4, torch.float32).operands(Group("", rank, 3), torch.device("cpu"))
    rows, columns, depth = (3, 3, 1)[rank], (2, 2, 1)[rank], (2, 2, 0)[rank]
    assert (tuple(x.shape), tuple(weight.shape)) == {
        "all_gather_gemm": ((rows, 4), (columns, 4)),
        "gemm_all_gather": ((7, 4), (columns, 4)),
        "gemm_reduce_scatter": ((7, depth), (5, depth)),
        "gemm_all_reduce": ((7, depth), (5, depth)),
    }[op]


DOWN = Workload("down", "gemm_reduce_scatter", 2048, 8192, 8192, torch.bfloat16)


def measured():
    """Two rounds in two modes; the second round is slower, and in it the product exceeds the link."""
    timings = Timings(
        {"product": (1.0, 4.0), "torch": (4.0, 8.0), "torch-symm": (3.0, 8.0), "auto": (2.5, 5.0)}
    )
    found = Measured(["auto", "fused"], link=2.0, skipped=[])
    found.taken = {mode: {"auto": "fused", "fused": "fused"} for mode in (EAGER, GRAPH)}
    found.timings = {EAGER: timings.with_bound(2.0), GRAPH: timings.with_bound(2.0)}
    facts = Facts("gemm_reduce_scatter", 2048, 8192, 8192, "bf16", 4)
    found.predicted = {mode: predict(facts, "sm_90a", 132, mode == GRAPH) for mode in (EAGER, GRAPH)}
    return found


def test_a_row_carries_the_ratios_of_the_rounds():
    result = row(DOWN, measured(), ranks=4)
    eager = result["eager"]
    assert eager["seconds"]["bound"] == 3.0, "median of max(1, 2) and max(4, 2)"
    assert eager["best_other"] == "torch-symm"
    ours = eager["ours"]["auto"]
    assert ours["of_bound"] == pytest.approx((2 / 2.5 + 4 / 5) / 2)
    assert ours["against"] == pytest.approx((2.5 / 3 + 5 / 8) / 2)
    assert ours["against_quartiles"][0] <= ours["against"] <= ours["against_quartiles"][1]
    assert ours["error"] == pytest.approx(ours["predicted"] / 3.75 - 1)
    assert ours["tflops"] == pytest.approx(2 * 2048 * 8192 * 8192 / 4 / 3.75e12)
    assert "fused" not in eager["ours"], "what could not be captured has no row"
    assert eager["predicted"]["bound"] < eager["predicted"]["torch"]


def test_the_table_puts_graphs_above_eager_calls_and_names_what_auto_took():
    results = [row(DOWN, measured(), ranks=4)]
    machine = {"ranks": 4, "processor": "GPU"}
    report = {"machine": machine, "results": results, "protocol": "", "link_rates": {"stores": 3.2e11}}
    console = Console(width=130, record=True, file=io.StringIO())  # seconds make long microseconds
    console.print(table(report))
    text = console.export_text()
    assert "graph / eager" in text and "stores 320 GB/s" in text
    assert text.count("auto: fused") == 2
    assert text.count("GEMM-RS 2048,8192,8192") == 1


def test_the_summary_names_the_shape_that_auto_does_worst():
    good, bad = (row(replace(DOWN, m=m), measured(), ranks=4) for m in (512, 2048))
    bad["graph"]["seconds"] = {**bad["graph"]["seconds"], "torch-symm": 3.0}
    lines = summary({"results": [good, bad]})
    assert [line.split(":")[0] for line in lines] == ["graph", "eager"]
    assert "at least 0.80 of the best measured speed (GEMM-RS 2048,8192,8192), in 1 of 2 shapes" in lines[0]
    assert "at least 1.00 of" in lines[1] and "in 0 of 2 shapes" in lines[1]
    assert "the model errs by 100%" in lines[0], "predicted microseconds, measured seconds"


def chosen(backend):
    return SimpleNamespace(backend=SimpleNamespace(name=backend), epilogue=None)


def test_captured_calls_are_timed_and_predicted_apart_from_eager_ones(monkeypatch):
    """On a CPU, where a graph is the call itself and `auto` under capture is made to take another way."""
    capturing = []

    @contextmanager
    def graph(*_, **__):
        capturing.append(True)
        yield
        capturing.pop()

    monkeypatch.setattr(bench_module.torch.cuda, "graph", graph)
    monkeypatch.setattr(bench_module.torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(bench_module, "captured", lambda call: Replay(mock.Mock(replay=call), calls=8))
    monkeypatch.setattr(
        Workload, "explained", lambda *_: chosen("decomposed" if capturing else "sequential"), raising=True
    )
    small = Workload("", "gemm_reduce_scatter", 8, 8, 8, torch.float32)
    found = bench_module.run(
        small, ["auto"], resolve(""), torch.device("cpu"), 2, (EAGER, GRAPH), {"stores": 1e9, "copies": 2e9}
    )
    assert found.taken == {EAGER: {"auto": "sequential"}, GRAPH: {"auto": "decomposed"}}
    assert found.link == small.facts(1).bytes_out / 2e9
    eager, graph_time = (found.timings[mode].median("auto") for mode in (EAGER, GRAPH))
    assert graph_time < eager, "a replay counts as eight calls, and is one here"


def test_what_fails_is_left_out_with_a_line():
    def fails():
        raise RuntimeError("no such op\nand a log")

    usable, skipped = _those_that_work(DOWN, {"torch": int, "torch-symm": fails}, resolve(""))
    assert list(usable) == ["torch"]
    assert skipped == [Skipped("torch-symm", "2048,8192,8192", "RuntimeError: no such op")]


def test_quack_is_measured_where_it_is_installed(monkeypatch):
    """Not installed with the tests: a stand-in that takes what its `AllGatherRunner` and `gemm` take."""
    workload = Workload("square", "all_gather_gemm", 8, 6, 4, torch.float32)
    x, weight, group = torch.randn(4, 4), torch.randn(3, 4), SimpleNamespace(size=2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert not baselines._quack(workload, x, weight, group)
    whole = torch.randn(8, 4)

    class Runner:
        def __init__(self, rows, depth, dtype, device):
            assert (rows, depth, dtype) == (4, 4, x.dtype)

        @contextmanager
        def gather(self, shard):
            assert shard is x
            yield whole, "arrivals"

    def gemm(a, b, out, c, tiles, *kernel, ag_args):
        assert (c, tiles, kernel, ag_args) == (None, None, (128, 256, 2, 1), "arrivals")
        out.copy_(a @ b.t())

    monkeypatch.setattr(baselines, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.distributed", SimpleNamespace(AllGatherRunner=Runner))
    monkeypatch.setitem(sys.modules, "quack.gemm", SimpleNamespace(gemm=gemm))
    call = baselines._quack(workload, x, weight, group)["quack"]
    for _ in range(2):  # the runner is made once
        torch.testing.assert_close(call(), whole @ weight.t())


@pytest.fixture
def compiled(monkeypatch):
    """Replaces torch.compile by the identity; yields the functions that were to be compiled."""
    functions = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: functions.append(function) or function)
    return functions


@pytest.mark.parametrize(
    "name", ["add_residual", "add_residual_squared", "add_residual_rms_norm", "swiglu", "scale_gathered_rows"]
)
def test_an_epilogue_is_timed_next_to_the_op_alone_and_to_operations_after_it(name, compiled, tmp_path):
    data = tmp_path / "out.json"
    op = "all_gather_gemm" if name in ("swiglu", "scale_gathered_rows") else "gemm_reduce_scatter"
    sizes = ["--m", 6, "--n", 128, "--k", 8, "--rounds", 2, "--op", op, "--backends", "decomposed"]
    result = bench(*sizes, "--epilogue", name, "--json", data)
    assert result.exit_code == 0, result.output
    report = json.loads(data.read_text())
    (row,) = report["results"]
    assert row["epilogue"] == name and report["skipped"] == []
    ours = row["eager"]["ours"]
    norms = {
        "add_residual_squared": ("", ", eager", ", compiled"),
        "scale_gathered_rows": (", eager", ", compiled"),
        "add_residual_rms_norm": (", eager", ", compiled"),
    }
    ends = ["", ", alone", ", eager", ", compiled", *(f", norm{end}" for end in norms.get(name, ()))]
    assert set(ours) == {f"decomposed{end}" for end in ends}
    assert ours["decomposed, alone"]["of_alone"] == 1
    seconds = row["eager"]["seconds"]
    assert ours["decomposed"]["of_alone"] > 0 and seconds["decomposed, compiled"] > 0
    assert "after the op" in ours["decomposed"]["epilogue"]
    assert len(compiled) == {
        "add_residual_squared": 3,
        "scale_gathered_rows": 2,
        "add_residual_rms_norm": 2,
    }.get(name, 1)
    text = " ".join(result.output.split())
    assert re.search(
        rf"alone [\d.]+ with {name}, [\d.]+ compiled after, [\d.]+ eager after[^;]*; {name}: after", text
    )
    assert ("with compiled norm" in text) == (name in norms)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("all_gather_gemm", "swiglu"),
        ("all_gather_gemm", "scale_gathered_rows"),
        ("gemm_reduce_scatter", "add_residual_squared"),
        ("gemm_all_reduce", "add_bias"),
        ("gemm_reduce_scatter", "geglu"),
    ],
)
def test_the_calls_of_an_epilogue_return_the_same(op, name, dtype, ranks, compiled):
    """Checks the calls of one rank; with two ranks the shapes of their inputs."""
    workload, group = Workload("", op, 6, 128, 32, dtype), Group("", 0, ranks)
    operands = workload.operands(group, torch.device("cpu"))
    calls = EpilogueCalls(epilogue_named(name), workload)
    if ranks == 2:
        sizes = [[len(tensor) for tensor in calls.inputs(one, operands, group).inputs]
                 for one in (calls.epilogue, calls.after_op)]  # fmt: skip
        wanted = {"scale_gathered_rows": [[3], [6]], "add_residual_squared": [[3], [3]]}
        assert sizes == wanted.get(name, [[128], [128]] if name == "add_bias" else [[], []])
        return
    assert all(tensor.any() for tensor in calls.inputs(calls.epilogue, operands, group).inputs)
    made = calls.by(operands, resolve(""), ["decomposed"])
    results = {one: call() for one, call in made.items()}
    alone = results.pop("decomposed, alone")
    norms = {one: results.pop(one) for one in list(results) if ", norm" in one}
    expected, *others = (one if isinstance(one, (tuple, list)) else (one,) for one in results.values())
    for other in others:
        for value, wanted in zip(other, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2)
    assert alone.shape != expected[0].shape or not torch.equal(alone, expected[0])
    for result in norms.values():
        if name == "scale_gathered_rows":
            normal = torch.nn.functional.rms_norm(operands.x, operands.x.shape[-1:], None, 1e-6)
            wanted = (normal.float() @ operands.weight.float().t(),)
            result = (result,)
        else:
            wanted = (
                expected[0],
                torch.nn.functional.rms_norm(expected[0], expected[0].shape[-1:], None, 1e-6),
            )
        for value, right in zip(result, wanted, strict=True):
            torch.testing.assert_close(value, right.to(dtype), rtol=2e-2, atol=2e-2)
    assert bool(norms) == (name in ("add_residual_squared", "scale_gathered_rows"))


def test_ratios_are_to_the_op_alone():
    seconds = {"product": 1.0, "fused": 3.0, "fused, alone": 2.0, "fused, compiled": 5.0}
    timings = Timings({name: (time, time) for name, time in seconds.items()}).with_bound(0.0)
    names = [name for name in seconds if name != "product"]
    taken, place = {EAGER: dict.fromkeys(names, "fused")}, {EAGER: {"fused": "swiglu: in the kernel"}}
    measured = Measured(names, None, [], taken, {EAGER: timings}, epilogue="swiglu", places=place)
    result = row(replace(DOWN, op="all_gather_gemm"), measured, 2)
    assert {name: ours["of_alone"] for name, ours in result[EAGER]["ours"].items()} == {
        "fused": 1.5, "fused, alone": 1.0, "fused, compiled": 2.5
    }  # fmt: skip
    (line,) = summary({"results": [result]})
    assert line.endswith(
        "fused: of the time alone 1.500 with swiglu, 2.500 compiled after; swiglu: in the kernel"
    )


def test_the_compiled_operations_follow_torchs_baselines(compiled, monkeypatch):
    workload, group = Workload("", "gemm_reduce_scatter", 6, 128, 32, torch.bfloat16), resolve("")
    passed, followed = [], EpilogueCalls.followed
    plain = baselines.baselines(workload, workload.operands(group, torch.device("cpu")), group)
    timed = plain | {"torch": lambda: plain["product"]()}
    monkeypatch.setattr(bench_module, "baselines", lambda *_: timed)
    monkeypatch.setattr(
        EpilogueCalls, "followed", lambda self, *of: passed.append(of[1:]) or followed(self, *of)
    )
    one = epilogue_named("add_residual")
    result = bench_module.run(workload, ["auto"], group, torch.device("cpu"), 2, epilogue=one)
    assert [len(of) for of in passed] == [2, 3, 3], "of torch by default compiled; eager and compiled ones"
    assert "torch" in result.timings[EAGER].seconds


def test_an_epilogue_is_timed_of_operands_with_scales(compiled):
    result = bench(
        "--op", "gemm_all_reduce", "--m", 6, "--n", 64, "--k", 32, "--dtype", "float8_e4m3fn",
        "--epilogue", "add_bias", "--backends", "auto",
    )  # fmt: skip
    assert result.exit_code == 0 and "auto, compiled" in result.output


def test_epilogues_without_equal_operations_after_the_op_are_refused():
    sizes = ["--m", 6, "--n", 64, "--k", 8]
    for arguments, rule in (
        (["--op", "gemm_all_reduce", "--epilogue", "scale_rows_and_columns"], "takes partial sums"),
        (["--op", "gemm_all_reduce", "--epilogue", "scale_gathered_rows"], "gathers none"),
        (["--epilogue", "norm"], "'norm' is not among add_bias, add_residual"),
        (["--dtype", "float8_e4m3fn", "--epilogue", "swiglu"], "timed of operands without scales"),
    ):
        result = bench(*sizes, *arguments)
        assert result.exit_code == 2 and rule in " ".join(result.output.replace("│", "").split())
