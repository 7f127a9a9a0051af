"""Compositions of what users do to a model, one thing after the other, drawn by a seeded generator.

    OVERLAP_GEMM_DRAWS=120 OVERLAP_GEMM_DRAW_SEED=7 pytest -m "" tests/multi/test_drawn_compositions.py

Each step is taken on the unsharded model and on the sharded one. Where both take it, numbers are compared;
where the unsharded model refuses it, nothing is wanted. Where the sharded model alone refuses, the refusal is
raised by this package, on every rank alike, and the model is as it was before.
"""

import copy
import io
import os
import random
import traceback
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap_gemm.parallel import full_state_dict, parallelize
from tests.support.drawn import ADAPTERS, OPTIMIZERS, adapted, optimizer_of, orthogonalized
from tests.support.models import FAMILIES, MORE_FAMILIES, VOCABULARY, tiny
from tests.support.surgery import SURGERY

DRAWS = int(os.environ.get("OVERLAP_GEMM_DRAWS", "6"))
SEED = int(os.environ.get("OVERLAP_GEMM_DRAW_SEED", "0"))
CLOSE = {"rtol": 3e-4, "atol": 3e-5}
IDS = torch.arange(3, 15).view(2, 6)


CHOICES = {
    "family": (*FAMILIES, *MORE_FAMILIES),
    "sequence": (True, False),
    "first": (True, False),
    "surgery": tuple(SURGERY),
    "adapter": ADAPTERS,
    "optimizer": OPTIMIZERS,
    "wrapper": ("none", "none", "fsdp", "replicate", "recompute", "reentrant", "compile"),
    "precision": ("double", "double", "autocast"),
    "generation": ("greedy", "sample", "beams", "static", "no cache", "penalty", "none"),
    "after": ("none", "merge", "unmerge", "unload", "disable", "delete"),
    "file": ("whole", "pretrained", "dcp", "pickle", "copy", "optimizer"),
}


def draws(seed, count):
    """The same in every process, for a seed."""
    dice = random.Random(f"compositions {seed}")
    return [{name: dice.choice(values) for name, values in CHOICES.items()} for _ in range(count)]


def inner(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Refused(Exception):
    """The sharded model refused a step by name, on every rank: this composition ends."""


def is_ours(error):
    """Whether this package raised the error, or an error that it caused."""
    frames, kind = traceback.extract_tb(error.__traceback__), type(error)
    is_named = kind in (ValueError, TypeError, RuntimeError, NotImplementedError)
    return "/overlap_gemm/" in frames[-1].filename and (
        is_named or kind.__module__.startswith("overlap_gemm.")
    )


def both(step, pair, what):
    """Takes a step on both models; their results, or None where the unsharded model refuses."""
    try:
        expected = step(pair[0])
    except Exception:
        return None
    found, error = None, None
    try:
        found = step(pair[1])
    except Exception as raised:
        error = raised
    words = None if error is None else f"{type(error).__name__}: {error}"[:600]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, words)
    if not any(everyone):
        return expected, found
    assert all(everyone), f"{what}: some ranks alone raise: {everyone}"
    assert error is not None
    if not is_ours(error):
        raise AssertionError(f"{what}: a nameless error, {words}") from error
    raise Refused(words)


def close(found, expected, what, rtol=CLOSE["rtol"], atol=CLOSE["atol"]):
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def same(pair, what, **how):
    results = both(logits, pair, what)
    if results is not None:
        close(results[1], results[0], what, **how)


def steps(row, optimizers):
    """Two steps of training, as a function of one model."""

    def train(model):
        model.train()
        optimizer, losses = optimizers[model], []
        for number in range(2):
            torch.manual_seed(number)
            ids = torch.randint(3, VOCABULARY, (2, 6 + number))
            is_low = row["precision"] == "autocast"

            def closure(ids=ids, is_low=is_low):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16) if is_low else nullcontext():
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                return loss

            losses.append(closure().detach())
            if number == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step(closure) if row["optimizer"] == "LBFGS" else optimizer.step()
        return torch.stack([loss.full_tensor() if hasattr(loss, "full_tensor") else loss for loss in losses])

    return train


def after(row):
    """Returns an operation on trained adapters, as a function of one model."""

    def run(model):
        if not hasattr(model, "get_base_model"):
            return model
        match row["after"]:
            case "merge":
                model.merge_adapter()
            case "unmerge":
                model.merge_adapter()
                logits(model)
                model.unmerge_adapter()
            case "unload":
                return model.merge_and_unload()
            case "disable":
                model.base_model.disable_adapter_layers()
            case "delete":
                model.delete_adapter("second" if row["adapter"] == "two" else "default")
        return model

    return run


def resumed(row, folder, fresh, optimizers):
    """Saves model and optimizer, trains on in a new model, and returns its logits."""

    def run(model):
        path = f"{folder}/{'plain' if new_is_plain(model) else 'sharded'}"
        names = {"ignore_frozen_params": False}
        options = StateDictOptions(**names)
        states = get_state_dict(model, optimizers[model], options=options)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)
        new = fresh(model)
        for parameter, old in zip(new.parameters(), model.parameters(), strict=True):
            parameter.requires_grad_(old.requires_grad)
        optimizers[new] = optimizer_of(row["optimizer"], new)
        states = get_state_dict(new, optimizers[new], options=options)
        state = dict(zip(("model", "optimizer"), states, strict=True))
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            new, optimizers[new], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        steps(row, optimizers)(new)
        return logits(new)

    return run


def generate(row):
    options = {
        "greedy": {},
        "sample": {"do_sample": True, "top_k": 0},
        "beams": {"num_beams": 2},
        "static": {"cache_implementation": "static"},
        "no cache": {"use_cache": False},
        "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    }[row["generation"]]

    def run(model):
        torch.manual_seed(5)
        options_of_all = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0, **options}
        with torch.no_grad():
            return model.eval().generate(input_ids=IDS, **options_of_all)

    return run


def saved(row, folder, fresh):
    """Saves a model, and returns the logits of what is read again."""

    def run(model):
        match row["file"]:
            case "pickle":
                buffer = io.BytesIO()
                torch.save(model, buffer)
                buffer.seek(0)
                return logits(torch.load(buffer, weights_only=False))
            case "copy":
                return logits(copy.deepcopy(model))
            case "whole":
                new = fresh(model)
                new.load_state_dict(full_state_dict(model))
                return logits(new)
            case "dcp":
                path = f"{folder}/{'plain' if new_is_plain(model) else 'sharded'}"
                dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
                new = fresh(model)
                state = {"model": get_model_state_dict(new)}
                dcp.load(state, checkpoint_id=path)
                set_model_state_dict(new, state["model"])
                return logits(new)
            case _:
                path = f"{folder}/{'plain' if new_is_plain(model) else 'sharded'}"
                model.save_pretrained(path, is_main_process=dist.get_rank() == 0)
                dist.barrier()
                if inner(model) is not model:
                    return None
                loading = {"dtype": model.dtype, "experts_implementation": "eager"}
                return logits(type(model).from_pretrained(path, **loading))

    return run


def new_is_plain(model):
    return not any(hasattr(parameter, "placements") for parameter in model.parameters())


def wrapped(row, mesh):
    """Puts the wrapper around the sharded model; recomputation and compilation around both."""

    def run(model):
        base, is_plain = inner(model), new_is_plain(model)
        match row["wrapper"]:
            case "fsdp" if not is_plain:
                for layer in base.model.layers:
                    fully_shard(layer, mesh=mesh["dp"])
                fully_shard(base, mesh=mesh["dp"])
            case "replicate" if not is_plain:
                replicate(base, mesh=mesh["dp"])
            case "recompute" | "reentrant":
                base.enable_input_require_grads()
                base.gradient_checkpointing_enable({"use_reentrant": row["wrapper"] == "reentrant"})
            case "compile" if not is_plain:
                base.model.compile(backend="eager")  # aot_eager takes minutes

    return run


def composes(rank, world, row, folder):
    replicas = 2 if row["wrapper"] in ("fsdp", "replicate") else 1
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp", "tp"))
    dtype = torch.float64 if row["precision"] == "double" else torch.float32
    every = {"num_experts_per_tok": 5} if row["family"] in ("mixtral", "qwen3_moe", "llama4") else {}

    def base():
        options = {} if dtype == torch.float64 else {"experts_implementation": "eager", **every}
        return tiny(row["family"], world // replicas, dtype=dtype, **options)

    def cut(model):
        return parallelize(model, mesh["tp"], sequence_parallel=row["sequence"])

    warnings.simplefilter("ignore")
    if hasattr(torch.optim, "Muon"):
        torch.optim._muon._zeropower_via_newtonschulz = orthogonalized
    torch._dynamo.reset()
    done, refusals = [], []
    pair = [base(), None]
    try:
        pair[1] = cut(base())
    except ValueError as error:
        raise AssertionError(f"parallelize: {error}") from error

    def attempt(what, step, follows=False):
        """A step in place, undone where it is refused; `follows`: its result is the model from here on."""
        nonlocal pair
        done.append(what)
        before = copy.deepcopy(pair[0])
        try:
            results = both(step, pair, what)
        except Refused as error:
            refusals.append(f"{what}: {error}")
            pair = [before, pair[1]]
            return False
        if results is None:
            pair = [before, pair[1]]
            return False
        if follows:
            pair = [pair[i] if results[i] is None else results[i] for i in range(2)]
        return True

    def adapt():
        if row["adapter"] != "none":
            attempt(row["adapter"], lambda m: adapted(m, row["adapter"], row["family"]), follows=True)

    def operate():
        attempt(row["surgery"], lambda m: SURGERY[row["surgery"]](inner(m)), follows=row["adapter"] == "none")

    try:
        operate() if row["first"] else adapt()
        adapt() if row["first"] else operate()
        try:
            same(pair, f"forward after {done}")
        except Refused as error:  # at the next forward, as the pages say: of what was done past the model
            return [*refusals, f"forward: {error}"]
        if "gradient" in row["surgery"] and (refusals or row["wrapper"] in ("fsdp", "replicate")):
            return refusals  # neither a copy of the unsharded model nor FSDP keeps hooks of parameters
        attempt(row["wrapper"], wrapped(row, mesh))
        optimizers = {}
        try:
            made = both(
                lambda m: optimizers.setdefault(m, optimizer_of(row["optimizer"], m)), pair, "optimizer"
            )
            results = (
                None
                if made is None
                else both(steps(row, optimizers), pair, f"{row['optimizer']} after {done}")
            )
        except Refused as error:
            return [*refusals, f"optimizer: {error}"]
        low = row["precision"] == "autocast"
        if results is not None:
            close(
                results[1], results[0], f"losses after {done}", **({"rtol": 3e-2, "atol": 0} if low else {})
            )
        if low:  # rounding took them apart
            return refusals
        # These divide by roots of small sums.
        is_rough = row["surgery"] == "single" or row["family"] == "gemma2"
        how = {"rtol": 5e-2, "atol": 1e-2} if is_rough else {}
        same(pair, f"trained after {done}", **how)
        if row["generation"] != "none":
            texts = both(generate(row), pair, f"generate {row['generation']} after {done}")
            assert texts is None or torch.equal(*texts), (texts, done)
        trained = list(pair)
        if attempt(f"{row['after']} afterwards", after(row), follows=True):
            same(pair, f"adapters after {done}", **how)
        is_wrapped = row["wrapper"] in ("fsdp", "replicate")
        # torch copies nothing that FSDP has wrapped, and pickles no recomputed or compiled model.
        by_value = row["file"] in ("copy", "pickle")
        by_state = row["file"] in ("whole", "dcp", "optimizer")
        if row["after"] != "none" and row["adapter"] != "none" and row["file"] != "copy":
            return refusals
        if refusals or by_value and row["wrapper"] != "none" or by_state and row["surgery"] != "none":
            return refusals

        def fresh(model):
            new = base() if new_is_plain(model) else cut(base())
            return new if row["adapter"] == "none" else adapted(new, row["adapter"], row["family"])

        if not (by_state and is_wrapped):  # tests/multi/test_model_matrix.py does that
            is_resumed = row["file"] == "optimizer"
            read = resumed(row, folder, fresh, optimizers) if is_resumed else saved(row, folder, fresh)
            outs = both(read, trained if is_resumed else pair, f"{row['file']} after {done}")
            if outs is not None and outs[0] is not None:
                close(outs[1], outs[0], f"read again after {done}", **how)
    except Refused as error:
        refusals.append(str(error))
    return refusals


NUMBERS = [  # a compiled model takes a minute; test_kept_lora.py compiles one with adapters
    pytest.param(number, marks=[pytest.mark.slow] if row["wrapper"] == "compile" else [])
    for number, row in enumerate(draws(SEED, DRAWS))
]


@pytest.mark.parametrize("number", NUMBERS)
def test_drawn_compositions(ranks, tmp_path, number, record_property):
    row = draws(SEED, number + 1)[number]
    world = 4 if row["wrapper"] in ("fsdp", "replicate") else 2
    refusals = ranks(world).run(composes, row, str(tmp_path))
    record_property("refused", str(refusals[0]))


def test_draws_are_the_seeds():
    assert draws(3, 5) == draws(3, 9)[:5] != draws(4, 5)
    many = draws(0, 400)
    for name, values in CHOICES.items():
        assert {row[name] for row in many} == set(values)
