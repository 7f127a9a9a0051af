"""New weights of parallelized models: the unsharded model's numbers for a seed, drawn into shards."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_gemm.parallel import full_state_dict, materialize, parallelize
from tests.support.chosen import in_turn
from tests.support.models import FAMILIES, MORE_FAMILIES, tiny


def without_memory(family, size, dtype, **options):
    model = tiny(family, size, **options)
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        return type(model)(config).to(dtype)


def drawn(family, size, dtype, seed, **options):
    """The unsharded model by the same recipe, and torch's state after it."""
    plain = without_memory(family, size, dtype, **options).to_empty(device="cpu")
    torch.manual_seed(seed)
    plain.init_weights()
    return plain, torch.get_rng_state()


def equals(model, plain, state):
    whole = full_state_dict(model)
    assert whole.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(whole[name], value), name
        assert value.isfinite().all()
    for (name, found), (other, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert name == other and torch.equal(found, expected), name
    assert torch.equal(torch.get_rng_state(), state)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embedding.weight is head.weight) == model.config.tie_word_embeddings


def initialised(rank, size, family, dtype, by_torch, options):
    model = parallelize(without_memory(family, size, dtype, **options), init_device_mesh("cpu", (size,)))
    if by_torch:
        model.to_empty(device="cpu")
    else:
        materialize(model)
        assert all(parameter.to_local().isnan().all() for parameter in model.parameters())
    torch.manual_seed(7 if rank == 0 else 100 + rank)  # rank 0's numbers are every rank's
    model.init_weights()
    equals(model, *drawn(family, size, dtype, 7, **options))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model.init_weights()  # as of the unsharded model a second call draws nothing
    assert torch.equal(torch.get_rng_state(), before)
    equals(model, drawn(family, size, dtype, 7, **options)[0], torch.get_rng_state())
    if dtype == torch.float32:  # and it is a model as any other
        ids = torch.arange(9).view(1, 9)
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.isfinite()


UNLIKE = ("gemma3", "olmo2", "qwen3_moe", "llama4")
"""Families of which no two initialise alike, nor as those of the next test."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in UNLIKE else pytest.mark.slow)
        for family in (*FAMILIES, *MORE_FAMILIES)
    ],
)
def test_numbers_are_the_unsharded_models(ranks, family):
    ranks(2).run(initialised, family, torch.float32, False, {})


@pytest.mark.parametrize(
    ("family", "size", "dtype", "by_torch", "options"),
    [
        ("qwen3", 3, torch.bfloat16, False, {}),
        ("qwen3", 2, torch.float32, True, {}),
        ("llama", 1, torch.bfloat16, False, {}),
        ("llama", 2, torch.float32, True, {}),
        ("phi3", 3, torch.bfloat16, True, {}),
        ("mixtral", 2, torch.bfloat16, True, {}),
        ("qwen2", 2, torch.float32, False, {"num_key_value_heads": 1, "num_attention_heads": 4}),
    ],
)
def test_of_any_type_and_way(ranks, family, size, dtype, by_torch, options):
    ranks(size).run(initialised, family, dtype, by_torch, options)


def under_fsdp(rank, size, family, by_torch):
    """In torchtitan's order: parallelize, FSDP, memory, weights; or with memory before FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(without_memory(family, 2, torch.float32), mesh["tp"])
    if not by_torch:
        materialize(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if by_torch:
        model.to_empty(device="cpu")
    torch.manual_seed(7)
    model.init_weights()
    plain, state = drawn(family, 2, torch.float32, 7)
    assert torch.equal(torch.get_rng_state(), state)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for name, value in plain.state_dict().items():
        if "qkv_proj" not in name and "gate_up_proj" not in name:
            assert torch.equal(whole[name], value), name
    ids = torch.arange(9).view(1, 9)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "by_torch"), in_turn(["llama", "phi3"], [False, True]))
def test_under_fsdp(ranks, family, by_torch):
    ranks(4).run(under_fsdp, family, by_torch)


def partly(rank, size):
    """What is there before is not drawn; parameters of an initialised model are let be."""
    model = parallelize(tiny("llama", 2), init_device_mesh("cpu", (size,)))
    before = {name: value.clone() for name, value in full_state_dict(model).items()}
    model.init_weights()
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, before[name]), name
    dist.barrier()


def test_an_initialised_model_stays(ranks):
    ranks(2).run(partly)
