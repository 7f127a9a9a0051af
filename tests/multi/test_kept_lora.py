"""peft's LoRA on models whose weights are kept in 8 bits: trained, recomputed, merged, copied, saved."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from overlap_gemm.api.linears import gather_dtensor
from overlap_gemm.parallel import from_pretrained, full_state_dict, requantize
from overlap_gemm.parallel.assignment import UnknownModuleError
from overlap_gemm.parallel.modules.kept_linears import KeptLinear
from tests.support.adapters import ALL, config_of
from tests.support.checkpoints import BLOCKS, FORMS, IDS, SIZES, make

SOME = ("q_proj", "v_proj", "down_proj")
PACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def adapted(folder, ranks, targets=ALL, quantized="keep", dtype=torch.float32, sequence_parallel=True, **how):
    """A model with adapters, the same numbers each time."""
    from peft import get_peft_model

    mesh = init_device_mesh("cpu", (ranks,))
    model = from_pretrained(
        folder, mesh, quantized=quantized, dtype=dtype, sequence_parallel=sequence_parallel
    )
    torch.manual_seed(5)
    return get_peft_model(model, config_of(targets), **how)


def kept(model):
    return [module for module in model.modules() if isinstance(module, KeptLinear)]


def step(model, length=11):
    """Loss and gradients by name, all of them."""
    ids = torch.arange(2 * length).view(2, length) % 90
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {
        n: gather_dtensor(p.grad) for n, p in model.named_parameters() if p.grad is not None
    }


def apart(found, expected):
    return float((found - expected).norm() / expected.norm())


def trains(rank, ranks, folder, targets, sequence_parallel):
    """Near the dequantised model; recomputed it is bitwise the same; the loss falls."""
    how = {"targets": targets, "sequence_parallel": sequence_parallel}
    model, plain = (adapted(folder, ranks, quantized=q, **how).train() for q in ("keep", "dequantize"))
    assert kept(model) and not kept(plain)
    loss, gradients = step(model)
    expected, others = step(plain)
    assert 0 < apart(loss, expected) < 0.05
    assert gradients.keys() == others.keys() and len(gradients) >= 4 * len(targets)
    for name, gradient in gradients.items():
        assert "lora_" in name
        assert apart(gradient, others[name]) < 0.3, name
    whole, wanted = (torch.cat([g.flatten() for g in each.values()]) for each in (gradients, others))
    assert apart(whole, wanted) < 0.15
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again, recomputed = step(model)
        assert torch.equal(again, loss)
        for name, gradient in gradients.items():
            assert torch.equal(recomputed[name], gradient), (name, reentrant)
        model.gradient_checkpointing_disable()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(5):
        step(model)
        optimizer.step()
    assert step(model)[0] < loss - 0.1
    for parameter in trained:
        same = [torch.empty_like(parameter.full_tensor()) for _ in range(ranks)]
        dist.all_gather(same, parameter.full_tensor().detach())
        assert all(torch.equal(one, same[0]) for one in same)


def sizes_for(form, monkeypatch):
    if form in BLOCKS:
        monkeypatch.setitem(SIZES, "intermediate_size", 512)
        monkeypatch.setitem(SIZES, "head_dim", 128)


OFTEN = ("fp8 128x128", "compressed-tensors FP8_DYNAMIC packed")


@pytest.mark.parametrize(
    "form", [form if form in OFTEN else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_adapters_are_trained(ranks, tmp_path, monkeypatch, form):
    sizes_for(form, monkeypatch)
    make(tmp_path, form)
    targets = PACKED if "packed" in form else ALL
    ranks(2).run(trains, str(tmp_path), targets, True)


@pytest.mark.parametrize("form", ["fp8 128x128", "compressed-tensors FP8_DYNAMIC"])
def test_adapters_of_some_without_sequence_parallelism(ranks, tmp_path, monkeypatch, form):
    sizes_for(form, monkeypatch)
    make(tmp_path, form)
    ranks(2).run(trains, str(tmp_path), SOME, False)


def merges(rank, ranks, folder, targets):
    """Merged it is what the dequantised model is, merged: bit for bit; what is not adapted stays kept."""
    for safe in (False, True):
        model, plain = (
            adapted(folder, ranks, targets, quantized, torch.bfloat16) for quantized in ("keep", "dequantize")
        )
        count = len(kept(model))
        merged, expected = (one.merge_and_unload(safe_merge=safe) for one in (model, plain))
        found, wanted = full_state_dict(merged), full_state_dict(expected)
        for name, module in merged.named_modules():
            weight = f"{name}.weight"
            if isinstance(module, KeptLinear) or weight not in wanted:
                continue
            assert found[weight].dtype == torch.bfloat16
            assert torch.equal(found[weight], wanted[weight]), name
        assert len(kept(merged)) == (0 if len(targets) > 3 else count - 2 * len(targets))
        with torch.no_grad():
            logits, others = merged(IDS).logits, expected(IDS).logits
        assert apart(logits, others) < 0.15
        if not kept(merged):
            assert torch.equal(logits, others)
    path = f"{folder}/merged"
    merged.save_pretrained(path)
    dist.barrier()
    mesh = init_device_mesh("cpu", (ranks,))
    again = full_state_dict(from_pretrained(path, mesh, dtype=torch.bfloat16))
    assert again.keys() == wanted.keys()
    for name, value in wanted.items():  # all of it is of 16 bits in the file
        assert torch.equal(again[name], value), name


def broken(rank, ranks, folder, targets):
    """A merge that fails leaves the weights in 8 bits; one that is taken back, in 16."""
    model = adapted(folder, ranks, targets, dtype=torch.bfloat16)
    count, name = len(kept(model)), "default"
    with torch.no_grad():
        for layer in model.modules():
            if hasattr(layer, "lora_B"):
                layer.lora_B[name].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert len(kept(model)) == count
    model = adapted(folder, ranks, targets, dtype=torch.bfloat16)
    with torch.no_grad():
        before = model(IDS).logits
        model.merge_adapter()
        assert len(kept(model)) == count - 2 * len(targets)
        assert apart(model(IDS).logits, before) < 0.2
        model.unmerge_adapter()
        assert apart(model(IDS).logits, before) < 0.2


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("fp8 by tensor, static", marks=pytest.mark.slow),
        "fp8 128x128",
        "compressed-tensors FP8_DYNAMIC",
    ],
)
def test_merging(ranks, tmp_path, monkeypatch, form):
    sizes_for(form, monkeypatch)
    make(tmp_path, form)
    ranks(2).run(merges, str(tmp_path), ALL)
    ranks(2).run(merges, str(tmp_path), SOME)
    ranks(2).run(broken, str(tmp_path), SOME)


def test_merging_packed(ranks, tmp_path):
    make(tmp_path, "compressed-tensors FP8_DYNAMIC packed")
    ranks(2).run(merges, str(tmp_path), PACKED)


def requantizes(rank, ranks, folder, targets, least):
    """Merged and put back: the checkpoint's form again, near the merged model by the errors it says."""
    with pytest.raises(ValueError, match="no linear that was kept in 8 bits before a merge"):
        requantize(from_pretrained(folder, init_device_mesh("cpu", (ranks,)), dtype=torch.bfloat16))
    model = adapted(folder, ranks, targets, dtype=torch.bfloat16)
    count = len(kept(model))
    merged = model.merge_and_unload()
    expected = full_state_dict(merged)
    with torch.no_grad():
        logits = merged(IDS).logits
    errors = requantize(merged)
    assert len(kept(merged)) == count and len(errors) >= least
    assert all(0.01 < error < 0.05 for error in errors.values()), errors
    with torch.no_grad():
        assert apart(merged(IDS).logits, logits) < 0.15
    path = f"{folder}/requantized"
    merged.save_pretrained(path)
    dist.barrier()
    mesh = init_device_mesh("cpu", (ranks,))
    again = from_pretrained(path, mesh, dtype=torch.bfloat16)
    assert len(kept(again)) == count
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, merged(IDS).logits)
    plain = full_state_dict(from_pretrained(path, mesh, dtype=torch.bfloat16, quantized="dequantize"))
    for name, error in errors.items():
        if name.rpartition(".")[2] in ("q", "k", "v", "gate", "up"):
            continue
        value = expected[f"{name}.weight"].float()
        assert abs(apart(plain[f"{name}.weight"].float(), value) - error) < 2e-3, name


REQUANTIZED = {
    "fp8 by tensor, static": ALL,
    "fp8 128x128 ue8m0": ALL,
    "compressed-tensors FP8_DYNAMIC": ALL,
    "compressed-tensors FP8 packed": PACKED,
}


@pytest.mark.parametrize("form", REQUANTIZED)
def test_merged_weights_are_requantized(ranks, tmp_path, monkeypatch, form):
    sizes_for(form, monkeypatch)
    make(tmp_path, form)
    ranks(2).run(requantizes, str(tmp_path), REQUANTIZED[form], 14)


def test_adapters_of_k_and_v_that_every_rank_keeps_whole(ranks, tmp_path, monkeypatch):
    """Their shards would be half a block each: trained, merged as dequantised ones are, and put back."""
    for name, value in (("head_dim", 64), ("intermediate_size", 256), ("num_attention_heads", 4)):
        monkeypatch.setitem(SIZES, name, value)
    make(tmp_path, "fp8 128x128")
    ranks(2).run(trains, str(tmp_path), ALL, True)
    ranks(2).run(merges, str(tmp_path), ALL)
    ranks(2).run(requantizes, str(tmp_path), ALL, 14)


def files(rank, ranks, folder):
    """The adapter's file goes on any base; the kept model's own file is as it was."""
    from peft import PeftModel

    model = adapted(folder, ranks, dtype=torch.bfloat16).eval()
    model.save_pretrained(f"{folder}/adapter", is_main_process=rank == 0)
    dist.barrier()
    mesh = init_device_mesh("cpu", (ranks,))
    for quantized in ("keep", "dequantize"):
        base = from_pretrained(folder, mesh, dtype=torch.bfloat16, quantized=quantized)
        again = PeftModel.from_pretrained(base, f"{folder}/adapter").eval()
        with torch.no_grad():
            found, expected = again(IDS).logits, model(IDS).logits
        assert torch.equal(found, expected) if quantized == "keep" else apart(found, expected) < 0.2
    bare = model.unload()
    assert len(kept(bare)) == 14
    bare.save_pretrained(f"{folder}/bare")
    dist.barrier()
    (one,), (other,) = (Path(at).glob("*.safetensors") for at in (folder, f"{folder}/bare"))
    found, expected = load_file(other), load_file(one)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), value.float()) for name, value in expected.items())


def test_files(ranks, tmp_path):
    make(tmp_path, "compressed-tensors FP8_DYNAMIC")
    ranks(2).run(files, str(tmp_path))


def copied(rank, ranks, folder):
    """Copies train by themselves; casts change what is not in 8 bits."""
    model = adapted(folder, ranks, dtype=torch.bfloat16, autocast_adapter_dtype=False)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.bfloat16}
    twin = copy.deepcopy(model)
    loss, gradients = step(twin)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    others = step(model)[1]
    assert all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
        assert torch.equal(step_loss(model), loss)
    bits = [
        (linear.weight.to_local().clone(), linear.weight_scale.to_local().clone()) for linear in kept(model)
    ]
    for cast, dtype in ((lambda m: m.float(), torch.float32), (lambda m: m.to(torch.float16), torch.float16)):
        cast(model)
        assert len(kept(model)) == 14
        for linear, (values, scale) in zip(kept(model), bits, strict=True):
            assert isinstance(linear.weight, DTensor) and linear.weight.dtype == torch.float8_e4m3fn
            assert torch.equal(linear.weight.to_local().view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(linear.weight_scale.to_local(), scale)
            assert linear.compute_dtype == dtype and not linear.weight.requires_grad
        rest = {p.dtype for p in model.parameters()} - {torch.float8_e4m3fn, torch.float32}
        assert rest == ({dtype} if dtype != torch.float32 else set())
        found, _ = step(model)
        assert apart(found.float(), loss.float()) < 0.05
    path = "model.layers.0.mlp.down_proj"
    with pytest.raises(UnknownModuleError, match=f"'{path}'.*its weight is kept in 8 bits"):
        linear = model.get_base_model().get_submodule(path).base_layer
        linear.weight = torch.nn.Parameter(torch.zeros(linear.weight.shape))


def step_loss(model):
    ids = torch.arange(22).view(2, 11) % 90
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize(
    "form", ["fp8 128x128", pytest.param("compressed-tensors FP8_DYNAMIC", marks=pytest.mark.slow)]
)
def test_copies_and_casts(ranks, tmp_path, monkeypatch, form):
    sizes_for(form, monkeypatch)
    make(tmp_path, form)
    ranks(2).run(copied, str(tmp_path))


def compiled(rank, ranks, folder, serving):
    if serving:
        with torch.no_grad():
            bare = from_pretrained(folder, init_device_mesh("cpu", (ranks,)), dtype=torch.float32)
            expected = bare(IDS, use_cache=False).logits
            bare.compile(fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(bare(IDS, use_cache=False).logits, expected)
        return
    model = adapted(folder, ranks, SOME).train()
    loss, gradients = step(model)
    model.get_base_model().compile(fullgraph=True, backend="aot_eager")
    found, others = step(model)
    assert apart(found, loss) < 1e-5
    for name, gradient in gradients.items():
        assert apart(others[name], gradient) < 1e-2, name


@pytest.mark.parametrize("serving", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_traced_by_the_compiler(ranks, tmp_path, monkeypatch, serving):
    monkeypatch.setitem(SIZES, "num_hidden_layers", 1)  # tracing is what takes the time
    make(tmp_path, "compressed-tensors FP8_DYNAMIC")
    ranks(2).run(compiled, str(tmp_path), serving)
