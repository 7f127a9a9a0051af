"""What training loops do to the layers: draw again, clip, scale, shard further."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from overlap_gemm.nn import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    clip_grad_norm_,
    full_state_dict,
)

DOUBLE = {"dtype": torch.float64}


def around_one(weight):
    nn.init.normal_(weight, mean=1.0)


def build(kind, group=None, bias=True, **options):
    """The unsharded or the sharded model; 5 features leave the last of four ranks none."""
    if kind == "whole":
        layers = nn.Linear(6, 5, bias=bias, **options), nn.LayerNorm(5, **options), nn.Linear(5, 6, **options)
        return nn.Sequential(*layers)
    options["tp_group"] = group
    dtype = options.get("dtype")
    norm = nn.LayerNorm(5, dtype=dtype, device=options.get("device"))
    column = ColumnParallelLinear(6, 5, bias=bias, gather_output=True, **options)
    return nn.Sequential(column, norm, RowParallelLinear(5, 6, input_is_parallel=False, **options))


def same_state(model, whole):
    found, expected = full_state_dict(model), whole.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def mesh_of(size, replicas):
    return init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("dp", "tp"))


def drawn_again(rank, size, replicas):
    """A model made without memory draws what the unsharded one draws from the same seed."""
    mesh = mesh_of(size, replicas)
    torch.manual_seed(3)
    whole = build("whole", bias=False)
    sharded = build("sharded", mesh["tp"], bias=False, device="meta")
    if replicas > 1:
        fully_shard(sharded, mesh=mesh["dp"])
    sharded.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in sharded.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    same_state(sharded, whole)

    torch.manual_seed(4)
    expected = ParallelMLP(6, 11, bias=True, init_method=around_one, tp_group=mesh["tp"])
    mlp = copy.deepcopy(expected).to("meta").to_empty(device="cpu")
    torch.manual_seed(4)
    for layer in mlp.children():
        layer.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(("world", "replicas"), [(3, 1), (4, 2)])
def test_reset_parameters(ranks, world, replicas):
    ranks(world).run(drawn_again, replicas)


def clips(rank, size, replicas, norm_type):
    mesh = mesh_of(size, replicas)
    torch.manual_seed(5)
    whole = build("whole", **DOUBLE)
    sharded = build("sharded", mesh["tp"], **DOUBLE)
    sharded.load_state_dict(whole.state_dict())
    if replicas > 1:
        fully_shard(sharded, mesh=mesh["dp"])
        for index in (0, 2):  # these take whole tensors under FSDP, too
            nn.init.constant_(sharded[index].weight, math.nan)
            sharded[index].load_state_dict(whole[index].state_dict())
    for model in (whole, sharded):
        model[1].bias.requires_grad_(False)
    x = torch.randn(4, 6, **DOUBLE)
    for limit in (0.1, 1e6):
        for model in (whole, sharded):
            model.zero_grad()
            model(x).pow(2).sum().backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), limit, norm_type)
        torch.testing.assert_close(clip_grad_norm_(sharded, limit, norm_type), expected)
        for model in (whole, sharded):
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= parameter.grad
        same_state(sharded, whole)
    for parameter in sharded.parameters():
        parameter.grad = None
    assert clip_grad_norm_(sharded, 1.0, norm_type) == 0
    if mesh.get_local_rank("tp") == 0:
        sharded[2].weight.grad = torch.full_like(sharded[2].weight, math.inf)
    with pytest.raises(RuntimeError, match="is inf"):
        clip_grad_norm_(sharded, 1.0, norm_type, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type must be positive"):
        clip_grad_norm_(sharded, 1.0, 0)


@pytest.mark.parametrize(
    ("norm_type", "world", "replicas"),
    [
        *((norm, 4, 2) for norm in (2.0, 1.0, math.inf)),
        (2.0, 2, 1),
        *(pytest.param(norm, 2, 1, marks=pytest.mark.slow) for norm in (1.0, math.inf)),
    ],
)
def test_clipping(ranks, world, replicas, norm_type):
    ranks(world).run(clips, replicas, norm_type)


def scales(rank, size):
    """As the docstring of `nn` says."""
    torch.manual_seed(rank)
    layer = ColumnParallelLinear(6, 8)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    scaler.scale(layer(torch.ones(2, 6)).sum()).backward()
    if rank == 0:
        layer.weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(layer.weight, before)


def test_one_ranks_infinity_skips_all_ranks_steps(ranks):
    ranks(2).run(scales)
