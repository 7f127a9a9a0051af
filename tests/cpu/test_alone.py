"""Processes that were started together and have not met are not taken for worlds of one."""

import threading

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.nn import ColumnParallelLinear, RowParallelLinear
from overlap_gemm.runtime import bootstrap
from overlap_gemm.runtime.group import LAUNCHERS, clear_groups
from overlap_gemm.spec import OPS

X, W = torch.ones(4, 3), torch.ones(5, 3)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    clear_groups(single_process=False)
    yield
    clear_groups(single_process=False)


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


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"TORCHELASTIC_RUN_ID": "x"}, "TORCHELASTIC_RUN_ID=x, but not RANK, WORLD_SIZE, MASTER_ADDR, MAS"),
        ({"RANK": "3"}, "RANK=3, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0, WORLD_SIZE=2, but not MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but not RANK, MASTER_ADDR, MASTER_PORT"),
        ({**TORCHRUN, "RANK": "first"}, "RANK must be a whole number.* got 'first'"),
        ({**TORCHRUN, "WORLD_SIZE": "-2"}, "WORLD_SIZE must be a whole number.* got '-2'"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number.* got ''"),
        ({**TORCHRUN, "RANK": "2"}, "RANK=2 must be less than WORLD_SIZE=2"),
    ],
)
def test_half_of_a_launchers_environment_is_refused_by_name(env, words):
    with pytest.raises(RuntimeError, match=words):
        bootstrap._find_placement(env)


@pytest.mark.parametrize(
    ("env", "launcher", "rank"),
    [
        ({}, "none", 0),
        ({"WORLD_SIZE": "1"}, "none", 0),
        ({"MASTER_ADDR": "here", "MASTER_PORT": "1"}, "none", 0),
        ({**TORCHRUN, "RANK": "1"}, "torchrun", 1),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, "torchrun", 0),
    ],
)
def test_a_whole_one_is_taken_and_none_is_alone(env, launcher, rank):
    found = bootstrap._find_placement(env)
    assert (found.launcher, found.rank) == (launcher, rank)


def test_finalize_waits_for_torch_within_a_bound(monkeypatch):
    # NCCL waits for ever while a graph exists that has captured its collectives.
    overlap_gemm.init(device="cpu").mesh()
    monkeypatch.setattr(bootstrap, "DESTROY_SECONDS", 0.1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    destroy, held = dist.destroy_process_group, threading.Event()
    monkeypatch.setattr(dist, "destroy_process_group", held.wait)
    try:
        with pytest.raises(RuntimeError, match="not returned for 0.1 s.*CUDA graph.*delete such graphs"):
            overlap_gemm.finalize()
        overlap_gemm.finalize()  # a second call does nothing
    finally:
        held.set()
        destroy()


@pytest.mark.parametrize("backends", ["cpu:gloo", "cpu:gloo,cuda:nccl"])
def test_finalize_raises_what_torch_raises(monkeypatch, backends):
    overlap_gemm.init(device="cpu").mesh()
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    destroy = dist.destroy_process_group

    def fail():
        destroy()
        raise OSError("lost")

    monkeypatch.setattr(dist, "destroy_process_group", fail)
    with pytest.raises(OSError, match="lost"):
        overlap_gemm.finalize()
