"""`parallelize` on small Hugging Face models of every family, against the unsharded model in float64."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from overlap_gemm.parallel import full_state_dict, parallelize
from tests.support.chosen import in_turn
from tests.support.counting import counted_ops
from tests.support.models import FAMILIES, MORE_FAMILIES, VOCABULARY, tiny

SINGLE = {"rtol": 3e-5, "atol": 3e-6}
"""Hugging Face's norms turn to float32 in a float64 model, too."""


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_gradients(model):
    """Every parameter's gradient, whole, by the unsharded model's names."""
    packed, gradients = {}, {}
    for name, parameter in model.named_parameters():
        path, _, _ = name.removesuffix(".weight").rpartition(".")
        if path.endswith(("qkv_proj", "gate_up_proj")):
            packed.setdefault(f"{path}.weight", []).append(whole(parameter.grad))
        elif name.endswith("experts.gate_up_proj"):  # gates and ups are apart
            dim = 2 if "llama4" in type(model).__module__ else 1
            gradients[name] = whole(parameter.grad).flatten(dim, dim + 1)
        else:
            gradients[name] = whole(parameter.grad)
    return {**gradients, **{name: torch.cat(pieces) for name, pieces in packed.items()}}


def same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **SINGLE, msg=lambda text, name=name: f"{name}: {text}"
        )


def exact_norm(norm, x):
    """OLMo2's norm in float64: a sum over ranks in float32 would be one in another order."""
    return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


def trains_as_unsharded(rank, size, family, options, shape, **model_options):
    if family == "olmo2":
        Olmo2RMSNorm.forward = exact_norm  # of these processes
    plain = tiny(family, size, **model_options)
    if rank:
        for parameter in (sharded := copy.deepcopy(plain)).parameters():
            parameter.data.zero_()  # rank 0's weights are taken
    else:
        sharded = copy.deepcopy(plain)
    parallelize(sharded, init_device_mesh("cpu", (size,)), **options)
    torch.manual_seed(1)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, sharded)]
    for _ in range(3):
        ids = torch.randint(VOCABULARY, shape)
        ids[0, 0] = 0  # the padding, for families that have one: its row of the embedding gets no gradient
        outs = [model(ids, labels=ids) for model in (plain, sharded)]
        for out in outs:
            out.loss.backward()
        torch.testing.assert_close(outs[1].loss, outs[0].loss, **SINGLE)
        torch.testing.assert_close(outs[1].logits, outs[0].logits, **SINGLE)
        same_tensors(whole_gradients(sharded), {name: p.grad for name, p in plain.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_tensors(full_state_dict(sharded), plain.state_dict())
    return {
        name: parameter.to_local().detach()
        for name, parameter in sharded.named_parameters()
        if parameter.placements[0].is_replicate()
    }


def sums_once_for_each_part(rank, size, family, of_a_layer):
    model = tiny(family, size)
    layers = model.config.num_hidden_layers
    parallelize(model, init_device_mesh("cpu", (size,)), sequence_parallel=False)
    ids = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    with counted_ops() as ops:
        model(ids, labels=ids).loss.backward()
    assert ops == {"gemm_all_reduce": layers * of_a_layer + 1, "gemm_all_gather": 1}  # 1: the head


@pytest.mark.parametrize(("family", "of_a_layer"), [("llama", 4), ("phi3", 4), ("llama4", 4)])
def test_each_part_of_a_layer_sums_once_forward_and_once_backward(ranks, family, of_a_layer):
    """Gradients of several projections of one input are summed together, without sequence parallelism."""
    ranks(2).run(sums_once_for_each_part, family, of_a_layer)


CASES = [
    (world, sequence, family)
    for world in (1, 2, 3, 4)
    for sequence in (True, False)
    for family in (*FAMILIES, *MORE_FAMILIES)
]
QUICK = {
    *((3, True, family) for family in (*FAMILIES, *MORE_FAMILIES)),
    *((2, False, each) for each in ("llama", "phi3", "mixtral")),
}


@pytest.mark.parametrize(
    ("world", "sequence_parallel", "family"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_training(ranks, world, sequence_parallel, family):
    first, *others = ranks(world).run(
        trains_as_unsharded, family, {"sequence_parallel": sequence_parallel}, (2, 7)
    )
    assert first
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), f"{name} drifted between ranks"


FUSED = {
    *((3, True, family) for family in ("phi3", "gemma3", "llama4")),
    *((2, True, "qwen3"), (2, False, "llama"), (1, True, "mistral")),
}


@pytest.mark.parametrize(
    ("world", "sequence_parallel", "family"),
    [
        pytest.param(*case, marks=[] if case in FUSED else pytest.mark.slow)
        for case in CASES
        if case in FUSED or case[:2] == (3, True)
    ],
)
def test_training_with_epilogues(ranks, world, sequence_parallel, family):
    options = {"sequence_parallel": sequence_parallel, "fuse": True}
    ranks(world).run(trains_as_unsharded, family, options, (2, 7))


SHARED = [(4, 2, True, "llama"), (4, 1, False, "qwen3"), (2, 1, True, "mixtral")]
SHARED_SLOW = [
    (world, heads, sequence, family)
    for world, heads in ((4, 2), (4, 1), (2, 1))
    for sequence in (True, False)
    for family in ("gemma3", "qwen2", "granite", "llama4")
]


@pytest.mark.parametrize(
    ("world", "heads", "sequence_parallel", "family"),
    [*SHARED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SHARED_SLOW)],
)
def test_fewer_key_value_heads_than_ranks(ranks, world, heads, sequence_parallel, family):
    """Two ranks, or four, compute the same head, for query heads of their own."""
    first, *others = ranks(world).run(
        trains_with_heads, family, {"sequence_parallel": sequence_parallel}, (2, 7), heads
    )
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), f"{name} drifted between ranks"


def trains_with_heads(rank, size, family, options, shape, heads):
    own = trains_as_unsharded(
        rank, size, family, options, shape, num_attention_heads=8, num_key_value_heads=heads
    )
    assert any(name.endswith("k_proj.weight") for name in own)  # on every rank, and the same
    return own


def routes_as_unsharded(rank, size, family, options):
    """With the products of real runs (float32), and the loss that balances the experts."""
    wide = {"intermediate_size": 16, "moe_intermediate_size": 16}
    plain = tiny(
        family, size, dtype=torch.float32, output_router_logits=True, router_aux_loss_coef=0.5, **wide
    )
    sharded = parallelize(copy.deepcopy(plain), init_device_mesh("cpu", (size,)), **options)
    ids = torch.arange(14).view(2, 7)
    found, expected = (model(ids, labels=ids) for model in (sharded, plain))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, **close)
    torch.testing.assert_close(found.loss, expected.loss, **close)
    for out in (found, expected):
        out.loss.backward()
    for name, gradient in whole_gradients(sharded).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, **close)


@pytest.mark.parametrize(("family", "sequence_parallel"), in_turn(["mixtral", "qwen3_moe"], [True, False]))
def test_mixtures_of_experts(ranks, family, sequence_parallel):
    ranks(2).run(routes_as_unsharded, family, {"sequence_parallel": sequence_parallel})
