"""What training loops do to a parallelized model: accumulate, recompute, clip, mix types, shard again."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from overlap_gemm.parallel import full_state_dict, parallelize, sees_shards
from tests.support.chosen import in_turn
from tests.support.models import VOCABULARY, tiny

SINGLE = {"rtol": 1e-4, "atol": 1e-5}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pair(size, family="llama", mesh=None, dtype=torch.float64, **options):
    plain = tiny(family, size, dtype=dtype)
    sharded = copy.deepcopy(plain)
    return plain, parallelize(sharded, mesh or init_device_mesh("cpu", (size,)), **options)


def same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **SINGLE, msg=lambda text, name=name: f"{name}: {text}"
        )


def same_gradients(plain, sharded):
    found, expected = (
        {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        for model in (sharded, plain)
    )
    same_tensors(found, expected)


def tokens(*lengths):
    torch.manual_seed(1)
    return [torch.randint(VOCABULARY, (2, length)) for length in lengths]


def accumulates(rank, size, family, checkpointing, order):
    """Microbatches of other lengths, backwards after all forwards or in between, recomputed or kept."""
    plain, sharded = pair(size, family)
    if checkpointing:
        sharded.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    for model in (plain, sharded):
        losses = []
        for ids in tokens(7, 12, 5):
            losses.append(model(ids, labels=ids).loss)
            if order == "alternating":
                losses.pop().backward()
        for loss in reversed(losses):
            loss.backward()
    same_gradients(plain, sharded)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (plain, sharded)]
    torch.testing.assert_close(whole(norms[1]), norms[0], **SINGLE)
    same_gradients(plain, sharded)


@pytest.mark.parametrize(
    ("checkpointing", "order"), in_turn([None, "reentrant", "not reentrant"], ["last first", "alternating"])
)
def test_accumulation_and_checkpointing(ranks, checkpointing, order):
    ranks(3).run(accumulates, "qwen3", checkpointing, order)


def train_at_once(rank, size):
    """Two models in two threads, each on a group of its own; the ranks come to them in another order."""
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    pairs = [pair(size, "qwen3", DeviceMesh.from_group(group, "cpu")) for group in groups]

    def train(number):
        plain, sharded = pairs[number]
        if number == rank:
            time.sleep(0.5)
        for model in (sharded, plain):
            for ids in tokens(7, 5):
                model(ids, labels=ids).loss.backward()
        return plain, sharded

    with ThreadPoolExecutor(2) as threads:
        for trained in list(threads.map(train, range(2))):
            same_gradients(*trained)


def test_two_threads_train_a_model_each(ranks):
    """DTensor takes their meshes for one, since ranks and names are equal."""
    ranks(2).run(train_at_once)


def recomputes_a_part(rank, size, part, how):
    plain, sharded = pair(size, "qwen3")
    for model in (plain, sharded):
        for module in [model.model] if part == "norm" else model.model.layers:
            setattr(module, part, checkpoint_wrapper(getattr(module, part), CheckpointImpl[how]))
        losses = [model(ids, labels=ids, use_cache=False).loss for ids in tokens(8, 7, 5)]
        for loss in losses:
            loss.backward()
    for (name, expected), found in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(
            whole(found.grad), expected.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("part", "how"), in_turn(["mlp", "self_attn", "norm"], ["REENTRANT", "NO_REENTRANT"])
)
def test_a_part_of_a_layer_is_recomputed_by_itself(ranks, part, how):
    """While microbatches of other lengths are in flight."""
    ranks(2).run(recomputes_a_part, part, how)


def hooked(rank, size, family):
    """Hooks that change what goes into attentions and MLPs."""
    plain, sharded = pair(size, family)
    (ids,) = tokens(7)
    for model in (plain, sharded):
        layer = model.model.layers[1]
        layer.mlp.register_forward_pre_hook(sees_shards(lambda _, args: (args[0] * 2,)))
        layer.self_attn.register_forward_pre_hook(
            sees_shards(
                lambda _, args, kwargs: (args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 3})
            ),
            with_kwargs=True,
        )
        model(ids, labels=ids).loss.backward()
    same_gradients(plain, sharded)


def test_hooks_change_the_input_of_a_part(ranks):
    ranks(3).run(hooked, "qwen3")


def optimizers_agree(rank, size, options):
    plain, sharded = pair(size, "gemma3")
    (ids,) = tokens(7)
    for model in (plain, sharded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    same_tensors(full_state_dict(sharded), plain.state_dict())


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_optimizers(ranks, options):
    ranks(2).run(optimizers_agree, options)


def loss_of_sharded_logits(rank, size, family):
    plain, sharded = pair(size, family, logits="sharded")
    (ids,) = tokens(7)
    with loss_parallel():
        out = sharded(ids, labels=ids)
        assert out.logits.placements[0].is_shard(2)
        assert out.logits.shape == (2, 7, VOCABULARY)
        whole(out.loss).backward()
    expected = plain(ids, labels=ids)
    expected.loss.backward()
    torch.testing.assert_close(whole(out.loss), expected.loss, **SINGLE)
    torch.testing.assert_close(out.logits.full_tensor(), expected.logits, **SINGLE)
    same_gradients(plain, sharded)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_loss_of_sharded_logits(ranks, family):
    ranks(3).run(loss_of_sharded_logits, family)


def low_precision(rank, size, way):
    """As far from float64 as the unsharded model is, give or take."""
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    plain, sharded = pair(size, "llama", dtype=dtype)
    true = copy.deepcopy(plain).double()
    (ids,) = tokens(7)
    results = []
    for model in (true, plain, sharded):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast" and model is not true):
            out = model(ids, labels=ids)
        out.loss.backward()
        gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        results.append({"logits": out.logits, "loss": out.loss, **gradients})
    reference, expected, found = results
    for name, value in reference.items():
        assert found[name].dtype == expected[name].dtype, name
        scale = value.abs().max()
        errors = [
            ((result[name].double() - value).abs().max() / scale).item() for result in (expected, found)
        ]
        assert errors[1] <= 3 * errors[0] + 0.02, (name, errors)


@pytest.mark.parametrize("way", ["bf16", "autocast"])
def test_low_precision(ranks, way):
    ranks(2).run(low_precision, way)


def two_dimensions(rank, size, way):
    """Two replicas of two tensor-parallel ranks, each with half of the batch; tied and uneven weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, sharded = pair(2, "qwen3", mesh["tp"])
    if way == "fsdp":
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(sharded, mesh=mesh["dp"])
    else:
        replicate(sharded, mesh=mesh["dp"])
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (2, 2, 7))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, sharded)]
    for step in range(3):
        own = ids[(mesh["dp"].get_local_rank() + step) % 2]
        sharded(own, labels=own).loss.backward()
        every = ids.flatten(0, 1)
        plain(every, labels=every).loss.backward()
        same_gradients(plain, sharded)
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (plain, sharded)]
        torch.testing.assert_close(whole(norms[1]), norms[0], **SINGLE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_beside_data_parallelism(ranks, way):
    ranks(4).run(two_dimensions, way)


def under_ddp(rank, size, family, options):
    """It makes local tensors of the parameters, so norms of gradients are not to be had."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, sharded = pair(2, family, mesh["tp"])
    wrapped = DistributedDataParallel(sharded, device_mesh=mesh["dp"], **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, wrapped)]
    for length in (7, 4, 9):
        torch.manual_seed(length)
        microbatches = torch.randint(VOCABULARY, (3, 2, 2, length))
        for number, ids in enumerate(microbatches):
            with nullcontext() if number == 2 or "static_graph" in options else wrapped.no_sync():
                own = ids[mesh["dp"].get_local_rank()]
                wrapped(own, labels=own).loss.backward()
            every = ids.flatten(0, 1)
            plain(every, labels=every).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(every).logits, plain(every).logits, **SINGLE)
    head = sharded.lm_head.weight
    local = head.to_local() if isinstance(head, DTensor) else head
    shard = plain.lm_head.weight.chunk(2)[mesh["tp"].get_local_rank()]
    torch.testing.assert_close(local, shard, **SINGLE)


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3", {}), ("phi3", {"gradient_as_bucket_view": True}), ("llama", {"static_graph": True})],
    ids=["plain", "views", "static"],
)
def test_under_distributed_data_parallel(ranks, family, options):
    """Microbatches of which the last is synchronised, other lengths, an optimizer that minds factors."""
    ranks(4).run(under_ddp, family, options)
