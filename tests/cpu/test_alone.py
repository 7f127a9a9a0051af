"""Processes that were started together and have not met are not taken for worlds of one."""

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.backends.base import OPS
from overlap_gemm.nn import ColumnParallelLinear, RowParallelLinear
from overlap_gemm.runtime import bootstrap
from overlap_gemm.runtime.group import LAUNCHERS, forget_groups

X, W = torch.ones(4, 3), torch.ones(5, 3)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    forget_groups(alone=False)
    yield
    forget_groups(alone=False)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"])
def test_ops_name_what_is_missing(monkeypatch, variable, op):
    monkeypatch.setenv(variable, "4")
    for group in (None, ""):
        with pytest.raises(
            RuntimeError, match=rf"{variable}=4 processes were started.*overlap_gemm.init\(\)"
        ):
            getattr(overlap_gemm, op)(X, W, group=group)
    monkeypatch.setenv(variable, "1")
    assert torch.equal(getattr(overlap_gemm, op)(X, W), torch.full((4, 5), 3.0))


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_layers_do_at_their_construction(monkeypatch, layer):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"overlap_gemm.init\(\)"):
        layer(3, 5)


def test_a_layer_from_before_knows_no_world_that_came_later(tmp_path):
    layer = ColumnParallelLinear(3, 5)
    layer(X)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        layer(X)  # a world of one is one
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_world_size", lambda *_: 2)
            with pytest.raises(RuntimeError, match=r"world of one, but torch.distributed has 2 ranks"):
                layer(X)
    finally:
        dist.destroy_process_group()


def test_init_knows_better_than_the_environment(monkeypatch):
    """In an allocation of several tasks, one process that was not started by srun is a world of one."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    for variable in ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(variable, raising=False)
    assert bootstrap._world is None
    try:
        assert overlap_gemm.init(device="cpu").size == 1
        assert torch.equal(overlap_gemm.gemm_all_reduce(X, W), torch.full((4, 5), 3.0))
    finally:
        overlap_gemm.finalize()
    with pytest.raises(RuntimeError, match="SLURM_NTASKS=4 processes were started"):
        overlap_gemm.gemm_all_reduce(X, W)
