"""What users compose: model, adapter, sequence parallelism, optimizer, wrapper, precision, generation, file.

Every pair of values of two of these comes together in some row of `ROWS`, but for those in `NEVER`. A row
trains two steps, generates and saves, with the unsharded model beside it: in float64 the same; under autocast
no further from the unsharded model without autocast than twice what the unsharded one is.
"""

import copy
import io
import itertools
import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap_gemm.parallel import full_state_dict, parallelize
from tests.support.models import FAMILIES, MORE_FAMILIES, VOCABULARY, tiny

SINGLE = {"rtol": 2e-4, "atol": 2e-5}
CHOICES = {
    "family": (*FAMILIES, *MORE_FAMILIES),
    "adapter": ("none", "first", "after", "all", "saved", "two", "dropout"),
    "sequence": (True, False),
    "optimizer": ("foreach", "fused", "sgd"),
    "wrapper": ("none", "fsdp", "replicate", "recompute", "reentrant"),
    "precision": ("double", "autocast"),
    "generation": ("greedy", "sample", "beams"),
    "file": ("whole", "pretrained", "dcp", "pickle"),
}
NEVER = {(("wrapper", wrapper), ("file", "pickle")) for wrapper in CHOICES["wrapper"] if wrapper != "none"}
"""torch does not pickle what it wraps, nor transformers the hook that it has for recomputation."""


def pairs(row):
    return set(itertools.combinations(row.items(), 2))


def covering():
    """Rows in which every pair of values comes together; the same ones in every process."""
    dice, names = random.Random(0), list(CHOICES)
    left = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in CHOICES[a] for y in CHOICES[b]
    } - NEVER
    while left:
        rows = [{name: dice.choice(values) for name, values in CHOICES.items()} for _ in range(200)]
        row = max((row for row in rows if not pairs(row) & NEVER), key=lambda row: len(left & pairs(row)))
        left -= pairs(row)
        yield row


ROWS = list(covering())


def config_of(adapter, family):
    from peft import LoraConfig

    attention, mlp = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    every, some = attention + mlp, ["q_proj", "up_proj"]
    if family in ("mixtral", "qwen3_moe"):  # to peft the others are experts
        every, some = attention, ["q_proj"]
    if family == "phi3":
        every, some = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ["qkv_proj", "gate_up_proj"]
    norm = "input_layernorm" if family == "llama4" else "norm"
    return LoraConfig(
        r=3,
        lora_alpha=1,
        target_modules=every if adapter in ("all", "two") else some,
        modules_to_save=[norm] if adapter == "saved" else None,
        lora_dropout=0.3 if adapter == "dropout" else 0.0,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )


def adapt(model, adapter, family):
    from peft import get_peft_model

    if adapter == "none":
        return model
    torch.manual_seed(11)
    model = get_peft_model(model, config_of(adapter, family))
    if adapter == "two":
        model.add_adapter("second", config_of("after", family))
        model.base_model.set_adapter(["default", "second"])
    return model


def base_of(row, size):
    if row["precision"] == "double":
        return tiny(row["family"], size)
    # A rounded router would send some tokens elsewhere: they go to all five experts.
    every = {"num_experts_per_tok": 5} if row["family"] in ("mixtral", "qwen3_moe", "llama4") else {}
    return tiny(row["family"], size, dtype=torch.float32, experts_implementation="eager", **every)


def built(row, size, mesh):
    """The unsharded model and the sharded one."""
    base = base_of(row, size)
    how = row["adapter"], row["family"]
    plain = adapt(copy.deepcopy(base), *how)
    if row["adapter"] in ("first", "all"):
        return plain, parallelize(copy.deepcopy(plain), mesh, sequence_parallel=row["sequence"])
    return plain, adapt(parallelize(base, mesh, sequence_parallel=row["sequence"]), *how)


def inner(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def optimizer_of(kind, model):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-2, **{kind: True})


def distance(found, expected):
    """Of two models' outputs, or parameters."""
    pieces = zip(found, expected, strict=True)
    return sum(float((a.detach().double() - b.detach().double()).square().sum()) for a, b in pieces) ** 0.5


def trains(row, pair, apart):
    """Two steps. Under autocast a third model, without it, tells how far rounding takes a step."""
    low = row["precision"] == "autocast"
    models = [*pair, copy.deepcopy(pair[0])] if low else pair
    names = [name for name, parameter in pair[0].named_parameters() if parameter.requires_grad]
    optimizers = [optimizer_of(row["optimizer"], model) for model in models]
    recompute = row["wrapper"] in ("recompute", "reentrant")
    if recompute:
        for model in models:
            inner(model).enable_input_require_grads()
            inner(model).gradient_checkpointing_enable({"use_reentrant": row["wrapper"] == "reentrant"})
    for step in range(2):
        torch.manual_seed(step)
        ids = torch.randint(3, VOCABULARY, (2, 6 + step))
        outs = []
        for model, optimizer in zip(models, optimizers, strict=True):
            with torch.autocast("cpu", torch.bfloat16) if low and model in pair else nullcontext():
                torch.manual_seed(step)
                outs.append(model(input_ids=ids, labels=ids))
            outs[-1].loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if low and not apart:
            values = [[out.logits, *trained(model, names)] for out, model in zip(outs, models, strict=True)]
            for which in (slice(1), slice(1, None)):  # logits; what has been trained
                base, own = (distance(each[which], values[2][which]) for each in values[:2])
                assert 0 < own <= 2 * base, (step, which, own, base)
            for model in models[::2]:  # the next step is from one point, too
                model.load_state_dict(full_state_dict(pair[1]))
        elif not apart:
            torch.testing.assert_close(outs[1].loss, outs[0].loss, **SINGLE)
            torch.testing.assert_close(outs[1].logits, outs[0].logits, **SINGLE)
    if recompute:
        for model in models:
            inner(model).gradient_checkpointing_disable()
            inner(model).disable_input_require_grads()
    if not low and not apart:
        for name, found, expected in zip(
            names, *(trained(model, names) for model in pair[::-1]), strict=True
        ):
            torch.testing.assert_close(
                found, expected, **SINGLE, msg=lambda text, name=name: f"{name}: {text}"
            )


def trained(model, names):
    """What the optimizer has changed."""
    state = full_state_dict(model)
    return [state[name] for name in names]


def generates(row, pair):
    ids = torch.arange(3, 13).view(2, 5)
    options = {
        "greedy": {"do_sample": False},
        "sample": {"do_sample": True, "top_k": 0},
        "beams": {"num_beams": 2, "do_sample": False},
    }[row["generation"]]
    texts = []
    for model in pair:
        torch.manual_seed(5)
        texts.append(model.eval().generate(input_ids=ids, max_new_tokens=3, pad_token_id=0, **options))
    assert torch.equal(*texts), texts


def reloaded(row, pair, size, mesh, folder):
    """A fresh model with what was saved of the sharded one."""
    from peft import PeftModel

    _, sharded = pair
    if row["file"] == "pickle":
        buffer = io.BytesIO()
        torch.save(sharded, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)
    fresh_plain, fresh = built(row, size, mesh)
    for parameter in fresh.parameters():
        parameter.data.zero_()
    if row["file"] == "whole":
        fresh_plain.load_state_dict(full_state_dict(sharded))
        return fresh_plain.eval()
    if row["file"] == "dcp":
        dcp.save({"model": get_model_state_dict(sharded)}, checkpoint_id=folder)
        state = {"model": get_model_state_dict(fresh)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(fresh, state["model"])
        return fresh.eval()
    sharded.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    base = base_of(row, size)
    if row["adapter"] == "none":
        loading = {"dtype": base.dtype, "experts_implementation": "eager"}
        return type(base).from_pretrained(folder, **loading).eval()
    loaded = PeftModel.from_pretrained(base, folder)
    if row["adapter"] == "two":
        loaded.load_adapter(f"{folder}/second", "second")
        loaded.base_model.set_adapter(["default", "second"])
    return loaded.eval()


def composes(rank, size, row, folder):
    replicas = 2 if row["wrapper"] in ("fsdp", "replicate") else 1
    mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("dp", "tp"))
    pair = built(row, size // replicas, mesh["tp"])
    if row["wrapper"] == "fsdp":
        for layer in inner(pair[1]).model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(inner(pair[1]), mesh=mesh["dp"])  # whose forward it is that generation calls
    elif row["wrapper"] == "replicate":
        replicate(inner(pair[1]), mesh=mesh["dp"])
    # With sequence parallelism dropout is of rows, and each rank draws for its own.
    apart = row["adapter"] == "dropout" and row["sequence"]
    trains(row, pair, apart)
    if apart or row["precision"] != "double":
        pair[0].load_state_dict(full_state_dict(pair[1]))
    generates(row, pair)
    ids = torch.arange(3, 13).view(2, 5)
    with torch.no_grad():
        found = reloaded(row, pair, size // replicas, mesh["tp"], folder)(input_ids=ids).logits
        torch.testing.assert_close(found, pair[0](input_ids=ids).logits, **SINGLE)


def run(ranks, tmp_path, row):
    size = 4 if row["wrapper"] in ("fsdp", "replicate") else 2
    ranks(size).run(composes, row, str(tmp_path))


def name_of(row):
    return "-".join(str(value) for value in row.values())


@pytest.mark.parametrize("row", ROWS[:8], ids=name_of)
def test_compositions(ranks, tmp_path, row):
    run(ranks, tmp_path, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS[8:], ids=name_of)
def test_more_compositions(ranks, tmp_path, row):
    run(ranks, tmp_path, row)


def test_the_rows_are_enough():
    assert 60 <= len(ROWS) <= 120
    assert {row["wrapper"] for row in ROWS[:8]} == set(CHOICES["wrapper"])
