"""What `parallelize` has no rule for it refuses, with the module's name, and leaves as it is."""

import types

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from overlap_gemm.parallel import OverlapColwiseParallel, parallelize
from overlap_gemm.parallel.assignment import UnknownModuleError, plan
from tests.support.models import FAMILIES, MORE_FAMILIES, tiny

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip


def other(name, **options):
    import transformers

    config = getattr(transformers, f"{name}Config")(**SMALL, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def changed(change, family="llama", **options):
    model = tiny(family, 4, **options)
    change(model)
    return model


def set_attribute(path, value):
    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(
            model.get_submodule(parent),
            name,
            value(model) if isinstance(value, types.FunctionType) else value,
        )

    return change


class LoraLinear(nn.Linear):
    pass


def classifier():
    import transformers

    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL))


REFUSED = {
    "gpt2": (lambda: other("GPT2"), r"'transformer\.wte' \(Embedding\): it holds parameters and has"),
    "gpt-neox": (lambda: other("GPTNeoX"), r"'.*' \(\w+\): it holds parameters and has no known place"),
    "gpt-oss": (lambda: other("GptOss"), r"self_attn' \(GptOssAttention\): .* no parameters .*, got sinks"),
    "olmo3": (lambda: other("Olmo3"), r"Olmo3ForCausalLM: model_type 'olmo3' is not among"),
    "experts": (lambda: tiny("mixtral", 4, intermediate_size=6), r"experts' .*the 6 features of an expert"),
    "grouped": (
        lambda: tiny("mixtral", 4, dtype=torch.float32), r"3 features of an expert are 12 bytes"
    ),
    "jitter": (lambda: tiny("mixtral", 4, router_jitter_noise=0.1), r"mlp' .*jitter_noise=0.1 would need"),
    "shared": (lambda: other("Qwen2Moe"), r"'model\.layers\.0\.mlp' \(Qwen2Moe\w+\): its children .*shared"),
    "norm over heads": (
        lambda: tiny("olmo2", 4, num_key_value_heads=2), r"k_norm' .*norm over all heads .* P=4 divides"
    ),
    "classifier": (classifier, r"'score' \(Linear\): it holds parameters"),
    "heads": (lambda: tiny("llama", 3), r"'model\.layers\.0\.self_attn' .*num_attention_heads=6 is not"),
    "kv-heads": (
        lambda: tiny("llama", 4, num_attention_heads=12, num_key_value_heads=3),
        r"num_key_value_heads=3 is neither a multiple nor a divisor of P=4",
    ),
    "dropout": (
        lambda: changed(set_attribute("model.layers.1.mlp.act_fn", nn.Dropout(0.2))),
        r"'model\.layers\.1\.mlp\.act_fn' \(Dropout\): dropout p=0.2",
    ),
    "subclass": (
        lambda: changed(set_attribute("model.layers.1.mlp.up_proj", LoraLinear(24, 22))),
        r"'model\.layers\.1\.mlp\.up_proj' \(LoraLinear\): a projection must be a plain nn\.Linear",
    ),
    "tied": (
        lambda: changed(
            set_attribute("model.layers.1.mlp.up_proj.weight", lambda m: m.model.layers[0].mlp.up_proj.weight)
        ),
        r"'model\.layers\.1\.mlp\.up_proj\.weight' .*tied to 'model\.layers\.0\.mlp\.up_proj\.weight'",
    ),
    "patched": (
        lambda: changed(
            set_attribute("model.layers.0.input_layernorm.forward", lambda _: lambda x: x),
        ),
        r"'model\.layers\.0\.input_layernorm' .*its forward has been replaced already",
    ),
    "sparse": (
        lambda: changed(set_attribute("model.embed_tokens.sparse", True)), r"embed_tokens' .*need all rows"
    ),
    "vocabulary": (lambda: tiny("llama", 4, vocab_size=5), r"5 rows leave the last of P=4 ranks"),
    "no-mlp": (lambda: changed(set_attribute("model.layers.0.mlp", None)), r"layers\.0' .*must have mlp"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    build, words = REFUSED[case]
    model = build()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(UnknownModuleError, match=words):
        plan(model, 4)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_every_module_with_parameters_has_a_role(family):
    model = tiny(family, 4)
    roles = plan(model, 4)
    holders = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    assert holders <= roles.keys()


def wrong_uses(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    model = parallelize(tiny("llama", size), mesh)
    with pytest.raises(UnknownModuleError, match="has been parallelized already"):
        parallelize(model, mesh)
    fresh, column = tiny("llama", size), OverlapColwiseParallel()
    for arguments, words in (
        ({"logits": "shard"}, "logits must be 'replicated' or 'sharded', got 'shard'"),
        ({"backend": "decompsed"}, "backend='decompsed' is not available"),
        ({"mesh": init_device_mesh("cpu", (1, size))}, "the mesh must have one dimension"),
    ):
        with pytest.raises(ValueError, match=words):
            parallelize(fresh, **{"mesh": mesh, **arguments})
    # One that agrees with its group on rank 0 is refused there, too.
    for order in ([*range(size)][::-1], [*range(size - 2), size - 1, size - 2]):
        for shard in (parallelize, lambda _, mesh: parallelize_module(nn.Linear(4, 4), mesh, column)):
            if size > 1:
                with pytest.raises(ValueError, match=rf"in the order of its group, .* got \[{order[0]}, "):
                    shard(fresh, DeviceMesh("cpu", order))
    ids = torch.arange(6).view(1, 6)
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name}: each rank of this model has a part of them only"):
            model(ids, **{name: True})
    for wrong in (-1, model.config.vocab_size):
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            model(ids.masked_fill(ids == 3, wrong))
    replicated = parallelize(fresh, mesh, sequence_parallel=False)
    assert len(replicated(ids, output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize("world", [1, 2, 3])
def test_wrong_uses(ranks, world):
    ranks(world).run(wrong_uses)
