"""What a process knows of its calls, afterwards."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import overlap_gemm
from overlap_gemm.api.ahead import LayerOp
from overlap_gemm.parallel import parallelize
from tests.support.models import tiny


def counted(rank, size):
    group, before = dist.new_group(), overlap_gemm.stats().calls.get("gemm_all_reduce", {})
    x, weight = torch.ones(4, 6), torch.ones(6, 6)
    for backend, calls in (("torch", 3), ("sequential", 2), ("auto", 1)):
        for _ in range(calls):
            overlap_gemm.gemm_all_reduce(x, weight, backend=backend, group=group)
    with pytest.raises(ValueError, match="K=6"):
        overlap_gemm.gemm_all_reduce(x, torch.ones(6, 5), group=group)
    found = overlap_gemm.stats()
    new = {name: count - before.get(name, 0) for name, count in found.calls["gemm_all_reduce"].items()}
    assert (new["torch"], new["sequential"]) == (4, 2), new
    assert "float32" in found.not_taken["gemm_all_reduce as torch"]["fused"]
    assert found.refused[group.group_name].startswith("1 (the last: gemm_all_reduce: ValueError"), (
        found.refused
    )
    assert found.symmetric_bytes == {} == found.measured
    lines = str(found).splitlines()
    assert any(line.startswith("calls: gemm_all_reduce as torch: ") for line in lines)
    assert any(line.startswith("not taken: gemm_all_reduce as torch: fused, ") for line in lines)


def test_calls_reasons_and_refusals_are_counted(ranks):
    ranks(2).run(counted)


def ops_of_a_model(rank, size):
    """Lists the ops of a parallelized model with the extents by which their memory is computed."""
    ops = {}
    for is_sequence in (False, True):
        model = tiny("llama", size, num_hidden_layers=2)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        parallelize(model, mesh, sequence_parallel=is_sequence)
        nothing = overlap_gemm.explain(model, max_rows=64)
        assert set(nothing.symmetric_bytes.values()) == {0}, "no fused kernel on CPUs"
        with mock.patch.object(LayerOp, "symmetric_bytes", lambda self, rows: {self.op: rows * self.columns}):
            report = overlap_gemm.explain(model, max_rows=10)
        hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
        assert report.total_bytes == 10 * sum(
            {"gemm_all_gather": vocabulary}.get(op, hidden) for op in {op for _, op in report.symmetric_bytes}
        )
        ops[is_sequence] = sorted({op for _, op in report.symmetric_bytes})
        lines = [line for line in str(report).splitlines() if "layers" in line and "bytes" in line]
        assert lines and all("layers.*" in line for line in lines), "a line for all layers that are alike"
    return ops


def test_explain_lists_the_ops_of_a_parallelized_model(ranks):
    for ops in ranks(2).run(ops_of_a_model):
        assert ops == {
            False: ["gemm_all_gather", "gemm_all_reduce"],
            True: ["all_gather_gemm", "gemm_all_gather", "gemm_reduce_scatter"],
        }
