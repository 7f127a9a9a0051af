"""Selection of the candidates that are timed in graphs, with simulated times of a GPU."""

from unittest import mock

import pytest
import torch

from overlap_gemm.backends import autotuning
from overlap_gemm.backends.autotuning import Candidate, _timed
from overlap_gemm.backends.select import BACKENDS
from overlap_gemm.runtime.group import LOCAL, resolve
from overlap_gemm.tuning.timing import Timings

BY_NAME = {backend.name: Candidate(backend) for backend in BACKENDS}
EAGER = {"fused": 30e-6, "torch": 100e-6, "decomposed": 2e-3}
CAPTURED = {"fused": 30e-6, "torch": 20e-6, "decomposed": 10e-6}


@pytest.fixture
def measured():
    def measure(variants, *, burst_seconds, **_):
        in_graphs = all(isinstance(call, str) for call in variants.values())
        times = CAPTURED if in_graphs else EAGER
        return Timings({name: (times[name.partition(":")[0]],) for name in variants})

    calls = {BY_NAME[name]: mock.Mock() for name in EAGER}
    with (
        mock.patch.object(autotuning, "measure", measure),
        mock.patch.object(autotuning, "captured", lambda call: "a graph"),
        mock.patch("torch.cuda.synchronize"),
    ):
        yield _timed(calls, torch.device("cuda"), resolve(LOCAL))


def test_a_candidate_that_takes_the_host_longer_is_timed_in_graphs_too(measured):
    assert dict(measured.captured)["torch"] == CAPTURED["torch"]
    assert measured.captured[0][0] == "torch"
    assert measured.eager[0][0] == "fused"


def test_a_candidate_that_takes_longer_than_any_host_is_left_out(measured):
    assert "decomposed" not in dict(measured.captured)
