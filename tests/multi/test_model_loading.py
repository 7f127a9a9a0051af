"""Models larger than a device: `from_pretrained` reads each rank's slices, and holds nothing more."""

import gc
import inspect
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from overlap_gemm.parallel import from_pretrained, full_state_dict, materialize, parallelize
from overlap_gemm.parallel.assignment import UnknownModuleError
from tests.support.models import FAMILIES, MORE_FAMILIES, VOCABULARY, tiny

SINGLE = {"rtol": 3e-5, "atol": 3e-6}


def equals_the_unsharded(rank, size, folder, options):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    loading = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = from_pretrained(folder, mesh, **loading, **options)
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, **loading)
    assert type(model) is type(plain) and not model.training
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert not [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    for (name, found), (expected_name, expected) in zip(
        model.named_buffers(), plain.named_buffers(), strict=True
    ):
        assert name == expected_name
        assert torch.equal(found, expected), name  # such as inv_freq, which no file has
    whole = full_state_dict(model)
    assert whole.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(whole[name], value), name
    # From here on it is a parallelized model as any other: it trains, generates, and is saved.
    ids = torch.arange(11).view(1, 11)
    for each in (model, plain):
        each.train()
        each(ids, labels=ids).loss.backward()
    found, expected = (each.get_input_embeddings().weight.grad for each in (model, plain))
    torch.testing.assert_close(found.full_tensor(), expected, **SINGLE)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, **SINGLE)
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(model.eval().generate(ids, **settings), plain.eval().generate(ids, **settings))
    dist.barrier()
    model.save_pretrained(f"{folder}/again")
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/again", dtype=torch.float64)
    assert type(again) is type(plain) and again.config.architectures == plain.config.architectures
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


QUICK = ("mistral", "gemma3", "phi3", "mixtral", "llama4", "one key/value head")
"""Families whose parameters are stored otherwise than each other's; mistral without sequence parallelism."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
        for family in (*FAMILIES, *MORE_FAMILIES, "one key/value head")
    ],
)
def test_from_pretrained(ranks, tmp_path, family):
    model = tiny("qwen2", 2, num_key_value_heads=1) if family == "one key/value head" else tiny(family, 2)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # several files
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    options = {"sequence_parallel": family != "mistral", "fuse": True}
    ranks(2).run(equals_the_unsharded, str(tmp_path), options)


def test_from_pretrained_takes_the_options_of_parallelize():
    loading, options = (inspect.signature(each).parameters for each in (from_pretrained, parallelize))
    assert options.keys() - {"model"} <= loading.keys()


class Peak:
    """The most anonymous memory (what a process allocates; files that it reads are not) while it is open."""

    def __enter__(self):
        gc.collect()
        self.before = self.peak = self.now()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join()

    @property
    def bytes(self):
        return max(self.peak, self.now()) - self.before

    def now(self):
        return 1024 * int(re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])

    def watch(self):
        while not self.is_over.wait(0.002):
            self.peak = max(self.peak, self.now())


def memory(rank, size, folder):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    from_pretrained(
        f"{folder}/small", mesh, dtype=torch.float32
    )  # what the first model imports is no model's memory
    gc.collect()
    with Peak() as peak:
        # In another dtype than the file's, whose pages would be the shards themselves.
        model = from_pretrained(f"{folder}/large", mesh, dtype=torch.float32)
        share = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return peak.bytes, share, sum(parameter.nbytes for parameter in model.parameters())


LARGE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 20000, "num_hidden_layers": 4}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_rank_holds_its_share_alone(ranks, tmp_path, family):
    for name, options in (("small", {}), ("large", LARGE)):
        model = tiny(family, 2, dtype=torch.bfloat16, **options)
        model.save_pretrained(tmp_path / name)
        del model
    for peak, share, whole in ranks(2).run(memory, str(tmp_path)):
        assert share < 0.52 * whole
        assert 0.7 * share <= peak <= 1.1 * share, (peak / share, whole)


def from_meta(rank, size, family):
    """Made without memory, cut, filled by `load_state_dict`: also what a distributed checkpoint fills."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plain = tiny(family, size)
    with torch.device("meta"):
        model = tiny(family, size)
    parallelize(model, mesh)
    assert all(parameter.to_local().is_meta for parameter in model.parameters())
    materialize(model)
    assert all(parameter.to_local().isnan().all() for parameter in model.parameters())
    model.load_state_dict(plain.state_dict())
    for (_, found), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)  # plain's were float32 first
    tied = plain.lm_head.weight is plain.model.embed_tokens.weight
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))
    found, expected = (each(ids, labels=ids) for each in (model, plain))
    torch.testing.assert_close(found.logits, expected.logits, **SINGLE)
    found.loss.backward()


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "gemma3", "phi3"])
def test_a_model_without_memory(ranks, family):
    ranks(2).run(from_meta, family)


def refuses(rank, size, folder):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    for wrong in ({"device_map": "auto"}, {"tp_plan": "auto"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*places weights by its mesh"):
            from_pretrained(f"{folder}/llama", mesh, **wrong)
    with pytest.raises(UnknownModuleError, match="has no known place in a decoder"):
        from_pretrained(f"{folder}/gpt2", mesh)
    with pytest.raises(ValueError, match="is no causal language model"):
        from_pretrained(f"{folder}/t5", mesh)


def test_what_is_refused(ranks, tmp_path):
    import transformers

    tiny("llama", 2).save_pretrained(tmp_path / "llama")
    gpt2 = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=8)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    ranks(2).run(refuses, str(tmp_path))
