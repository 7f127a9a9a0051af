"""The model's times of epilogues: next to measured ones, in `auto`, `explain` and `plan`."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from overlap_gemm import epilogue, epilogues
from overlap_gemm.backends import select
from overlap_gemm.backends.epilogues import usual_dtypes
from overlap_gemm.backends.fused.fused_backend import Fused
from overlap_gemm.backends.peer_access import PeerAccess
from overlap_gemm.cli import app
from overlap_gemm.tuning.epilogue_time import EpilogueTime, epilogue_time
from overlap_gemm.tuning.machine import load
from overlap_gemm.tuning.time_model import Facts
from tests.support.problems import problem

H200 = load("h200")
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
MEASURED, SCALED = (
    json.loads((RESULTS / f"h200x2-{name}.json").read_text())["results"]
    for name in ("epilogues", "scaled-epilogues")
)


def times(op, one, m, n, k, world=2, machine=H200, dtype="bf16"):
    sizes = [one.itemsize for one in usual_dtypes(one, torch.bfloat16)]
    return epilogue_time(one, sizes, Facts(op, m, n, k, dtype, world), machine, "sm_90a", 132)


def measured(way, one, case=""):
    """Yields (microseconds more than the op, their spread, predicted `EpilogueTime`) of a way's cases."""
    for row in MEASURED:
        op, extents, *_ = row["case"].replace(":", "").split()
        if way in row["us"] and case in row["case"]:
            low, high = row["quartiles"][way]
            model = times(op, one, *map(int, extents.split(",")))
            yield row["us"][way] - row["us"]["op"], (high - low) * row["us"]["op"], model


@pytest.mark.parametrize(
    ("way", "one", "case"),
    [
        ("residual", epilogues.add_residual, ""),
        ("epilogue", epilogues.add_residual_squared, "residual"),
        ("epilogue", epilogues.swiglu, "swiglu"),
    ],
)
def test_times_in_the_kernel_are_those_measured(way, one, case):
    for more, spread, model in measured(way, one, case):
        assert abs(model.kernel * 1e6 - more) <= max(6.5, spread), (more, model)


def test_norms_are_in_the_kernel_where_that_was_measured_faster_than_a_compiled_norm():
    data = json.loads((RESULTS / "h200x2-norms.json").read_text())["results"]
    for row in data:
        us = {name: 1e6 * seconds for name, seconds in row["graph"]["seconds"].items()}
        model = times(row["op"], epilogues.add_residual_rms_norm, row["m"], row["n"], row["k"])
        is_faster = us["fused"] < us["fused, norm, compiled"]
        assert (model.why_after() is None) == is_faster, (row["m"], model)
        assert us["fused"] < us["fused, norm, eager"]
        if is_faster:
            assert abs(model.kernel * 1e6 - (us["fused"] - us["fused, alone"])) <= 2, (row["m"], model)
    assert [row["m"] for row in data] == [1, 16, 64, 128]
    few, more = (times("gemm_all_reduce", epilogues.add_residual_rms_norm, m, 8192, 8192) for m in (64, 65))
    assert few.why_after() is None and more.why_after()


def test_the_time_of_blocks_in_the_kernel_is_that_measured():
    gathers = [row for row in SCALED if row["op"] == "all_gather_gemm" and row["m"] >= 2048]
    for row in gathers:
        call = row["op"], row["m"], row["n"], row["k"]
        more = row["graph"]["us"]["swiglu_e4m3_blocks"] - row["graph"]["us"]["swiglu"]
        of_blocks, plain = (
            times(call[0], epilogues.swiglu_e4m3_blocks, *call[1:], dtype="e4m3"),
            times(call[0], epilogues.swiglu, *call[1:], dtype="e4m3"),
        )
        assert 0.75 * more <= 1e6 * (of_blocks.kernel - plain.kernel) <= 1.25 * more
        assert of_blocks.why_after()
    assert len(gathers) == 2


def test_a_norm_is_where_it_was_measured_faster_in_the_kernel_or_by_one_after_it():
    data = json.loads((RESULTS / "h200x2-norms-after.json").read_text())["results"]
    for row in data:
        us = row["us"]
        model = times(row["op"], epilogues.add_residual_rms_norm, row["m"], row["n"], row["k"])
        assert abs(model.one_pass * 1e6 - (us["after, kernel"] - us["op"])) <= 2.2, (row["m"], model)
        if row["m"] <= 128:
            is_faster = us["in the kernel"] < us["after, kernel"]
            assert (model.why_after() is None) == is_faster, (row["m"], model)
        assert us["after, kernel"] < 1.02 * us["after, compiled"] < us["after, torch"]
    assert [row["m"] for row in data] == [1, 16, 64, 128, 1024]


def test_blocks_of_16_bit_operands_follow_the_op_as_was_measured_faster_in_two_of_three_shapes():
    """Checks that the third one, which moves most for its products, loses three hundredths."""
    data = json.loads((RESULTS / "h200x2-result-blocks.json").read_text())["results"]
    for row, is_faster in zip(data, (True, False, True), strict=True):
        us, model = row["us"], times(row["op"], epilogues.swiglu_e4m3_blocks, row["m"], row["n"], row["k"])
        assert (us["after"] < us["in the kernel"]) == is_faster and us["after"] < 1.035 * us["in the kernel"]
        assert model.why_after(), (row, model)
        for seconds, name in ((model.kernel, "in the kernel"), (model.one_pass, "after")):
            assert 0.5 <= seconds * 1e6 / (us[name] - us["op"]) <= 2.2, (name, row, model)


def test_times_in_kernels_that_sum_8_bits_are_those_measured():
    """Checks that a compiled pass after the op is predicted faster than row sums in the kernel, as it is."""
    for row in (row for row in SCALED if row["op"] == "gemm_reduce_scatter"):
        us, shape = row["graph"]["us"], (row["op"], row["m"], row["n"], row["k"])
        for name in ("add_residual", "add_residual_squared"):
            one, more = getattr(epilogues, name), us[name] - us["alone"]
            model = times(shape[0], one, *shape[1:], dtype="e4m3")
            assert abs(model.kernel * 1e6 - more) <= max(3.5, 0.1 * more), (name, more, model)
            assert (model.why_after() is None) == (name == "add_residual")


def test_the_time_of_one_pass_is_that_measured():
    for more, spread, model in measured("op, residual", epilogues.add_residual):
        assert abs(model.one_pass * 1e6 - more) <= max(3.5, spread), (more, model)
        assert model.kernel <= model.one_pass + 1e-6


def less_residual(x, residual):
    return x - residual


@pytest.mark.parametrize(
    ("one", "launches", "nbytes"),
    [
        (epilogues.add_residual, 1, 6),
        (epilogues.apply_gelu, 1, 4),
        (epilogues.swiglu, 2, 4 + 6),
        (epilogues.scale_rows, 2, 6 + 6),  # by float32 scales to float32, which is rounded
    ],
)
def test_operations_of_torch_are_counted_without_conversions(one, launches, nbytes):
    model = times("all_gather_gemm", one, 2048, 8192, 8192)
    elements = 2048 * 4096 // (1 + one.pairs)
    assert model.operations == pytest.approx(launches * H200.launch + elements * nbytes / H200.memory_rate)


def test_operations_are_counted_with_conversions_and_one_pass_without():
    added = epilogue(less_residual, inputs={"residual": "element"})
    model = times("gemm_reduce_scatter", added, 2048, 8192, 8192)
    elements = 1024 * 8192
    # Two conversions of 2 to 4 bytes, a sum of two, a conversion back.
    assert model.operations == pytest.approx(4 * H200.launch + elements * 30 / H200.memory_rate)
    assert model.one_pass == pytest.approx(H200.launch + elements * 6 / H200.memory_rate)

    @epilogue(inputs={"scale": "rows"}, outputs={"total": "row_sum"})
    def scaled(x, scale):
        return x * (scale + 1), x

    model = times("gemm_reduce_scatter", scaled, 2048, 8192, 8192)
    # A sum of rows' values is an operation without bytes.
    assert model.operations == pytest.approx(5 * H200.launch + elements * 24 / H200.memory_rate)


def test_a_result_of_8_bits_is_one_byte():
    model = times("gemm_reduce_scatter", epilogues.to_e4m3, 2048, 8192, 8192)
    assert model.one_pass == pytest.approx(H200.launch + 1024 * 8192 * 3 / H200.memory_rate)


def test_kernels_of_ops_read_the_inputs_of_what_they_sum():
    """Checks all-reduces: each rank sums all rows (one-shot), or its part of the columns (two-shot)."""
    many = 8192, 8192, 8192
    one = times("gemm_all_reduce", epilogues.add_residual, 64, 8192, 8192, world=2)
    two = times("gemm_all_reduce", epilogues.add_residual, *many, world=4)
    scattered = times("gemm_reduce_scatter", epilogues.add_residual, *many, world=4)
    assert two.kernel == pytest.approx(scattered.kernel)
    elements = 64 * 8192
    last = elements / 132 / (128 * 128) * H200.last_inputs
    assert one.kernel == pytest.approx(elements * 2 / H200.memory_rate + last)
    gathered = times("gemm_all_gather", epilogues.add_residual, *many, world=4)
    assert gathered.kernel == pytest.approx(scattered.kernel)
    assert gathered.one_pass > scattered.one_pass


def test_rows_that_are_gathered_first_take_a_collective_each_way():
    shape = ("all_gather_gemm", epilogues.scale_gathered_rows, 2048, 10240, 8192)
    gathered = times(*shape)
    local = times(shape[0], epilogues.scale_rows, *shape[2:])
    assert min(g - o for g, o in zip(gathered[:3], local, strict=False)) > 5e-6


@epilogue(inputs={"shift": "element"}, of="partial")
def of_partial(x, shift):
    return epilogues.silu(x - shift)


def test_partial_sums_are_those_of_a_ranks_product():
    partial = times("gemm_reduce_scatter", of_partial, 8192, 8192, 8192)
    complete = times("gemm_reduce_scatter", epilogues.add_residual, 8192, 8192, 8192)
    assert partial.is_partial and not times("all_gather_gemm", of_partial, 64, 8192, 8192).is_partial
    assert partial.kernel > 2 * complete.kernel, "all rows of the product, not a rank's rows of the result"
    assert partial._replace(kernel=1.0).why_after() is None, "nothing can follow the op"


def test_auto_compares_the_kernel_with_operations_before_the_sum(on_hopper):
    problem = of(of_partial, 8192)
    plain, added = {"fused": 1.0, "sequential": 1.0}, select.predicted_epilogue(problem)
    seconds = select.added_epilogue(plain, problem, added)
    model = times("gemm_reduce_scatter", of_partial, 8192, 8192, 8192)
    assert seconds == {"fused": 1 + model.kernel, "sequential": 1 + model.operations}
    choice = select.explained(problem, "auto", 8192)
    assert choice.backend.name == "fused" and f"of_partial: in the kernel; {model}" in str(choice)
    assert "before the sum over the ranks" in str(model)


def of(one, m, k=8192, op="gemm_reduce_scatter", n=8192):
    plain = problem(
        op, m, n, k, torch.bfloat16, "cuda", 2, peer_access=PeerAccess("sm_90a", 132, None), captured=True
    )
    return plain if one is None else plain.with_epilogue(one, usual_dtypes(one, torch.bfloat16))


@pytest.fixture
def on_hopper():
    with mock.patch.object(Fused, "why_not", Fused.why_no_kernel):
        yield


def test_auto_compares_times_with_the_epilogue(on_hopper):
    """Checks that torch is faster for some shape without an epilogue, and slower with one in the kernel."""
    shapes = [(m, k) for m in range(64, 1024, 64) for k in (512, 1024, 2048, 4096, 8192)]
    changed = [
        shape
        for shape in shapes
        if select.choose(of(None, *shape)).backend.name == "torch"
        and select.choose(of(epilogues.add_residual, *shape)).backend.name == "fused"
    ]
    assert changed
    choice = select.choose(of(epilogues.add_residual, *changed[0]))
    assert choice.problem == of(None, *changed[0])


def test_an_epilogue_no_kernel_applies_makes_no_difference(on_hopper):
    def chosen(one, m):
        return select.choose(of(one, m, 2048)).backend.name

    shapes = range(64, 2048, 64)
    assert [chosen(epilogues.swiglu, m) for m in shapes] == [chosen(None, m) for m in shapes]


def test_one_place_decides_between_the_kernel_and_torch(on_hopper, monkeypatch):
    with_residual = of(epilogues.add_residual, 8192)
    choice = select.choose(with_residual)
    assert choice.backend.name == "fused" and select.why_after(choice, with_residual, 8192) is None
    monkeypatch.setattr(select, "predicted_epilogue", lambda _: EpilogueTime(2e-5, 3e-5, 1e-5))
    why = select.why_after(choice, with_residual, 8192)
    assert why == "which takes 10.0 us, and the kernel 20.0 us (predicted)"
    requested = replace(choice, requested="fused")
    assert select.why_after(requested, with_residual, 8192) is None, "not second-guessed"


def test_explain_states_where_and_what_it_takes(on_hopper):
    with_residual = of(epilogues.add_residual, 8192)
    text = str(select.explained(with_residual, "auto", 8192))
    model = times("gemm_reduce_scatter", epilogues.add_residual, 8192, 8192, 8192)
    assert f"epilogue add_residual: in the kernel; {model}" in text
    assert re.search(r"[\d.]+ us in the kernel, [\d.]+ us by one pass over memory after the op", text)
    text = str(select.explained(of(epilogues.add_residual, 8192, n=8190), "auto", 8190))
    assert "epilogue add_residual: after the op, torch's products have no epilogue" in text


def of_8_bits(problem, block=None):
    call = problem.call._replace(out_dtype=torch.bfloat16, block=block)
    return replace(problem, call=call, dtype=torch.float8_e4m3fn, weight_dtypes=(torch.float8_e4m3fn,))


@pytest.mark.parametrize("block", [None, "128"])
def test_one_rule_for_operands_with_scales(on_hopper, block, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with_residual = of_8_bits(of(epilogues.add_residual, 8192), block)
    choice = select.explained(with_residual, "auto", 8192)
    assert choice.backend.name == "fused" and "add_residual: in the kernel; predicted" in str(choice)
    pair = of_8_bits(of(epilogues.swiglu, 8192, op="all_gather_gemm"), block)
    why = select.why_after(choice, replace(pair, num_weights=2), 2048)
    assert why == (block and "kernels read scales of blocks of 128 x 128 of one weight")
    assert select.why_after(choice, pair, 4096) is None


def plan(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result, " ".join(result.output.split())


def microseconds(text, backend):
    return float(re.search(rf" {backend} ([\d.]+) ", text)[1])


def test_plan_adds_the_epilogue_to_every_backend():
    how = ("gemm_reduce_scatter", 8192, 8192, 8192, "--ranks", 2, "--machine", "h200")
    plain, text = plan(*how)[1], plan(*how, "--epilogue", "add_residual")[1]
    model = times("gemm_reduce_scatter", epilogues.add_residual, 8192, 8192, 8192)
    for backend, more in (("fused", model.kernel), ("torch", model.one_pass)):
        assert microseconds(text, backend) - microseconds(plain, backend) == pytest.approx(
            more * 1e6, abs=0.2
        )
    assert f"epilogue add_residual: in the kernel; {model}" in text


def test_plan_and_auto_decide_in_one_place(on_hopper, monkeypatch):
    """Checks that a kernel slower than operations is not used by either."""
    slower = EpilogueTime(3e-5, 2e-5, 1e-5)
    monkeypatch.setattr(select, "predicted_epilogue", lambda _: slower)
    monkeypatch.setattr(importlib.import_module("overlap_gemm.cli.plan"), "epilogue_time", lambda *_: slower)
    with_residual = of(epilogues.add_residual, 8192)
    why = select.why_after(select.choose(with_residual), with_residual, 8192)
    assert why == "which takes 10.0 us, and the kernel 30.0 us (predicted)"
    how = ("gemm_reduce_scatter", 8192, 8192, 8192, "--ranks", 2, "--machine", "h200")
    assert f"add_residual: after the op, {why}" in plan(*how, "--epilogue", "add_residual")[1]


def test_plan_states_why_no_kernel_applies_an_epilogue():
    how = ("gemm_reduce_scatter", 8192, 8192, 8192, "--ranks", 2, "--machine", "h200", "--epilogue")
    _, text = plan(*how, "swiglu")
    assert "after the op, kernels support pairs of columns in all_gather_gemm only" in text
    _, text = plan(*how, "scale_rows_and_columns")
    assert "scale_rows_and_columns: in the kernel; predicted in addition to the op" in text
    assert " torch " not in text.partition("bound:")[0], "only 'sequential' applies it before the sum"
    _, text = plan(how[0], 8192, 8196, *how[3:], "scale_rows_and_columns")
    assert "choice, eager: sequential, no other backend supports it" in text
    assert "scale_rows_and_columns: by torch before the sum over the ranks, N=8196 of a rank must be" in text
    result, text = plan(*how, "norm")
    assert result.exit_code == 2 and "'norm' is not among add_bias, add_residual" in text
    result, text = plan(*how, "add_residual", "--invariant", "batch")
    assert result.exit_code == 2 and "does not support --invariant" in text


@pytest.mark.parametrize("block", [[], ["--block", 128]])
def test_plan_of_operands_with_scales(block):
    """Checks that sums of 8-bit operands are read and written as 16 bits, like those of 16-bit ones."""
    how = ("gemm_reduce_scatter", 8192, 8192, 8192, "--ranks", 2, "--machine", "h200")
    model = times("gemm_reduce_scatter", epilogues.add_residual, 8192, 8192, 8192, dtype="e4m3")
    scaled = *how, "--dtype", "float8_e4m3fn", *block
    text, plain = plan(*scaled, "--epilogue", "add_residual")[1], plan(*scaled)[1]
    assert f"epilogue add_residual: in the kernel; {model}" in text
    assert microseconds(text, "fused") - microseconds(plain, "fused") == pytest.approx(
        model.kernel * 1e6, abs=0.2
    )
