"""Small models of the families that `overlap_gemm.parallel.parallelize` knows, for tests."""

from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")

MORE_FAMILIES = ("olmo2", "granite", "mixtral", "qwen3_moe", "llama4")
"""Further ones, for the tests of what every family does."""

VOCABULARY = 97
"""Divisible by no number of ranks."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"attention_bias": True, "tie_word_embeddings": True},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 4, "tie_word_embeddings": True},
    "gemma3": {"sliding_window": 5, "query_pre_attn_scalar": 4, "tie_word_embeddings": True},
    "phi3": {"pad_token_id": 0},
    "olmo2": {"attention_bias": False},
    "granite": {
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "tie_word_embeddings": True,
    },
    "mixtral": {"sliding_window": 5, "intermediate_size": 12, "num_local_experts": 5},
    "qwen3_moe": {
        "moe_intermediate_size": 12,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "llama4": {
        "intermediate_size": 12,
        "intermediate_size_mlp": 22,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 5,
        "floor_scale": 3,
        "attention_bias": True,
    },
}


def tiny_for_plans(family: str) -> nn.Module:
    """Returns `tiny` with a head that transformers' plans of two ranks shard: before 5.21, of even height."""
    import transformers

    is_strict = Version(transformers.__version__) < Version("5.21")
    return tiny(family, 2, vocab_size=VOCABULARY + is_strict)


def tiny(family: str, ranks: int, *, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """A causal language model of two layers with random weights, biases and norms.

    Args:
        family: One of `FAMILIES` or `MORE_FAMILIES`.
        ranks: The numbers of query and key/value heads become multiples of it.
        dtype: Of the parameters.
        **options: Of the configuration, instead of those chosen here.
    """
    import transformers

    kv_heads = ranks if ranks > 1 else 2
    named = {"gemma3": "Gemma3Text", "qwen3_moe": "Qwen3Moe", "llama4": "Llama4Text"}
    name = named.get(family, family.capitalize())
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 2,
            "num_attention_heads": 2 * kv_heads, "num_key_value_heads": kv_heads, "head_dim": 4,
            "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
            **_OPTIONS[family], **options,
        }
    )  # fmt: skip
    if dtype == torch.float64:  # grouped products have no float64
        config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).to(dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model.train()


def save_with_tokenizer(folder: Path) -> None:
    """Saves a small model, and a tokenizer with a token for each character, as published ones are saved."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<pad>", "<bos>", "<eos>", *sorted({chr(code) for code in range(32, 123)})][:VOCABULARY]
    splitter = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    splitter.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    tiny("qwen3", 2, dtype=torch.float32, max_position_embeddings=256).save_pretrained(folder)
