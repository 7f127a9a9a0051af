"""Residuals and activations of parallelized models as epilogues, against the unsharded model in float64."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import overlap_gemm
from overlap_gemm.api import float8, functional
from overlap_gemm.backends.epilogues import Applying
from overlap_gemm.dispatch.with_epilogue import call_with_epilogue
from overlap_gemm.parallel import parallelize
from tests.support.models import VOCABULARY, tiny

SINGLE = {"rtol": 3e-5, "atol": 3e-6}
"""Hugging Face's norms compute in float32 in a float64 model, too."""

PRE_NORM = ("llama", "mistral", "qwen2", "qwen3", "phi3", "llama4")
"""Families whose layers add what o_proj and down_proj return, and nothing else."""


def counted(calls, *operands):
    calls.append(operands[-1].epilogue.name)
    return call_with_epilogue(*operands)


def applied_epilogues(model, ids):
    """Returns the names of the epilogues of a forward pass without gradients, in order."""
    calls = []
    modules = functional, float8  # products in 8 bits call ops themselves
    for module in modules:
        module.call_with_epilogue = partial(counted, calls)
    try:
        with torch.no_grad():
            model(ids)
    finally:
        for module in modules:
            module.call_with_epilogue = call_with_epilogue
    return calls


def pair(size, family="llama", layers=2, **options):
    plain = tiny(family, size, num_hidden_layers=layers)
    sharded = copy.deepcopy(plain)
    return plain, parallelize(sharded, init_device_mesh("cpu", (size,)), fuse=True, **options)


def same_gradients(plain, sharded):
    for (name, one), other in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(
                other.grad.full_tensor(), one.grad, **SINGLE, msg=lambda text, at=name: f"{at}: {text}"
            )


def same_results(plain, sharded, ids, **options):
    """Compares loss and gradients, then logits without gradients."""
    losses = [model(ids, labels=ids, **options).loss for model in (sharded, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, **SINGLE)
    same_gradients(plain, sharded)
    with torch.no_grad():
        torch.testing.assert_close(sharded(ids).logits, plain(ids).logits, **SINGLE)


def counts_epilogues(rank, size):
    ids = torch.arange(14).view(2, 7)
    _, sharded = pair(size)
    layer = ["add_residual", "swiglu", "add_residual"]
    assert applied_epilogues(sharded, ids) == 2 * layer
    _, sharded = pair(size, sequence_parallel=False)
    assert applied_epilogues(sharded, ids) == 2 * ["add_residual", "add_residual"]
    _, sharded = pair(size, "gemma3")
    assert applied_epilogues(sharded, ids) == 2 * ["geglu_tanh"]
    narrow = tiny("llama", size, dtype=torch.float32)
    eight = {"fuse": True, "float8": overlap_gemm.nn.Float8()}
    sharded = parallelize(narrow, init_device_mesh("cpu", (size,)), **eight)
    assert applied_epilogues(sharded, ids) == 2 * layer
    sharded(ids, labels=ids).loss.backward()
    unfused = parallelize(tiny("llama", size), init_device_mesh("cpu", (size,)), fuse=False)
    assert applied_epilogues(unfused, ids) == []


def test_each_epilogue_is_applied_once_in_each_layer(ranks):
    ranks(2).run(counts_epilogues)


def gates_local_products(rank, size):
    """Computes without sequence parallelism, as if a kernel applied activations to local products."""
    ids, by_kernel = torch.arange(14).view(2, 7), []

    def of_sums(applying, sums, inputs):
        by_kernel.append(applying.epilogue.name)
        return None if inputs else applying.on_sums(sums, inputs)

    for fuse, expected in ((None, 2), (True, 2), (False, 0)):
        plain = tiny("llama", size, num_hidden_layers=2)
        mesh = init_device_mesh("cpu", (size,))
        sharded = parallelize(copy.deepcopy(plain), mesh, fuse=fuse, sequence_parallel=False)
        with mock.patch.object(Applying, "by_kernel", of_sums):
            sharded(ids, labels=ids).loss.backward()
            assert "swiglu" not in by_kernel, "gradients are torch's"
            with torch.no_grad():
                torch.testing.assert_close(sharded(ids).logits, plain(ids).logits, **SINGLE)
        assert by_kernel.count("swiglu") == expected, by_kernel
        by_kernel.clear()


def test_a_kernel_gates_local_products_in_inference(ranks):
    ranks(2).run(gates_local_products)


def explains(rank, size):
    def lines(family, **options):
        return str(overlap_gemm.explain(pair(size, family, **options)[1])).splitlines()

    for family in PRE_NORM:
        mlp = "feed_forward" if family == "llama4" else "mlp"
        assert lines(family) == [
            "model.layers.*.self_attn.o_proj: a residual is an epilogue of gemm_reduce_scatter",
            f"model.layers.*.{mlp}.down_proj: a residual is an epilogue of gemm_reduce_scatter",
            f"model.layers.*.{mlp}: swiglu of gate and up is an epilogue of all_gather_gemm",
        ]
    local = "without sequence parallelism gate and up are local products"
    assert lines("llama", sequence_parallel=False)[-1].endswith(
        f"the activation follows all_gather_gemm: {local}"
    )
    for family, why in (
        ("gemma2", "post_attention_layernorm follows self_attn, before the residual is added"),
        ("olmo2", "self_attn is called with something else than a norm's result"),
        ("granite", "self_attn's output is multiplied before it is added"),
    ):
        assert (
            lines(family)[0]
            == f"model.layers.*.self_attn.o_proj: a residual follows gemm_reduce_scatter: {why}"
        )
    assert lines("llama", float8=overlap_gemm.nn.Float8()) == lines("llama")
    compiled = "invariant='batch': in compiled models it follows, so it always does"
    assert lines("llama", invariant="batch")[0].endswith(f"follows gemm_reduce_scatter: {compiled}")


def test_explain_says_what_is_fused_and_why_not(ranks):
    ranks(1).run(explains)


def compiles(rank, size):
    plain, sharded = pair(size, layers=1)  # compiling is slow
    compiled = torch.compile(sharded, fullgraph=True, backend="aot_eager", dynamic=False)
    ids = torch.arange(16).view(2, 8)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            result, expected = (model(ids, use_cache=False).logits for model in (compiled, plain))
        torch.testing.assert_close(result, expected, **SINGLE)
        if grad:
            for logits in (result, expected):
                logits.square().sum().backward()
    same_gradients(plain, sharded)


def test_compiled_in_one_graph(ranks):
    ranks(2).run(compiles)


def recomputes(rank, size, what):
    plain, sharded = pair(size, "qwen3")
    for model in (plain, sharded):
        if what in ("reentrant", "not reentrant"):
            model.gradient_checkpointing_enable({"use_reentrant": what == "reentrant"})
            continue
        for layer in model.model.layers:
            wrapped = checkpoint_wrapper(getattr(layer, what), CheckpointImpl.REENTRANT)
            setattr(layer, what, wrapped)
    same_results(plain, sharded, torch.arange(14).view(2, 7), use_cache=False)
    if what in ("mlp", "self_attn"):
        assert f"{what} is wrapped" in str(overlap_gemm.explain(sharded))


@pytest.mark.parametrize("what", ["reentrant", "not reentrant", "mlp", "self_attn"])
def test_recomputed_layers_and_parts(ranks, what):
    ranks(2).run(recomputes, what)


def adapts(rank, size, first):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights="gaussian")
    plain = tiny("llama", size)
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (size,))
    if not first:
        parallelize(sharded, mesh, fuse=True)
    adapted = []
    for model in (plain, sharded):
        torch.manual_seed(5)
        adapted.append(get_peft_model(model, config))
        for name, parameter in adapted[-1].named_parameters():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(len(name))
                rows = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                if hasattr(parameter, "placements"):
                    rows = torch.distributed.tensor.distribute_tensor(rows, mesh, parameter.placements)
                parameter.data.copy_(rows)
    if first:
        parallelize(adapted[1], mesh, fuse=True)
    ids = torch.arange(14).view(2, 7)
    losses = [model(input_ids=ids, labels=ids).loss for model in adapted]
    torch.testing.assert_close(losses[1], losses[0], **SINGLE)
    for loss in losses:
        loss.backward()
    same_gradients(*adapted)
    lines = str(overlap_gemm.explain(adapted[1]))
    assert "gate and up have adapters, which add to them before the activation" in lines
    assert lines.count("a residual is an epilogue") == 2
    assert applied_epilogues(sharded, ids) == 4 * ["add_residual"]


@pytest.mark.parametrize("first", [True, False], ids=["lora-first", "lora-after"])
def test_lora(ranks, first):
    ranks(2).run(adapts, first)


def hooks_see_what_they_saw(rank, size):
    """Checks that without sequence parallelism a hook sees an attention's output, not the sum."""
    plain, sharded = pair(size, sequence_parallel=False)
    seen = []
    for model in (plain, sharded):
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(
                overlap_gemm.parallel.sees_shards(lambda _, args, out: seen.append(out[0].detach()))
            )
    ids = torch.arange(14).view(2, 7)
    same_results(plain, sharded, ids)
    assert len(seen) == 8
    for i in range(2):
        torch.testing.assert_close(seen[i + 2], seen[i], **SINGLE)
    assert "self_attn or o_proj has a hook on its output" in str(overlap_gemm.explain(sharded))


def test_a_hook_on_an_attention_sees_its_output_without_the_residual(ranks):
    ranks(2).run(hooks_see_what_they_saw)


def counts_calls_of_pre_hooks(rank, size, which):
    plain, sharded = pair(size)
    calls = []
    hook = overlap_gemm.parallel.sees_shards(lambda module, args: calls.append(module))
    hooked = sharded.model.layers[1].mlp.get_submodule(which)
    hooked.register_forward_pre_hook(hook)
    same_results(plain, sharded, torch.arange(14).view(2, 7))
    assert calls == [hooked, hooked]  # with gradients, and without them
    fusions = {one.module: one.why_not for one in overlap_gemm.explain(sharded)}
    assert fusions["model.layers.0.mlp"] is None
    assert fusions["model.layers.1.mlp"] == "gate, up or their activation has a hook"


@pytest.mark.parametrize("which", ["gate_proj", "up_proj", "act_fn"])
def test_a_pre_hook_within_an_mlp_is_called(ranks, which):
    ranks(2).run(counts_calls_of_pre_hooks, which)


class AddsTwice(nn.Module):
    """A layer that adds its attention twice."""

    def __init__(self, layer):
        super().__init__()
        self.__dict__ = layer.__dict__

    def forward(self, hidden_states, **kwargs):
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        hidden_states = hidden_states + attended + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def refuses_other_forwards(rank, size):
    plain, sharded = tiny("llama", size), tiny("llama", size)
    for model in (plain, sharded):
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = AddsTwice(layer)
    parallelize(sharded, init_device_mesh("cpu", (size,)), fuse=True)
    same_results(plain, sharded, torch.arange(VOCABULARY - 3, VOCABULARY).view(1, 3), use_cache=False)
    lines = str(overlap_gemm.explain(sharded))
    assert "self_attn's output is added to something else than its norm's input" in lines
    assert "mlp.down_proj: a residual is an epilogue" in lines


def test_a_layer_that_does_something_else_keeps_its_additions(ranks):
    ranks(2).run(refuses_other_forwards)
