"""What peft does with adapters that are there, on parallelized models: merges, files, several, copies."""

import copy
import io
import os
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh
from transformers.integrations.peft import MIN_PEFT_VERSION

from overlap_gemm.api.linears import gather_dtensor
from overlap_gemm.parallel import full_state_dict, parallelize
from tests.support.adapters import (
    ALL,
    ATTENTION,
    MLP,
    adapted_pair,
    close,
    config_of,
    same,
    train,
)
from tests.support.models import VOCABULARY, tiny, tiny_for_plans


def merges(rank, size, family, sequence_parallel):
    torch.manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 5))
    for first in (True, False):
        config = config_of(ALL + ("lm_head",) * (family != "gemma3"), use_rslora=first)
        pair = adapted_pair(size, family, first, sequence_parallel, config)

        def same_logits(what, pair=pair):
            logits = [model(ids).logits for model in pair]
            close(logits[1], logits[0], f"{what}, peft {'first' if first else 'after'}")  # noqa: B023
            return logits[0]

        adapted = same_logits("adapted")
        for safely in (False, True):
            for model in pair:
                model.merge_adapter(safe_merge=safely)
            close(same_logits("merged"), adapted, "merged")
            for model in pair:
                model.unmerge_adapter()
            same_logits("unmerged")
        same(pair)
        for model in pair:
            with model.disable_adapter():
                assert not torch.allclose(model(ids).logits, adapted)
        merged = [model.merge_and_unload() for model in pair]
        found, expected = full_state_dict(merged[1]), merged[0].state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close(found[name], value, name)
        close(merged[1](ids).logits, adapted, "merged for good")


@pytest.mark.parametrize(("family", "world", "sequence_parallel"), [("llama", 3, True), ("gemma3", 2, False)])
def test_merging(ranks, family, world, sequence_parallel):
    ranks(world).run(merges, family, sequence_parallel)


def saves(rank, size, family, folder):
    """What ranks save plain peft loads, and a parallelized model, too; so does what plain peft saved."""
    from peft import PeftModel

    torch.manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 5))
    config = config_of(("q_proj", "o_proj", "down_proj"), modules_to_save=["lm_head", "norm"])
    for first in (True, False):
        pair = adapted_pair(size, family, first, True, config)
        train(pair, 1)
        expected = pair[0](ids).logits
        pair[1].save_pretrained(f"{folder}/sharded{first}", is_main_process=rank == 0)
        if rank == 0:
            pair[0].save_pretrained(f"{folder}/plain{first}")
        dist.barrier()
        for name in (f"sharded{first}", f"plain{first}"):
            for parallel in (True, False):
                base = tiny(family, size)
                if parallel:
                    parallelize(base, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
                loaded = PeftModel.from_pretrained(base, f"{folder}/{name}", is_trainable=True)
                close(loaded(ids).logits, expected, name)
            fresh = adapted_pair(size, family, not first, False, config)[1]
            fresh.load_adapter(f"{folder}/{name}", "other")
            fresh.set_adapter("other")
            close(fresh(ids).logits, expected, f"{name}, beside another")


def test_files(ranks, tmp_path):
    ranks(2).run(saves, "llama", str(tmp_path))


def added(rank, size, sequence_parallel, folder):
    """Without a PeftModel: transformers' own add_adapter, several of them, saved and loaded."""
    torch.manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 5))
    plain = tiny("llama", size)
    sharded = parallelize(
        copy.deepcopy(plain), init_device_mesh("cpu", (size,)), sequence_parallel=sequence_parallel
    )
    for model in (plain, sharded):
        torch.manual_seed(5)
        model.add_adapter(config_of(("q_proj", "up_proj", "down_proj")), "one")
        model.add_adapter(config_of(("q_proj", "o_proj"), r=2, lora_bias=True), "two")
    for name in ("one", "two", ["one", "two"]):
        for model in (plain, sharded):
            model.set_adapter(name)
        same((plain, sharded))
        losses = [model(ids, labels=ids).loss for model in (plain, sharded)]
        for loss in losses:
            loss.backward()
        same((plain, sharded), "gradients")
        for model in (plain, sharded):
            model.zero_grad()
    for model in (plain, sharded):
        model.set_adapter("two")
    expected = plain(ids).logits
    close(sharded(ids).logits, expected, "two")
    with mock.patch.object(type(sharded), "save_pretrained", autospec=True) as nothing:
        sharded.save_pretrained(folder)
    assert nothing.call_count == (rank == 0)  # transformers 5.10 writes on all ranks that call it
    sharded.save_pretrained(folder)
    dist.barrier()
    for fresh in (tiny("llama", size), parallelize(tiny("llama", size), init_device_mesh("cpu", (size,)))):
        fresh.load_adapter(folder)
        close(fresh(ids).logits, expected, "loaded")
    for model in (plain, sharded):
        model.delete_adapter("two")
        model.set_adapter("one")
    close(sharded(ids).logits, plain(ids).logits, "one is left")


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"transformers' add_adapter requires peft >= {MIN_PEFT_VERSION}",
)
def test_add_adapter(ranks, tmp_path):
    ranks(3).run(added, True, str(tmp_path))


def generates(rank, size):
    torch.manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 5))
    for sequence_parallel in (True, False):
        pair = adapted_pair(size, "llama", not sequence_parallel, sequence_parallel, config_of(ATTENTION))
        for model in pair:
            model.eval()
            model.add_adapter("second", config_of(MLP))
        pair[1].load_state_dict(pair[0].state_dict())  # whole tensors
        texts = [model.generate(input_ids=ids, max_new_tokens=4, do_sample=False) for model in pair]
        assert torch.equal(*texts)
        # One adapter for each row of the batch.
        both = [model(input_ids=ids, adapter_names=["second", "__base__"]).logits for model in pair]
        close(both[1], both[0], "adapters by row")
        twin = copy.deepcopy(pair[1])
        with torch.no_grad():
            for parameter in pair[1].parameters():
                parameter.zero_()
        close(twin(ids).logits, pair[0](ids).logits, "copy")
        buffer = io.BytesIO()
        torch.save(twin, buffer)
        buffer.seek(0)
        close(torch.load(buffer, weights_only=False)(ids).logits, pair[0](ids).logits, "torch.load")


def test_generate_copy_and_pickle(ranks):
    ranks(2).run(generates)


def through_transformers(rank, size, folder):
    """On transformers' own tensor parallelism with our products, where peft shards adapters by itself."""
    from peft import get_peft_model
    from transformers.distributed import DistributedConfig

    from overlap_gemm.integrations import hugging_face

    hugging_face.install()
    environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    base = tiny_for_plans("llama")
    config = DistributedConfig(tp_size=size)
    with mock.patch.dict(os.environ, environment):
        model = type(base).from_pretrained(folder, dtype=torch.float64, distributed_config=config).train()
    adapter = config_of(("q_proj", "v_proj", "o_proj", "down_proj"))
    pair = get_peft_model(base, copy.deepcopy(adapter)), get_peft_model(model, adapter)
    hugging_face.uninstall()  # peft, too, looks the styles up
    found = dict(pair[1].named_parameters())
    for name, parameter in pair[0].named_parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.copy_(gather_dtensor(found[name]))
    ids = torch.arange(3, 15).view(2, 6)
    losses = [each(input_ids=ids, labels=ids).loss for each in pair]
    close(gather_dtensor(losses[1]), losses[0], "loss")
    for loss in losses:
        loss.backward()
    for name, parameter in pair[0].named_parameters():
        if parameter.requires_grad:
            close(gather_dtensor(found[name].grad), parameter.grad, name)
    return sum(type(vars(m).get("forward")).__name__ == "ColwiseForward" for m in pair[1].modules())


def test_through_transformers(ranks, tmp_path):
    pytest.importorskip("overlap_gemm.integrations.hugging_face", exc_type=ImportError)
    tiny_for_plans("llama").save_pretrained(tmp_path)
    assert min(ranks(2).run(through_transformers, str(tmp_path))) > 0


def saves_modules(rank, size):
    """Copies of embedding and head, tied or not, and biases that are trained, too."""
    for family in ("llama", "gemma3"):
        for options in (
            {"modules_to_save": ["embed_tokens"]},
            {"modules_to_save": ["lm_head", "input_layernorm"]},
            {"bias": "all"},
        ):
            config = config_of(("q_proj", "o_proj"), **options)
            pair = adapted_pair(size, family, False, True, config)
            try:
                train(pair, 1)
            except AssertionError as error:
                raise AssertionError(f"{family}, {options}: {error}") from error


def test_modules_to_save(ranks):
    ranks(2).run(saves_modules)


def weighs(rank, size):
    """peft's sums of adapters assign `.data`, which changes nothing of a DTensor: refused, not wrong."""
    for first in (True, False):
        _, sharded = adapted_pair(size, "llama", first, True, config_of(("q_proj",)))
        sharded.add_adapter("second", config_of(("q_proj",)))
        with pytest.raises(NotImplementedError, match="add_weighted_adapter .* of a parallelized model"):
            sharded.add_weighted_adapter(["default", "second"], [0.5, 0.5], "sum", combination_type="linear")


def test_sums_of_adapters_are_refused(ranks):
    ranks(2).run(weighs)
