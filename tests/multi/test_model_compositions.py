"""Random sequences of what users do to one model, each step compared with the unsharded model's."""

import copy
import random
from contextlib import ExitStack, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from overlap_gemm.parallel import exportable, full_state_dict, parallelize
from overlap_gemm.parallel.modules.parts import PackedLinear
from tests.support.models import FAMILIES, VOCABULARY, tiny

SINGLE = {"rtol": 2e-4, "atol": 2e-5}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12}  # of 1, 2, 3 and 4 ranks
OPTIMIZER = {"lr": 1e-3, "eps": 1e-2}
"""With a small eps AdamW makes steps of the rounding of gradients that should be zero."""


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(found, expected, what):
    torch.testing.assert_close(found, expected, **SINGLE, msg=lambda text: f"{what}: {text}")


def gradients(model):
    """By the unsharded model's names; None where a parameter has none."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            parts = [found.pop(f"{name}.{part}.weight") for part in module.sizes]
            found[f"{name}.weight"] = None if parts[0] is None else torch.cat([whole(part) for part in parts])
    return found


class Pair:
    """The unsharded model and the sharded one; every step does the same to both and compares."""

    def __init__(self, size, family, dice, mesh=None, layers=2):
        self.size, self.family, self.dice = size, family, dice
        # Gemma2's own attention makes NaN of padding in float64; see test_model_serving.py.
        dtype = torch.float32 if family == "gemma2" else torch.float64
        self.options = {"dtype": dtype, "num_hidden_layers": layers, **HEADS}
        plain = tiny(family, size, **self.options)
        sharded = parallelize(
            copy.deepcopy(plain),
            mesh or init_device_mesh("cpu", (size,)),
            sequence_parallel=dice.random() < 0.7,
            backend=dice.choice(["auto", "torch", "decomposed"]),
        )
        self.take(plain, sharded)

    def take(self, plain, sharded):
        self.models = [plain, sharded]
        self.optimizers = [torch.optim.AdamW(model.parameters(), **OPTIMIZER) for model in self.models]

    def tokens(self, least=1):
        shape = self.dice.randint(1, 3), self.dice.randint(least, 11)
        return torch.randint(3, VOCABULARY, shape)

    def padding(self, ids, side):
        mask = torch.ones_like(ids)
        width = self.dice.randint(0, ids.shape[1] - 1)
        if width:
            mask[0, slice(width) if side == "left" else slice(-width, None)] = 0
        return mask

    def same_weights(self):
        found, expected = full_state_dict(self.models[1]), self.models[0].state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close(found[name], value, name)

    def same_gradients(self, values=True):
        expected, found = (gradients(model) for model in self.models)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert (found[name] is None) == (value is None), name
            if value is not None and values:
                close(whole(found[name]), value, name)

    # --- the steps ---

    def train(self):
        """Microbatches, in the order of any schedule; recomputed, masked, under autocast, clipped, or not."""
        dice = self.dice
        batches = [self.tokens(2) for _ in range(dice.randint(1, 3))]
        masks = [self.padding(ids, "right") for ids in batches]
        recompute = dice.choice([None, True, False])
        low, clip = dice.random() < 0.2, dice.random() < 0.5
        late, frozen = dice.random() < 0.5, dice.choice([None, None, "q_proj", "norm", "embed"])
        peek = dice.random() < 0.3
        for model in self.models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(frozen is None or frozen not in name)
            if recompute is not None:
                model.gradient_checkpointing_enable({"use_reentrant": recompute})
            losses = []
            with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
                for ids, mask in zip(batches, masks, strict=True):
                    labels = ids.masked_fill(mask == 0, -100)
                    losses.append(model(ids, attention_mask=mask, labels=labels).loss)
                    if not late:
                        losses.pop().backward()
                    if peek:
                        with torch.no_grad():
                            model(ids[:, :1])
            for loss in reversed(losses):
                loss.backward()
            model.gradient_checkpointing_disable()
        self.same_gradients(values=not low)
        if clip and not low:
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in self.models]
            close(whole(norms[1]), norms[0], "norm")
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if not low:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            model.requires_grad_(True)

    def generate(self):
        ids = self.tokens(2)
        mask = self.padding(ids, "left")
        options = self.dice.choice(
            [{"do_sample": False}, {"do_sample": True, "top_k": 9}, {"num_beams": 2}, {"use_cache": False}]
        )
        seed, was_training = self.dice.random(), self.models[0].training
        texts = []
        for model in self.models:
            torch.manual_seed(int(seed * 1e6))
            model.eval()
            texts.append(
                model.generate(ids, attention_mask=mask, max_new_tokens=3, pad_token_id=0, **options)
            )
            model.train(was_training)
        assert torch.equal(*texts), options

    def prefill_in_chunks(self):
        ids = self.tokens(4)
        cut = self.dice.randint(1, ids.shape[1] - 1)
        results = []
        with torch.inference_mode() if self.dice.random() < 0.5 else torch.no_grad():
            for model in self.models:
                first = model(ids[:, :cut], use_cache=True)
                results.append(model(ids[:, cut:], past_key_values=first.past_key_values).logits)
        close(results[1], results[0], "second chunk")

    def prompts(self):
        """Gradients of embeddings that the user made."""
        ids, grads = self.tokens(2), []
        for model in self.models:
            embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
            loss = model(inputs_embeds=embedded, labels=ids).loss
            grads.append(torch.autograd.grad(loss, embedded)[0])
        close(grads[1], grads[0], "prompt")

    def go_on_with_a_copy(self):
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self.take(self.models[0], copy.deepcopy(self.models[1]))
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def reload(self):
        """Into a model that is sharded anew, in another way, by itself or from the whole state."""
        state = full_state_dict(self.models[1]) if self.dice.random() < 0.5 else self.models[1].state_dict()
        fresh = tiny(self.family, self.size, **self.options)
        torch.nn.init.constant_(fresh.lm_head.weight, float("nan"))
        mesh = init_device_mesh("cpu", (self.size,))
        parallelize(fresh, mesh, sequence_parallel=self.dice.random() < 0.5).load_state_dict(state)
        self.take(self.models[0], fresh)

    def compile(self):
        torch._dynamo.reset()
        ids = self.tokens(3)
        compiled = torch.compile(self.models[1], backend="aot_eager", dynamic=self.dice.random() < 0.5)
        for length in (ids.shape[1], ids.shape[1] - 1):
            own = ids[:, :length]
            losses = [model(own, labels=own, use_cache=False).loss for model in (self.models[0], compiled)]
            close(losses[1], losses[0], "compiled loss")
            for loss in losses:
                loss.backward()
        self.same_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def export(self):
        ids = self.tokens(2)
        with torch.no_grad(), exportable(self.models[1]):
            program = torch.export.export(self.models[1], (ids,), {"use_cache": False})
        with torch.no_grad():
            expected = self.models[0](ids, use_cache=False).logits
        close(program.module()(ids, use_cache=False).logits, expected, "exported")


STEPS = ("train", "generate", "prefill_in_chunks", "prompts", "go_on_with_a_copy", "reload")
SLOW_STEPS = ("export", "compile", "train")


def composes(rank, size, family, seed, count, last=()):
    dice = random.Random(f"{family} {size} {seed}")
    torch.manual_seed(seed)
    pair, done = Pair(size, family, dice, layers=1 if last else 2), []  # compiling is slow
    with ExitStack() as stack:
        stack.callback(torch._dynamo.reset)
        for step in [*dice.choices(STEPS, k=count), *last]:
            done.append(step)
            try:
                getattr(pair, done[-1])()
                pair.same_weights()
            except Exception as error:
                raise AssertionError(f"{family}, seed {seed}: after {', '.join(done)}: {error}") from error
    everyone = [None] * size
    own = {n: p.to_local() for n, p in pair.models[1].named_parameters() if p.placements[0].is_replicate()}
    dist.all_gather_object(everyone, own)
    for other in everyone:
        for name, value in own.items():
            assert torch.equal(other[name], value), f"{name}: ranks have drifted apart"


@pytest.mark.parametrize(("family", "world"), [("qwen3", 3), ("gemma2", 2)])
def test_compositions(ranks, family, world):
    ranks(world).run(composes, family, 0, 6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_compositions(ranks, family, world, seed):
    ranks(world).run(composes, family, seed, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world"), [("llama", 1), ("qwen3", 3), ("phi3", 2)])
def test_compositions_that_end_in_graphs(ranks, family, world):
    ranks(world).run(composes, family, 0, 2, SLOW_STEPS)


def copies(rank, size, family):
    """A copy's hooks work with its own parameters, not with those of the model it was copied from."""
    plain = tiny(family, size)
    first = parallelize(copy.deepcopy(plain), init_device_mesh("cpu", (size,)))
    second = copy.deepcopy(copy.deepcopy(first))
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.fill_(float("nan"))
    ids = torch.arange(5).view(1, 5)
    for model in (plain, second):
        model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is None for parameter in first.parameters())
    for (name, parameter), expected in zip(second.named_parameters(), plain.parameters(), strict=True):
        close(whole(parameter.grad), expected.grad, name)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_copy_is_a_model_of_its_own(ranks, family):
    ranks(2).run(copies, family)


def attention_gradients(rank, size, family):
    """They lie as the unsharded model's do, whoever gathered them: torch's cuDNN attention relies on it."""
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spied(*args, **options):
        out = attention(*args, **options)
        out.register_hook(lambda gradient: seen.append(gradient.stride()))
        return out

    for sequence_parallel in (True, False):
        model = parallelize(
            tiny(family, size), init_device_mesh("cpu", (size,)), sequence_parallel=sequence_parallel
        )
        with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", spied):
            ids = torch.arange(20).view(2, 10)
            model(ids, labels=ids).loss.backward()
    assert len(seen) == 4 and len(set(seen)) == 1, seen


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_gradients_of_attention_lie_alike(ranks, family):
    ranks(2).run(attention_gradients, family)


# --- a checkpoint between meshes of other shapes ---


def fsdp_saves(rank, size, family, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = Pair(2, family, random.Random(0), mesh["tp"])
    model = pair.models[1]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    pair.take(pair.models[0], model)
    _train_once(pair)
    model_state, optimizer_state = get_state_dict(model, pair.optimizers[1])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def tp_goes_on(rank, size, family, folder):
    """The same two steps, the first of them read from the other mesh's checkpoint."""
    pair = Pair(size, family, random.Random(0))
    for parameter in pair.models[1].parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    model_state, optimizer_state = get_state_dict(pair.models[1], pair.optimizers[1])
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        pair.models[1],
        pair.optimizers[1],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    first, pair.models = pair.models[1], pair.models[:1]
    _train_once(pair)
    pair.models.append(first)
    pair.same_weights()
    _train_once(pair)
    pair.same_weights()


def _train_once(pair):
    torch.manual_seed(3)
    ids = torch.randint(VOCABULARY, (2, 7))
    for model, optimizer in zip(pair.models, pair.optimizers, strict=False):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("family", "world"), [("qwen3", 3), ("gemma3", 1)])
def test_fsdp_checkpoint_of_tied_weights_for_another_mesh(ranks, tmp_path, family, world):
    ranks(4).run(fsdp_saves, family, str(tmp_path))
    ranks(world).run(tp_goes_on, family, str(tmp_path))
