"""Parallelized models generate, keep some logits and mask padding as the unsharded model does."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap_gemm.parallel import parallelize
from tests.support.models import FAMILIES, MORE_FAMILIES, VOCABULARY, tiny

SINGLE = {"rtol": 1e-4, "atol": 1e-5}


def serves_as_unsharded(rank, size, family, sequence_parallel):
    # Gemma2's own attention makes float64's mask value infinite in float32, and NaN of padding.
    plain = tiny(family, size, dtype=torch.float32 if family == "gemma2" else torch.float64).eval()
    sharded = copy.deepcopy(plain)
    parallelize(sharded, init_device_mesh("cpu", (size,)), sequence_parallel=sequence_parallel)
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding on the left, as generation wants it
    for keep in (1, 3, torch.tensor([3, 5])):
        logits = [model(ids, attention_mask=mask, logits_to_keep=keep).logits for model in (plain, sharded)]
        torch.testing.assert_close(logits[1], logits[0], **SINGLE)
    ways = [{"do_sample": False}, {"do_sample": True, "temperature": 1.3, "top_k": 20}]
    if family == "llama":  # these differ in Hugging Face's code only, which all families share
        ways += [{"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}]
    for options in ways:
        texts = []
        for model in (plain, sharded):
            torch.manual_seed(2)
            texts.append(
                model.generate(
                    ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, pad_token_id=0, **options
                )
            )
        assert texts[0].shape == (2, 11)
        assert torch.equal(*texts), options


CACHES = {"llama", "mistral", "gemma2", "gemma3", "phi3", "llama4"}
"""Families of which no two keep their keys and values alike; the others do it as Llama does."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=[] if each in CACHES else pytest.mark.slow)
        for each in (*FAMILIES, *MORE_FAMILIES)
    ],
)
@pytest.mark.parametrize(
    ("world", "sequence_parallel"),
    [
        (3, True),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_serving(ranks, world, sequence_parallel, family):
    ranks(world).run(serves_as_unsharded, family, sequence_parallel)


def test_serving_without_sequence_parallelism(ranks):
    ranks(2).run(serves_as_unsharded, "llama", False)
