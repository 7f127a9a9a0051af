"""`overlap-gemm soak`: calls of every kind on CPU ranks, and a fault that it must report."""

from itertools import islice
from unittest import mock

import pytest
import torch

from overlap_gemm.backends.torch_backend import Torch
from overlap_gemm.cli.soak import EVENTS, run, steps
from overlap_gemm.runtime.group import find
from overlap_gemm.spec import OPS

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_soak_calls_for_a_while_and_reports_no_wrong_result(launch, ranks):
    options = ["--minutes", "0.05", "--seed", str(ranks), "--device", "cpu"]
    done = launch("torchrun", ranks, "python", "-m", "overlap_gemm.cli", "soak", *options)
    assert done.returncode == 0, done.stderr
    assert f"calls on {ranks} ranks, seed {ranks}: 0 wrong" in " ".join(done.stdout.split())
    assert sum(op in done.stdout for op in OPS) > 1


def test_steps_are_a_function_of_the_seed_and_cover_every_choice():
    first, again, other = (list(islice(steps(seed, 24, 2, CPU), 400)) for seed in (5, 5, 6))
    assert first == again != other
    assert {step.workload.op for step in first} == set(OPS)
    assert {step.event for step in first} == set(EVENTS)
    assert {step.mode for step in first} == {"eager", "gradient"}
    assert {step.mode for step in islice(steps(5, 24, 2, torch.device("cuda")), 400)} > {"captured"}


def failures(rank, size, with_fault):
    honest = Torch.gemm_all_reduce
    find(None).calls.clear()  # which keep what was bound with a fault

    def wrong_in_one_element(*arguments, **named):
        out = honest(*arguments, **named)
        if rank == 1 and out.numel():
            out.view(-1)[-1] += 1
        return out

    with mock.patch.object(Torch, "gemm_all_reduce", wrong_in_one_element if with_fault else honest):
        program = (
            step
            for step in steps(1, 24, size, CPU)
            if step.workload.op == "gemm_all_reduce" and step.backend == "torch"
        )
        return run(program, find(None), CPU, 0.0).failures


@pytest.mark.parametrize("with_fault", [True, False])
def test_one_wrong_element_on_one_rank_is_reported_on_every_rank(ranks, with_fault):
    reports = ranks(2).run(failures, with_fault)
    assert all(bool(report) == with_fault for report in reports)
    assert not with_fault or all("gemm_all_reduce" in report[0] for report in reports)
    assert not with_fault or all("'sequential' differs by" in report[0] for report in reports)
