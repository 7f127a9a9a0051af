"""The log says which backend carries an op out, once per class of shapes, and why not the one preferred."""

import logging

import torch
from torch.distributed.device_mesh import init_device_mesh

import overlap_gemm
from overlap_gemm.backends import select
from overlap_gemm.parallel import parallelize
from overlap_gemm.runtime.group import find
from tests.support.models import tiny


def records_of(function):
    find(None).calls.clear()  # a call that another test has made is not chosen, so not logged
    for said in (select._inform, select._warn):
        said.cache_clear()
    records, handler = [], logging.Handler()
    handler.emit = records.append
    select.logger.addHandler(handler)
    select.logger.setLevel(logging.INFO)
    try:
        function()
    finally:
        select.logger.removeHandler(handler)
        select.logger.setLevel(logging.NOTSET)
    return [(record.levelname, record.getMessage()) for record in records]


def once_per_class(rank, size):
    weight = torch.randn(4, 6)

    def calls():
        for rows in (5, 8, 7, 9, 5):
            overlap_gemm.gemm_all_reduce(torch.randn(rows, 6), weight, backend="sequential")

    says = "width 4, torch.float32, P=2 runs as 'sequential' (backend='sequential')"
    assert records_of(calls) == [
        ("INFO", f"gemm_all_reduce, M <= 8, {says}"),
        ("INFO", f"gemm_all_reduce, M <= 16, {says}"),
    ]


def test_once_per_op_and_class_of_shapes(ranks):
    ranks(2).run(once_per_class)


def profiled(rank, size):
    x = torch.randn(3, 6, requires_grad=True)
    weight = torch.randn(4, 6)
    overlap_gemm.gemm_reduce_scatter(x, weight, backend="decomposed")  # known by now, and to be named still
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        overlap_gemm.gemm_reduce_scatter(x, weight, backend="decomposed").sum().backward()
    named = [event.name for event in profile.events() if event.name.startswith("overlap_gemm ")]
    assert named == [
        "overlap_gemm gemm_reduce_scatter M=3 width=4 torch.float32 P=2 decomposed",
        "overlap_gemm all_gather_gemm M=3 width=4 torch.float32 P=2 decomposed",
    ]


def test_profilers_see_op_shape_and_backend(ranks):
    ranks(2).run(profiled)


def many_profiles(rank, size):
    for rows in range(1, 41):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            overlap_gemm.gemm_reduce_scatter(torch.randn(rows, 6), torch.randn(4, 6), backend="torch")
        names = {event.name for event in profile.events()}
        assert "gloo:send" in names, "this call sent no message"
        assert "gloo:recv" not in names, "a receive that outlives the profiler is recorded"


def test_receives_that_outlive_a_profiler_are_not_recorded(ranks):
    # The end of a recorded receive would be written into memory that the profiler has freed.
    ranks(2).run(many_profiles)


def fused_model_on_a_cpu(rank, size):
    model = parallelize(tiny("llama", size), init_device_mesh("cpu", (size,)), backend="fused")
    ids = torch.arange(6).view(1, 6)

    def steps():
        for _ in range(2):
            model(ids, labels=ids).loss.backward()

    warnings = [message for level, message in records_of(steps) if level == "WARNING"]
    assert len(warnings) == len(set(warnings))
    ops = sorted(message.split(" runs as ")[0] for message in warnings)
    assert ops == ["all_gather_gemm", "gemm_all_gather", "gemm_all_reduce", "gemm_reduce_scatter"]
    assert all("not as 'fused': " in message for message in warnings)


def test_a_model_that_prefers_fused_runs_and_says_what_is_not(ranks):
    for _ in range(2):
        ranks(2).run(fused_model_on_a_cpu)
