"""What a process knows of its calls, afterwards."""

import pytest
import torch
import torch.distributed as dist

import overlap_gemm


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
