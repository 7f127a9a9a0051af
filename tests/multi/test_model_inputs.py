"""Ranks that give a parallelized model other inputs learn it by name, all of them; one draws for all."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap_gemm.parallel import parallelize
from overlap_gemm.runtime.agree import DisagreementError
from tests.support.models import tiny

IDS = torch.arange(3, 15).view(2, 6)
MASK = torch.ones_like(IDS)


def changed(tensor, where, value):
    other = tensor.clone()
    other[where] = value
    return other


OTHERS = {
    "ids": ({"input_ids": IDS}, {"input_ids": changed(IDS, 1, 60)}, r"on input_ids: rank 1 has \[2, 6\]"),
    "length": ({"input_ids": IDS}, {"input_ids": IDS[:, :5]}, r"on input_ids: rank 1 has \[2, 5\]"),
    "batch": ({"input_ids": IDS}, {"input_ids": IDS[:1]}, r"on input_ids: rank 1 has \[1, 6\]"),
    "dtype": ({"input_ids": IDS}, {"input_ids": IDS.int()}, r"on input_ids: .*torch\.int32"),
    "labels": ({"input_ids": IDS, "labels": IDS}, {"input_ids": IDS, "labels": IDS + 1}, "on labels: rank 1"),
    "no-labels": ({"input_ids": IDS, "labels": IDS}, {"input_ids": IDS}, "on labels: rank 1 has None"),
    "mask": (
        {"input_ids": IDS, "attention_mask": MASK},
        {"input_ids": IDS, "attention_mask": changed(MASK, (0, 0), 0)},
        "on attention_mask: rank 1",
    ),
    "positions": (
        {"input_ids": IDS, "position_ids": IDS[:1] - 3},
        {"input_ids": IDS, "position_ids": IDS[:1] - 2},
        "on position_ids: rank 1",
    ),
    "embeddings": (
        {"inputs_embeds": torch.ones(1, 4, 24).double()},
        {"inputs_embeds": torch.zeros(1, 4, 24).double()},
        "on inputs_embeds: rank 1",
    ),
    "keep": ({"input_ids": IDS, "logits_to_keep": 2}, {"input_ids": IDS}, "on logits_to_keep"),
}  # fmt: skip


def differ(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    for sequence_parallel in (True, False):
        model = parallelize(tiny("llama", size), mesh, sequence_parallel=sequence_parallel)
        for usual, other, words in OTHERS.values():
            with pytest.raises(DisagreementError, match=f"forward: the ranks of the group disagree {words}"):
                model(**(other if rank == 1 else usual))
        with pytest.raises(DisagreementError, match="embedding: .* disagree on input: rank 1"):
            model.get_input_embeddings()(IDS if rank == 1 else IDS[:1])
        model(IDS, labels=IDS).loss.backward()  # the ranks are in step
        cache = model(IDS[:, :3], use_cache=True).past_key_values
        if rank == 1:
            cache.crop(-1)
        with pytest.raises(DisagreementError, match="length of (past_key_values|cache): "):
            model(IDS[:, 3:], past_key_values=cache)


def test_other_inputs_are_named_on_every_rank(ranks):
    ranks(3).run(differ)


class Late:
    """A criterion of the user's that is another one's clock."""

    def __init__(self, rank):
        self.rank, self.calls = rank, 0

    def __call__(self, input_ids, scores, **_):
        self.calls += 1
        return torch.full((input_ids.shape[0],), self.calls >= (3, 1, 5)[self.rank])


def samples(rank, size):
    from peft import LoraConfig, get_peft_model

    mesh = init_device_mesh("cpu", (size,))
    model = parallelize(tiny("llama", size), mesh).eval()
    adapted = get_peft_model(
        parallelize(tiny("qwen3", size), mesh, sequence_parallel=False),
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    ).eval()
    options = {"max_new_tokens": 8, "pad_token_id": 0, "attention_mask": MASK}
    ways = [
        {"do_sample": True, "top_k": 0, "temperature": 2.0},
        {"do_sample": True, "num_beams": 3},
        {"do_sample": False, "stopping_criteria": Late},
        {"do_sample": True, "top_k": 0, "max_time": (60.0, 0.0, 60.0)[rank]},
    ]
    texts = []
    for way in ways:
        for each in (model, adapted):
            torch.manual_seed(100 + rank)  # generators that diverge
            if "stopping_criteria" in way:
                way = {**way, "stopping_criteria": [Late(rank)]}  # noqa: PLW2901
            texts.append(each.generate(input_ids=IDS, **options, **way))
    texts.append(torch.rand(3))  # and are in step afterwards
    lengths = {text.shape[1] for text in texts[4:6]}
    everyone = [None] * size
    dist.all_gather_object(everyone, texts)
    for other in everyone:
        for one, first in zip(other, everyone[0], strict=True):
            assert torch.equal(one, first)
    assert lengths == {9}, "rank 0 ends after 3 tokens, whatever the others want"


def test_ranks_sample_and_stop_as_one(ranks):
    ranks(3).run(samples)
