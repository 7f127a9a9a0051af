"""Sub-groups of the world: process groups, mesh dimensions, and ranks that are in none."""

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import overlap_gemm
from overlap_gemm.backends import group_measurements
from overlap_gemm.nn import ParallelMLP
from overlap_gemm.runtime.group import find
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from tests.support.ranks import Ranks
from tests.support.references import reference


def check_ops(group, rank, size, seed, backend):
    """All ops on one group with data that only this group's ranks have."""
    for op in OPS:
        case = Case(op, 7, 9, 10, torch.float64).with_seed(seed)
        given, layout = operands(case), LAYOUTS[op]
        out = getattr(overlap_gemm, op)(
            layout.part(given.x, layout.x, rank, size),
            layout.part(given.weight, layout.weight, rank, size),
            bias=layout.part(given.bias, layout.bias, rank, size),
            group=group,
            backend=backend,
            **OPS[op].arguments(case.m, case.n, case.k, least=True),
        )
        torch.testing.assert_close(out, layout.part(reference(given).out, layout.out, rank, size))


def two_by_two(rank, size, backend):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dim in ("tp", "dp"):
        line = mesh[dim]
        # Other data in each of the two lines: a message that strays into the neighbour's group shows.
        seed = 1 + mesh["dp" if dim == "tp" else "tp"].get_local_rank()
        for group in (line, line.get_group(), line.get_group().group_name):
            check_ops(group, line.get_local_rank(), 2, seed, backend)
    with pytest.raises(ValueError, match="1-D DeviceMesh, got 2 dimensions"):
        check_ops(mesh, rank, size, 0, backend)


@pytest.mark.parametrize("backend", ["sequential", "decomposed", "torch"])
def test_two_by_two(ranks, backend):
    ranks(4).run(two_by_two, backend)


def three_of_four(rank, size, backend):
    order = [0, 2, 3]
    group = dist.new_group(order)
    if rank in order:
        check_ops(group, dist.get_group_rank(group, rank), 3, 5, backend)
    else:
        with pytest.raises(ValueError, match="not a member"):
            check_ops(group, 0, 3, 5, backend)


@pytest.mark.parametrize("backend", ["sequential", "decomposed", "torch"])
def test_three_of_four(ranks, backend):
    ranks(4).run(three_of_four, backend)


def data_parallel_training(rank, size):
    """One step of DP x TP gives the gradients of the whole batch on one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    mlp = ParallelMLP(6, 8, tp_group=mesh["tp"], sequence_parallel=True, dtype=torch.float64)
    torch.manual_seed(0)
    alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))["tp"]
    whole = ParallelMLP(6, 8, tp_group=alone, dtype=torch.float64)
    batch = torch.randn(2, 4, 6, dtype=torch.float64)
    whole(batch).square().sum().backward()
    own = batch[mesh["dp"].get_local_rank()].chunk(2)[mesh["tp"].get_local_rank()]
    mlp(own).square().sum().backward()
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        grad = getattr(mlp, name).weight.grad
        dist.all_reduce(grad, group=mesh["dp"].get_group())
        wanted = getattr(whole, name).weight.grad.chunk(2, dim)[mesh["tp"].get_local_rank()]
        torch.testing.assert_close(grad, wanted)


def test_data_parallel_times_tensor_parallel(ranks):
    ranks(4).run(data_parallel_training)


def unserved_device(rank, size):
    with pytest.raises(ValueError, match="meta, for which group"):
        overlap_gemm.gemm_all_reduce(torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta"))
    with pytest.raises(TypeError, match="ProcessGroup, a 1-D DeviceMesh or None, got int"):
        overlap_gemm.gemm_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=3)


def test_groups_that_cannot_serve(ranks):
    ranks(2).run(unserved_device)


def one_after_another(rank, size):
    groups, names = [], set()
    for seed in range(4):
        group = dist.new_group()
        check_ops(group, rank, size, seed, "auto")
        groups.append(weakref.ref(find(group)))
        names.add(group.group_name)
        dist.destroy_process_group(group)
        del group
        gc.collect()
    assert [group() is None for group in groups] == [True, True, True, False], "but the last one"
    # The group before the last one was still known when the last one's measurements were read.
    assert len(names & {name for name, _ in group_measurements._stored}) <= 2


def test_a_destroyed_group_is_not_kept_with_its_calls_when_the_next_one_begins(ranks):
    ranks(2).run(one_after_another)


def joined(rank, size, store):
    """Joins a world of `size` in place of the one before it, whose name it gets."""
    dist.destroy_process_group()
    store, limit = dist.FileStore(str(store), size), timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def in_another_world(rank, size, folder, backend):
    """Calls the ops in a world of which one rank was in none before."""
    if rank < 2:
        joined(rank, 2, folder / "first")
        for _ in range(3):
            overlap_gemm.gemm_reduce_scatter(torch.ones(6, 4), torch.ones(5, 4), backend=backend)
        overlap_gemm.finalize()
    joined(rank, size, folder / "second")
    check_ops(None, rank, size, 3, backend)


@pytest.mark.parametrize("backend", ["sequential", "decomposed", "torch"])
def test_calls_of_an_earlier_world_do_not_count_in_one_of_its_name(tmp_path, backend):
    with Ranks(3) as ranks:
        ranks.run(in_another_world, tmp_path, backend)


def alone_before_and_after(rank, size, folder):
    x, weight = torch.ones(4, 3), torch.ones(5, 3)
    dist.destroy_process_group()
    assert overlap_gemm.gemm_all_reduce(x, weight)[0, 0] == 3
    for world in ("first", "second"):
        store = dist.FileStore(str(folder / world), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        assert overlap_gemm.gemm_all_reduce(x, weight)[0, 0] == 3 * size
        dist.destroy_process_group()
        with pytest.raises(RuntimeError, match="of 2 ranks has been destroyed before finalize"):
            overlap_gemm.gemm_all_reduce(x, weight)
    overlap_gemm.finalize()
    assert overlap_gemm.gemm_all_reduce(x, weight)[0, 0] == 3


def test_a_world_of_one_from_before_does_not_return_after_the_world(tmp_path):
    with Ranks(2) as ranks:
        ranks.run(alone_before_and_after, tmp_path)
