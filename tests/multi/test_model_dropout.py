"""Dropout of parallelized models, switched on before or after: the unsharded model's under the same masks."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from overlap_gemm.nn import Dropout, per_rank_random
from overlap_gemm.parallel import parallelize
from tests.support.adapters import adapted_pair, close, config_of
from tests.support.models import tiny

IDS = torch.arange(3, 17).view(2, 7)
DROPOUT = F.dropout


def recorded(masks):
    """torch's dropout, whose masks are kept."""

    def draw(x, p=0.5, training=True, inplace=False):
        if not (training and p):
            return x
        out = DROPOUT(torch.ones_like(x), p)
        masks.append(out)
        return x * out

    return mock.patch.object(F, "dropout", draw)


def replayed(masks):
    left = iter(masks)
    return mock.patch.object(F, "dropout", lambda x, p=0.5, training=True, inplace=False: x * next(left))


def joined(mask, dim):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mask)
    return torch.cat(parts, dim), parts


def same_everywhere(value):
    return all(torch.equal(part, value) for part in joined(value, 0)[1])


def of_attentions(rank, size, when, sequence_parallel):
    options = {"attn_implementation": "eager", "attention_dropout": 0.4 if when == "before" else 0.0}
    plain = tiny("llama", size, **options)
    model = parallelize(
        copy.deepcopy(plain), init_device_mesh("cpu", (size,)), sequence_parallel=sequence_parallel
    )
    if when == "after":
        for each in (plain, model):
            for layer in each.model.layers:
                layer.self_attn.attention_dropout = 0.4
    masks = []
    torch.manual_seed(3)
    with recorded(masks):
        out = model(IDS, labels=IDS)
    state = torch.get_rng_state()
    assert same_everywhere(state) and len(masks) == 2
    out.loss.backward()
    full = []
    for mask in masks:
        whole, parts = joined(mask, 1)
        assert not torch.equal(*parts)  # each rank has other heads
        full.append(whole)
    with replayed(full):
        expected = plain(IDS, labels=IDS)
    expected.loss.backward()
    close(out.logits, expected.logits, "logits")
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        close(gradients[name], parameter.grad, name)
    # Recomputed, it draws the same.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    torch.manual_seed(3)
    model(IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        close(parameter.grad.full_tensor(), gradients[name], name)
    assert torch.equal(model.eval()(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("when", "sequence_parallel"), [("before", False), ("after", True)])
def test_attentions_draw_for_their_heads(ranks, when, sequence_parallel):
    ranks(2).run(of_attentions, when, sequence_parallel)


def of_hidden_states(rank, size, sequence_parallel):
    """Phi3's, of rows: each rank's own with sequence parallelism, else the same on all."""
    plain = tiny("phi3", size)
    model = parallelize(
        copy.deepcopy(plain), init_device_mesh("cpu", (size,)), sequence_parallel=sequence_parallel
    )
    for each in (plain, model):
        for layer in each.model.layers:
            layer.resid_attn_dropout.p = layer.resid_mlp_dropout.p = 0.4
    masks = []
    torch.manual_seed(3)
    with recorded(masks):
        out = model(IDS).logits
    assert len(masks) == 4
    if sequence_parallel:
        masks = [joined(mask, 1)[0] for mask in masks]
    else:
        assert all(same_everywhere(mask) for mask in masks)
    with replayed(masks):
        close(out, plain(IDS).logits, "logits")


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_hidden_states_are_drawn_by_rows(ranks, sequence_parallel):
    ranks(2).run(of_hidden_states, sequence_parallel)


def within_an_attention(rank, size):
    """Dropout of what all ranks have stays the same on all inside an attention that has its own."""
    config = config_of(("q_proj", "o_proj"), lora_dropout=0.5)
    options = {"attn_implementation": "eager", "attention_dropout": 0.5}
    _, model = adapted_pair(size, "llama", True, False, config, **options)
    masks = []
    torch.manual_seed(3)
    with recorded(masks):
        model(IDS)
    of_q, of_attention, of_o = masks[:3]
    assert of_q.ndim == of_o.ndim == 3 and of_attention.ndim == 4
    assert same_everywhere(of_q) and same_everywhere(torch.get_rng_state())
    assert not same_everywhere(of_attention) and not same_everywhere(of_o)


@pytest.mark.filterwarnings("ignore")
def test_adapters_within_attentions_with_dropout(ranks):
    ranks(2).run(within_an_attention)


def nested(rank, size):
    x = torch.ones(4, 50)
    replicated = Dropout(per_rank=False)
    torch.manual_seed(1)
    outside = [replicated(x), torch.rand(3)]
    torch.manual_seed(1)
    torch.randint(2**62, (), device="cpu")
    expected = replicated(x)
    torch.manual_seed(1)
    with per_rank_random():
        own = torch.rand(3)
        inside = replicated(x)
        with per_rank_random():
            torch.rand(5)
    after = torch.rand(3)
    assert torch.equal(inside, expected) and not torch.equal(inside, outside[0])
    assert not same_everywhere(own) and same_everywhere(inside) and same_everywhere(after)


def test_replicated_draws_within_a_ranks_own(ranks):
    ranks(2).run(nested)
