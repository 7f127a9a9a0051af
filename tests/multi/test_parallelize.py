"""`parallelize` on small Hugging Face models of every family, against the unsharded model in float64."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from overlap_gemm.parallel import full_state_dict, parallelize
from overlap_gemm.testing.models import FAMILIES, VOCABULARY, tiny

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
        else:
            gradients[name] = whole(parameter.grad)
    return {**gradients, **{name: torch.cat(pieces) for name, pieces in packed.items()}}


def same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **SINGLE, msg=lambda text, name=name: f"{name}: {text}"
        )


def trains_as_unsharded(rank, size, family, options, shape):
    plain = tiny(family, size)
    if rank:
        for parameter in (sharded := copy.deepcopy(plain)).parameters():
            parameter.data.zero_()  # rank 0's weights are taken
    else:
        sharded = copy.deepcopy(plain)
    parallelize(sharded, init_device_mesh("cpu", (size,)), **options)
    torch.manual_seed(1)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, sharded)]
    for _ in range(5):
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


CASES = [
    (world, sequence, family) for world in (1, 2, 3, 4) for sequence in (True, False) for family in FAMILIES
]
QUICK = {
    *((3, True, family) for family in FAMILIES),
    *((2, False, each) for each in ("llama", "qwen3", "phi3")),
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
