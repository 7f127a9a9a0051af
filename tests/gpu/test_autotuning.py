"""`auto` by measurement, on two GPUs: right, captured and eager, and kept."""

from pathlib import Path
from unittest import mock

import pytest
import torch

import overlap_gemm
from overlap_gemm.backends import autotuning
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from tests.support.autotuned import begun_anew
from tests.support.ops import SHARDED

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")

SHAPES = [(2048, 1024, 2048), (128, 2048, 1024)]


def operands(rank, size, op, shape):
    torch.manual_seed(rank)
    own = Shards.owned_by(size, rank)
    return [torch.randn(sides, device="cuda", dtype=torch.bfloat16) for sides in OPS[op].shapes(*shape, own)]


def right(rank, size, op, folder):
    call, spec = getattr(overlap_gemm, op), OPS[op]
    for number, shape in enumerate(SHAPES):
        said = spec.arguments(*shape)
        warnings = mock.patch.object(autotuning.logger, "warning")
        with begun_anew(Path(folder) / f"{number}.json"), warnings as warned:
            overlap_gemm.warmup(op, shape)
            warned.assert_not_called()  # no candidate is excluded by an error
            x, weight = operands(rank, size, op, shape)
            choice = overlap_gemm.explain(op, x, weight, **said)
            measured = choice.problem.measured
            assert measured is not None
            assert measured.candidates >= 3
            assert {"fused", "torch"} <= set(measured.seconds(True)) & set(measured.seconds(False))
            truth = call(x.double(), weight.double(), backend="sequential", **said)
            rounding = (call(x, weight, backend="torch", **said).double() - truth).abs().max()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = call(x, weight, **said)
            graph.replay()
            for result in (call(x, weight, **said), call(x, weight, backend="fused", **said), captured):
                assert (result.double() - truth).abs().max() <= 2 * rounding
        torch.distributed.barrier()
        with begun_anew(Path(folder) / f"{number}.json"), mock.patch.object(autotuning, "_measured") as never:
            overlap_gemm.warmup(op, shape)
            assert overlap_gemm.explain(op, x, weight, **said).backend.name == choice.backend.name
            never.assert_not_called()


@pytest.mark.parametrize("op", SHARDED)
def test_what_was_measured_is_right_and_kept(ranks, tmp_path, op):
    ranks(2).run(right, op, str(tmp_path))


def left_out(rank, size, folder):
    op, shape = "gemm_reduce_scatter", (1024, 2048, 2048)
    bind = autotuning.bind_as

    def failing(kernel, *given):
        if any(kernel):
            raise RuntimeError("ptxas gave up")
        return bind(kernel, *given)

    with begun_anew(Path(folder) / "file.json"), mock.patch.object(autotuning, "bind_as", failing):
        overlap_gemm.warmup(op, shape)
        x, weight = operands(rank, size, op, shape)
        measured = overlap_gemm.explain(op, x, weight, k=shape[2]).problem.measured
        assert not any(measured.kernel)
        overlap_gemm.gemm_reduce_scatter(x, weight, k=shape[2])


def test_kernels_that_cannot_be_made_are_left_out(ranks, tmp_path):
    ranks(2).run(left_out, str(tmp_path))
