"""Parallelized models are saved and loaded: whole, sharded, and by another number of ranks."""

import copy
import io
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from overlap_gemm.parallel import exportable, full_state_dict, full_tensors, parallelize
from tests.support.models import VOCABULARY, tiny

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 6}  # of 1, 2 and 3 ranks


def trained(size, family, **options):
    """A model and its optimizer after two steps, and the unsharded model's weights there."""
    plain = tiny(family, size, **HEADS)
    sharded = parallelize(copy.deepcopy(plain), init_device_mesh("cpu", (size,)), **options)
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, 7))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, sharded)]
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        for _ in range(2):
            step(model, optimizer, ids)
    return plain, sharded, optimizers, ids


def step(model, optimizer, ids):
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def same_weights(sharded, plain):
    found = full_state_dict(sharded)
    assert found.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def saves(rank, size, family, folder):
    _, sharded, (_, optimizer), _ = trained(size, family)
    model_state, optimizer_state = get_state_dict(sharded, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def loads_and_goes_on(rank, size, family, folder):
    plain, _, (optimizer, _), ids = trained(size, family)
    torch.manual_seed(7)
    fresh = tiny(family, size, **HEADS)
    for parameter in fresh.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    parallelize(fresh, init_device_mesh("cpu", (size,)), sequence_parallel=False)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(fresh, fresh_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        fresh, fresh_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    same_weights(fresh, plain)
    for model, each in ((plain, optimizer), (fresh, fresh_optimizer)):
        step(model, each, ids)  # with the moments that were saved
    same_weights(fresh, plain)


@pytest.mark.parametrize(
    ("family", "before", "after"), [("phi3", 2, 3), ("gemma3", 3, 1), ("mixtral", 2, 3), ("llama4", 3, 2)]
)
def test_distributed_checkpoint_for_another_number_of_ranks(ranks, tmp_path, family, before, after):
    ranks(before).run(saves, family, str(tmp_path))
    ranks(after).run(loads_and_goes_on, family, str(tmp_path))


def save_pretrained(rank, size, family, folder):
    _, sharded, _, _ = trained(size, family)
    if "explicitly" in folder:
        sharded.save_pretrained(folder, state_dict=full_state_dict(sharded))
    else:
        copy.deepcopy(sharded).save_pretrained(folder)
    dist.barrier()


def loads_pretrained(rank, size, family, folder):
    plain, *_ = trained(1, family) if size == 1 else (tiny(family, size, **HEADS),)
    loaded = type(plain).from_pretrained(folder, dtype=torch.float64)
    sharded = parallelize(copy.deepcopy(loaded), init_device_mesh("cpu", (size,)))
    same_weights(sharded, loaded)
    if size == 1:
        same_weights(sharded, plain)
    ids = torch.arange(5).view(1, 5)
    torch.testing.assert_close(sharded(ids).logits, loaded(ids).logits, rtol=1e-4, atol=1e-5)
    # An unsharded state dict, and a sharded one, into a model that is sharded already.
    for state in (loaded.state_dict(), sharded.state_dict()):
        other = parallelize(tiny(family, size, **HEADS), init_device_mesh("cpu", (size,)))
        other.load_state_dict(state)
        same_weights(other, loaded)


@pytest.mark.parametrize(("family", "how"), [("phi3", "explicitly"), ("gemma3", "by itself")])
def test_save_pretrained(ranks, tmp_path, family, how):
    ranks(2).run(save_pretrained, family, str(tmp_path / how))
    for world in (1, 3):
        ranks(world).run(loads_pretrained, family, str(tmp_path / how))


def pickled(rank, size):
    plain, sharded, _, _ = trained(size, "phi3")
    file = io.BytesIO()
    torch.save(sharded, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    same_weights(again, plain)
    ids = torch.arange(5).view(1, 5)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()  # the other model's alone
    assert again(ids).logits.any()


def test_a_model_can_be_pickled(ranks):
    """Each rank its own, for a world like this one."""
    ranks(2).run(pickled)


def what_nobody_could_gather(rank, size):
    """Refused instead of written: one rank's shards under the names of the whole."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    model = parallelize(tiny("llama", size), mesh["tp"])
    with torch.no_grad(), exportable(model), pytest.raises(ValueError, match="one rank's"):
        full_state_dict(model)
    whole = full_state_dict(model)
    assert whole["lm_head.weight"].shape[0] == model.resize_token_embeddings(VOCABULARY).num_embeddings
    with pytest.raises(ValueError, match=r"resize it \(97 rows now\) before parallelize"):
        model.resize_token_embeddings(50)
    replicas = DistributedDataParallel(model, device_mesh=mesh["dp"])
    ids = torch.arange(6).view(1, 6)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'model.embed_tokens' are no DTensors .* one rank's"):
            full_state_dict(model)
        replicas(ids, labels=ids).loss.backward()  # after it, the parameters are not even registered


def test_what_nobody_could_gather(ranks):
    ranks(2).run(what_nobody_could_gather)


def streams(rank, size, family):
    """A rollout engine's weights: the unsharded model's names and values, one gathered tensor at a time."""
    plain, sharded, _, _ = trained(size, family)
    gathered = []
    whole = DTensor.full_tensor
    with mock.patch.object(DTensor, "full_tensor", lambda self: (gathered.append(1), whole(self))[1]):
        tensors = full_tensors(sharded)
        assert not gathered
        name, _ = next(tensors)
        assert name == "model.embed_tokens.weight" and len(gathered) == 1
        rest = dict(tensors)
    expected = plain.state_dict()
    assert [name, *rest] == list(expected)
    for name, value in rest.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["phi3", "mixtral", "gemma3"])
def test_weights_are_streamed(ranks, family):
    ranks(2).run(streams, family)
