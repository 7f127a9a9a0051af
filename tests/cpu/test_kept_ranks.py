"""Up to how many ranks published checkpoints keep their blocks of 128 x 128: the table of docs/models.md."""

import re
from pathlib import Path

import pytest

from overlap_gemm.parallel.checkpoints.stored import keeps_blocks

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
PUBLISHED = {
    # query heads, width of a head, key/value heads, features of the MLP, as published
    "Qwen/Qwen3-0.6B-FP8": (16, 128, 8, 3072),
    "Qwen/Qwen3-1.7B-FP8": (16, 128, 8, 6144),
    "Qwen/Qwen3-4B-FP8": (32, 128, 8, 9728),
    "Qwen/Qwen3-8B-FP8": (32, 128, 8, 12288),
    "Qwen/Qwen3-14B-FP8": (40, 128, 8, 17408),
    "Qwen/Qwen3-32B-FP8": (64, 128, 8, 25600),
    "Llama 3.2 1B": (32, 64, 8, 8192),
    "Llama 3.1 8B": (32, 128, 8, 14336),
    "Llama 3.3 70B": (64, 128, 8, 28672),
    "Mistral Small 24B": (32, 128, 8, 32768),
    "Gemma 3 12B": (16, 256, 8, 15360),
    "Gemma 3 27B": (32, 128, 16, 21504),
}
RANKS = (1, 2, 4, 8, 16, 32)


def kept(heads, width, kv_heads, features):
    return [p for p in RANKS if keeps_blocks((heads, width, kv_heads, features), 128, p)]


def test_the_page_groups_checkpoints_by_the_largest_p():
    stated = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE, re.MULTILINE))
    largest = {name: kept(*sizes)[-1] for name, sizes in PUBLISHED.items()}
    for p in {*largest.values()} | {*map(int, stated)}:
        assert stated[str(p)].split(", ") == [name for name in PUBLISHED if largest[name] == p]


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_power_of_two_up_to_the_largest_p_keeps_the_bits(name):
    ranks = kept(*PUBLISHED[name])
    assert ranks == list(RANKS[: len(ranks)])


def test_the_rule():
    assert kept(32, 128, 8, 12288) == [1, 2, 4, 8, 16, 32]  # 32 ranks: 3 blocks of features, a head each
    assert kept(32, 128, 8, 9728) == [1, 2, 4]  # 76 blocks
    assert kept(32, 64, 8, 8192) == [1, 2, 4, 8, 16]  # k and v: 64 rows at 8 ranks; q 128 at 16, 64 at 32
    assert kept(6, 64, 6, 768) == [1]  # at 2 ranks 192 rows of q
