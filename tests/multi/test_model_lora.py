"""peft's LoRA on parallelized models: losses, gradients and steps of the unsharded model with it."""

import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_gemm.api.linears import gather_dtensor
from overlap_gemm.nn import Dropout
from overlap_gemm.parallel import full_state_dict, parallelize
from tests.support.adapters import (
    ALL,
    adapted_pair,
    close,
    config_of,
    same,
    train,
)
from tests.support.models import FAMILIES, VOCABULARY, tiny

SUBSETS = (("q_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj", "k_proj"))


def trains(rank, size, family, sequence_parallel, cases):
    for first, targets in cases:
        try:
            pair = adapted_pair(size, family, first, sequence_parallel, config_of(targets), ("tp",))
            same(pair)
            train(pair)
        except AssertionError as error:
            raise AssertionError(f"{targets}, peft {'first' if first else 'after'}: {error}") from error


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])
def test_training(ranks, sequence_parallel):
    cases = [(True, ALL), (False, ALL), *((False, targets) for targets in SUBSETS)]
    ranks(3).run(trains, "llama", sequence_parallel, cases)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phi3"])
def test_families(ranks, family, sequence_parallel):
    cases = itertools.product((True, False), (ALL, *SUBSETS))
    ranks(2).run(trains, family, sequence_parallel, list(cases))


PACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def trains_packed(rank, size, sequence_parallel, cases, folder):
    """Phi3's: A is one, B in parts as the linear is. Files and merged models are the unsharded one's."""
    from peft import PeftModel

    for first, targets in itertools.product((True, False), cases):
        what = f"{targets}, peft {'first' if first else 'after'}"
        pair = adapted_pair(
            size, "phi3", first, sequence_parallel, config_of(targets, lora_bias=first and sequence_parallel)
        )
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3) for model in pair]
        for step in range(2):
            ids = torch.randint(3, VOCABULARY, (2, 7 + step), generator=torch.Generator().manual_seed(step))
            outs = [model(ids, labels=ids) for model in pair]
            close(outs[1].logits, outs[0].logits, what)
            for out, model, optimizer in zip(outs, pair, optimizers, strict=True):
                out.loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():  # where an epilogue may apply the activation
            close(pair[1](ids).logits, pair[0](ids).logits, f"{what}, without gradients")
        found, expected = full_state_dict(pair[1]), pair[0].state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close(found[name], value, f"{what}: {name}")
        path = f"{folder}/{'-'.join(targets)}-{first}"
        pair[1].save_pretrained(path, is_main_process=rank == 0)
        dist.barrier()
        loaded = [tiny("phi3", size), parallelize(tiny("phi3", size), init_device_mesh("cpu", (size,)))]
        expected = pair[0](ids).logits
        for base in loaded:
            close(PeftModel.from_pretrained(base, path)(ids).logits, expected, f"{what}, loaded")
        pair[1].load_state_dict(pair[0].state_dict())
        if not first:
            for model in pair:
                model.merge_adapter(safe_merge=sequence_parallel)
            close(pair[1](ids).logits, expected, f"{what}, merged")
            for model in pair:
                model.unmerge_adapter()
            close(pair[1](ids).logits, expected, f"{what}, unmerged")
            merged = [model.merge_and_unload() for model in pair]
            found, whole_one = full_state_dict(merged[1]), merged[0].state_dict()
            assert found.keys() == whole_one.keys()
            for name, value in whole_one.items():
                close(found[name], value, f"{what}: {name}")
            close(merged[1](ids).logits, expected, f"{what}, merged for good")


def test_packed_projections(ranks, tmp_path):
    ranks(2).run(trains_packed, True, [PACKED], str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])
def test_more_packed_projections(ranks, tmp_path, sequence_parallel):
    ranks(3).run(trains_packed, sequence_parallel, [PACKED, ("qkv_proj",), ("gate_up_proj",)], str(tmp_path))


def targets_all_linear(rank, size, family):
    """Compares targets and results with the unsharded model's, also of linears that have an adapter."""
    ids = torch.arange(3, 15).view(2, 6)
    for first in (True, False):
        pair = adapted_pair(size, family, first, True, config_of(("o_proj",)))
        for model in pair:
            torch.manual_seed(6)
            config = config_of(())
            config.target_modules = "all-linear"
            model.add_adapter("all", config)
            model.set_adapter("all")
        plain, sharded = (model.peft_config["all"].target_modules for model in pair)
        assert sharded == plain
        close(pair[1](ids).logits, pair[0](ids).logits, f"peft {'first' if first else 'after'}")


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_all_linear(ranks, family):
    ranks(2).run(targets_all_linear, family)


def disables_merged(rank, size):
    pair = adapted_pair(size, "llama", False, True, config_of(("v_proj",)))
    ids = torch.arange(3, 15).view(2, 6)
    for model in pair:
        model.merge_adapter()
    with pair[0].disable_adapter(), pair[1].disable_adapter():
        close(pair[1](ids).logits, pair[0](ids).logits, "disabled")


def test_merged_adapters_that_are_disabled(ranks):
    ranks(2).run(disables_merged)


def drops_out(rank, size, sequence_parallel, recompute):
    """Dropout of what all ranks have is the unsharded model's; of rows and features each rank's own."""
    targets = ("q_proj", "up_proj") if not sequence_parallel else ("q_proj", "o_proj", "up_proj", "lm_head")
    config = config_of(targets, lora_dropout=0.5)
    pair = adapted_pair(size, "llama", rank >= 0, sequence_parallel, config)
    ids = torch.arange(3, 15).view(2, 6)
    found = []
    for _ in range(2):
        losses = []
        for model in pair:
            if recompute:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
            model.zero_grad()
            torch.manual_seed(2)
            losses.append(model(ids, labels=ids).loss)
            losses[-1].backward()
        if not sequence_parallel:
            close(losses[1], losses[0], "loss")
            same(pair, "gradients")
        found.append(
            [
                losses[1],
                torch.rand(1),
                *(gather_dtensor(p.grad) for p in pair[1].parameters() if p.requires_grad),
            ]
        )
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    everyone = [None] * size
    dist.all_gather_object(everyone, found[0])
    for other in everyone:  # generators are in step, and gradients of what all ranks have are the same
        assert all(torch.equal(a, b) for a, b in zip(other, everyone[0], strict=True))
    if sequence_parallel:
        pair[1].eval()
        without = pair[1](ids, labels=ids).loss
        assert not torch.allclose(without, found[0][0])
    return [value.detach() for value in found[0]]


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])
def test_dropout(ranks, sequence_parallel):
    plain, *recomputed = (
        ranks(2).run(drops_out, sequence_parallel, how) for how in (None, "reentrant", "not reentrant")
    )
    for other in recomputed:
        for found, expected in zip(other[0], plain[0], strict=True):
            torch.testing.assert_close(found, expected)


def masks(rank, size):
    torch.manual_seed(7)
    own, common = Dropout(0.5, per_rank=True), Dropout(0.5, per_rank=False)
    x = torch.ones(64, requires_grad=True)
    drawn = [own(x), common(x), own(x[: 10 + rank]), common(x)]  # other lengths change nothing for the others
    everyone = [None] * size
    dist.all_gather_object(everyone, [one.detach() for one in drawn])
    assert torch.equal(everyone[0][1], everyone[1][1]) and torch.equal(everyone[0][3], everyone[1][3])
    assert not torch.equal(everyone[0][0], everyone[1][0])
    assert 10 < int((drawn[0] == 0).sum()) < 54 and set(drawn[0].tolist()) == {0.0, 2.0}
    (gradient,) = torch.autograd.grad(drawn[0].sum(), x)
    assert torch.equal(gradient, drawn[0])
    assert own.eval()(x) is x
    with pytest.raises(Exception, match="torch.compile cannot trace"):
        torch.compile(own.train(), backend="eager", fullgraph=True)(x)


def test_masks(ranks):
    ranks(2).run(masks)


def low_precision(rank, size):
    """A bfloat16 model with float32 adapters, as peft makes them; and autocast of a float32 one."""
    ids = torch.arange(3, 15).view(2, 6)
    config = config_of(("q_proj", "down_proj", "gate_proj"))
    for first in (True, False):
        plain, sharded = adapted_pair(size, "llama", first, True, config, dtype=torch.bfloat16)
        exact = copy.deepcopy(plain).float()
        dtypes = {p.dtype for p in sharded.parameters() if p.requires_grad}
        assert dtypes == {torch.float32}
        losses = []
        for model in (exact, plain, sharded):
            losses.append(model(ids, labels=ids).loss)
            losses[-1].backward()
        assert (losses[2] - losses[0]).abs() <= 2 * (losses[1] - losses[0]).abs() + 2**-8
        errors = [0.0, 0.0]
        for name, parameter in exact.named_parameters():
            if parameter.requires_grad:
                for which, model in enumerate((plain, sharded)):
                    found = gather_dtensor(dict(model.named_parameters())[name].grad)
                    errors[which] += float((found - parameter.grad).square().sum())
        assert 0 < errors[1] <= 4 * errors[0]  # of squares
        pair = adapted_pair(size, "llama", first, True, config, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            outs = [model(ids, labels=ids).loss for model in pair]
        torch.testing.assert_close(outs[1], outs[0], rtol=2e-2, atol=2e-2)


def test_low_precision(ranks):
    ranks(2).run(low_precision)


def prompts(rank, size):
    """What peft puts in front of the input is the caller's; what it puts in the cache has too many heads."""
    import peft

    base = tiny("llama", size)
    pair = [copy.deepcopy(base), parallelize(copy.deepcopy(base), init_device_mesh("cpu", (size,)))]
    ids = torch.arange(3, 11).view(1, 8)
    for name in ("PromptTuning", "PrefixTuning"):
        config = getattr(peft, f"{name}Config")(num_virtual_tokens=4, task_type="CAUSAL_LM")
        adapted = []
        for model in pair:
            torch.manual_seed(3)
            adapted.append(peft.get_peft_model(model, config).double())
        if name == "PrefixTuning":
            with pytest.raises(ValueError, match="Prefix tuning is not supported"):
                adapted[1](input_ids=ids)
            return
        for model in adapted:
            model(input_ids=ids, labels=ids).loss.backward()
        (expected, found) = ([p.grad for p in m.parameters() if p.requires_grad] for m in adapted)
        for one, other in zip(found, expected, strict=True):
            close(one, other, name)
        with torch.no_grad():
            next(p for p in adapted[1].parameters() if p.requires_grad).mul_(rank)
        with pytest.raises(RuntimeError, match="disagree on inputs_embeds"):
            adapted[1](input_ids=ids)
        first = parallelize(
            peft.get_peft_model(copy.deepcopy(base), config), init_device_mesh("cpu", (size,))
        )
        for model in (first, adapted[1]):
            model.get_base_model().model.norm.requires_grad_(True)
            with pytest.raises(ValueError, match=r"'prompt_encoder' .*together with 'model\.norm\.weight'"):
                model(input_ids=ids)


def test_prompts(ranks):
    ranks(2).run(prompts)


def compiles(rank, size, sequence_parallel):
    config = config_of(("q_proj", "o_proj", "up_proj"))
    _, model = adapted_pair(size, "llama", False, sequence_parallel, config, num_hidden_layers=1)
    compiled = torch.compile(model.get_base_model(), fullgraph=True, backend="aot_eager")
    ids, results = torch.arange(3, 11).view(1, 8), []
    for call in (model, compiled):
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append([loss, *(p.grad.to_local().clone() for p in model.parameters() if p.requires_grad)])
        model.zero_grad()
    for eager, found in zip(*results, strict=True):
        close(found, eager, "compiled")


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])
def test_compile(ranks, sequence_parallel):
    ranks(2).run(compiles, sequence_parallel)


def sharded_logits(rank, size):
    from peft import get_peft_model

    config, ids = config_of(("lm_head", "q_proj")), torch.arange(3, 11).view(1, 8)
    plain = get_peft_model(tiny("llama", size), copy.deepcopy(config))
    mesh = init_device_mesh("cpu", (size,))
    for sequence_parallel in (True, False):
        base = parallelize(tiny("llama", size), mesh, logits="sharded", sequence_parallel=sequence_parallel)
        sharded = get_peft_model(base, copy.deepcopy(config))
        sharded.load_state_dict(plain.state_dict())
        logits = [model(input_ids=ids).logits for model in (plain, sharded)]
        assert isinstance(logits[1], DTensor)
        close(logits[1].full_tensor(), logits[0], "logits")
        for model in (plain, sharded):
            model.zero_grad()
            gather_dtensor(model(input_ids=ids).logits).square().sum().backward()
        same((plain, sharded), "gradients")


def test_sharded_logits(ranks):
    ranks(2).run(sharded_logits)


def attention_gradients(rank, size):
    """They lie alike with an adapter on the projection after the attention, too: cuDNN's relies on it."""
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spied(*args, **options):
        out = attention(*args, **options)
        out.register_hook(lambda gradient: seen.append(gradient.stride()))
        return out

    ids = torch.arange(3, 23).view(2, 10)
    for sequence_parallel, first in itertools.product((True, False), (True, False)):
        model = adapted_pair(size, "llama", first, sequence_parallel, config_of(("q_proj", "o_proj")))[1]
        with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", spied):
            model(input_ids=ids, labels=ids).loss.backward()
    assert len(seen) == 8 and len(set(seen)) == 1, seen


def test_gradients_of_attention_lie_alike(ranks):
    ranks(2).run(attention_gradients)


def merges_under_fsdp(rank, size):
    from peft import get_peft_model

    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
    base = parallelize(tiny("llama", 1), mesh["tp"])
    model = get_peft_model(base, config_of(("q_proj",)))
    output = base.model.layers[0].self_attn.o_proj
    output.weight = torch.nn.Parameter(output.weight.full_tensor().detach().t().contiguous().t())
    fully_shard(base, mesh=mesh["dp"])  # takes contiguous shards only
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"q_proj': FSDP has sharded its adapters, too: save them"):
        model.merge_adapter()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), old)


def test_adapters_under_fsdp_are_not_merged(ranks):
    ranks(2).run(merges_under_fsdp)
