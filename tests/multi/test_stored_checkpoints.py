"""Checkpoints of 8-bit linears, made by the libraries that make them: dequantised, or kept in 8 bits."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from overlap_gemm import quantize_rows
from overlap_gemm.api.kept_weights import STORED, Stored
from overlap_gemm.parallel import QuantizedCheckpointError, from_pretrained, full_state_dict
from overlap_gemm.parallel.checkpoints.stored import Checkpoint, Form, form_of
from overlap_gemm.spec.sharding import Shards
from tests.support.checkpoints import BLOCKS, FORMS, IDS, SIZES, by_transformers, make


def dequantized(rank, ranks, folder):
    expected = torch.load(Path(folder) / "expected.pt")
    mesh = init_device_mesh("cpu", (ranks,))
    model = from_pretrained(folder, mesh, quantized="dequantize", dtype=torch.bfloat16)
    whole = full_state_dict(model)
    assert whole.keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        assert whole[name].dtype == value.dtype and torch.equal(whole[name], value), name
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected["logits"], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_dequantized_it_is_the_librarys_own(ranks, tmp_path, form):
    make(tmp_path, form)
    ranks(2).run(dequantized, str(tmp_path))


def kept(rank, ranks, folder):
    """The bytes of the file, the product of the rounded operands, about the dequantised model's logits."""
    expected = torch.load(Path(folder) / "expected.pt")
    mesh = init_device_mesh("cpu", (ranks,))
    model = from_pretrained(folder, mesh, dtype=torch.bfloat16)
    (file,) = Path(folder).glob("*.safetensors")
    stored = load_file(file)
    whole = full_state_dict(model)
    names = [
        key.removesuffix(".weight") for key, value in stored.items() if value.dtype == torch.float8_e4m3fn
    ]
    assert len(names) in (8, 14) and set(names) == {name for name, _ in named(expected)}
    for name in names:
        key = f"{name}.weight"
        assert torch.equal(whole[key].view(torch.uint8), stored[key].view(torch.uint8)), name
    layer = next(module for name, module in model.named_modules() if name.endswith("0.mlp.down_proj"))
    name = next(name for name in names if name.endswith("0.mlp.down_proj"))
    depth = Shards.even(stored[f"{name}.weight"].shape[1], ranks)
    x = torch.randn(3, 1, depth.total, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    own = slice(*depth.range(rank))
    static = [
        key for key in stored if key.startswith(name) and key.endswith(("input_scale", "activation_scale"))
    ]
    with torch.no_grad():
        found = layer(x[..., own].movedim(0, 1)).movedim(1, 0)
    scale = stored[next(k for k in stored if k.startswith(f"{name}.weight_scale"))].float().double()
    scale, block = scale.reshape(-1, 1) if scale.ndim < 2 else scale, None
    if scale.shape[-1] > 1:
        block = depth.total // scale.shape[-1]
        scale = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    weight = stored[f"{name}.weight"].double() * scale
    exact = torch.zeros(3, 1, 256, dtype=torch.float64)
    for r in range(ranks):
        part = slice(*depth.range(r))
        if static:
            given = stored[static[0]].float()
            rounded = (x[..., part].float() / given).clamp(-448, 448).to(torch.float8_e4m3fn).double() * given
        else:
            values, scales = quantize_rows(x[..., part], block=block)
            rounded = values.double() * (scales if block is None else scales.repeat_interleave(block, -1))
        exact += rounded @ weight[:, part].t()
    if (bias := whole.get(f"{name}.bias")) is not None:
        exact += bias.double()
    mine = exact[slice(*Shards.even(3, ranks).range(rank))]
    torch.testing.assert_close(found.double(), mine, rtol=2.0**-8, atol=2.0**-8)
    with torch.no_grad():
        logits = model(IDS).logits
        error = (logits - expected["logits"]).float().norm() / expected["logits"].float().norm()
        assert 0 < error < 0.2
        ids = model.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert ids.shape == (1, 14)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(IDS).logits, logits)
    saved_as_it_was(model, folder, stored)
    return float(error)


def saved_as_it_was(model, folder, stored):
    """Saved again it is the same file; the state dict goes in again, too."""
    for path, options in (
        (f"{folder}/saved", {}),
        (f"{folder}/by-state", {"state_dict": full_state_dict(model)}),
    ):
        model.save_pretrained(path, **options)
        torch.distributed.barrier()
        (file,) = Path(path).glob("*.safetensors")
        again = load_file(file)
        assert again.keys() == stored.keys()
        for key, value in stored.items():
            found = again[key]
            assert found.dtype == value.dtype and found.shape == value.shape, key
            assert torch.equal(found.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), key
        configs = [json.loads((Path(at) / "config.json").read_text()) for at in (folder, path)]
        assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert not hasattr(model.config, "quantization_config")
    whole = {name: value.clone() for name, value in full_state_dict(model).items()}
    with torch.no_grad():
        expected = model(IDS).logits
        for parameter in model.parameters():
            parameter.to_local().view(torch.uint8).zero_()
        model.load_state_dict(whole)
        assert torch.equal(model(IDS).logits, expected)


def named(expected):
    for key in expected["state"]:
        if "_proj.weight" in key:
            yield key.removesuffix(".weight"), key


@pytest.mark.parametrize("form", [form for form in FORMS if form not in BLOCKS])
def test_kept_it_is_the_product_of_the_stored_weights(ranks, tmp_path, form):
    make(tmp_path, form)
    ranks(2).run(kept, str(tmp_path))


@pytest.mark.parametrize("form", BLOCKS)
def test_blocks_are_kept_where_shards_end_on_their_borders(ranks, tmp_path, monkeypatch, form):
    monkeypatch.setitem(SIZES, "intermediate_size", 512)
    monkeypatch.setitem(SIZES, "head_dim", 128)
    make(tmp_path, form)
    ranks(2).run(kept, str(tmp_path))


def few_heads(rank, ranks, folder, width):
    """Near the dequantised model; every rank has k and v whole, bit for bit; saved as it was."""
    error = kept_model(rank, ranks, folder)
    assert 0 < error < 0.2
    mesh = init_device_mesh("cpu", (ranks,))
    model = from_pretrained(folder, mesh, dtype=torch.bfloat16, sequence_parallel=False)
    stored = load_file(f"{folder}/model.safetensors")
    for name in ("k_proj", "v_proj"):
        linear = model.model.layers[1].self_attn.get_submodule(name)
        own, whole = linear.weight.to_local(), stored[f"model.layers.1.self_attn.{name}.weight"]
        assert torch.equal(own.view(torch.uint8), whole.view(torch.uint8))
        assert len(linear.rows) == width
    saved_as_it_was(model, folder, stored)


def kept_model(rank, ranks, folder):
    mesh = init_device_mesh("cpu", (ranks,))
    kept, plain = (
        from_pretrained(folder, mesh, dtype=torch.bfloat16, quantized=how) for how in ("keep", "dequantize")
    )
    with torch.no_grad():
        found, expected = (model(IDS).logits.float() for model in (kept, plain))
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("form", "heads", "width", "world"),
    [
        ("fp8 128x128", 2, 64, 2),  # a rank's head is half a block
        ("fp8 128x128", 2, 64, 4),  # and is shared by two ranks
        ("fp8 128x128", 1, 128, 2),
        ("fp8 by tensor", 1, 64, 2),
        ("compressed-tensors FP8_DYNAMIC", 1, 64, 2),
    ],
)
def test_k_and_v_of_few_heads_are_kept_whole(ranks, tmp_path, monkeypatch, form, heads, width, world):
    monkeypatch.setitem(SIZES, "head_dim", width)
    monkeypatch.setitem(SIZES, "intermediate_size", 128 * world)
    monkeypatch.setitem(SIZES, "num_attention_heads", 2 * world)
    monkeypatch.setitem(SIZES, "num_key_value_heads", heads)
    make(tmp_path, form)
    ranks(world).run(few_heads, str(tmp_path), width)


def refused(rank, ranks, folder, words):
    with pytest.raises(QuantizedCheckpointError, match=words + ".*'dequantize'"):
        from_pretrained(folder, init_device_mesh("cpu", (ranks,)), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="quantized must be one of keep, dequantize, got 'none'"):
        from_pretrained(folder, init_device_mesh("cpu", (ranks,)), quantized="none")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            "fp8 128x128",
            r"_proj' \(fp8 of 8 bits, blocks of 128 x 128\).* shards, \[\d+, \d+\], do not end at",
        ),
        ("fp8 64x64", r"blocks of 64 x 64\).* the blocks must be 128 x 128 or 32 x 32"),
    ],
)
def test_other_blocks_are_dequantized_by_choice_alone(ranks, tmp_path, monkeypatch, form, words):
    monkeypatch.setitem(FORMS, "fp8 64x64", (by_transformers, {"weight_block_size": (64, 64)}))
    make(tmp_path, form)
    ranks(2).run(refused, str(tmp_path), words)


def test_heads_that_some_ranks_could_keep_are_refused_by_all(ranks, tmp_path, monkeypatch):
    # Two ranks share each of two heads of 96 rows, of which the first alone lies within one block.
    heads = {"head_dim": 96, "num_attention_heads": 16, "num_key_value_heads": 2}
    for name, size in {**heads, "intermediate_size": 512}.items():
        monkeypatch.setitem(SIZES, name, size)
    make(tmp_path, "compressed-tensors FP8_BLOCK")
    ranks(4).run(refused, str(tmp_path), r"k_proj' .* shards, \[48, 48, 48, 48\], do not end at")


def test_shards_of_any_width_are_kept(ranks, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "intermediate_size", 56)
    make(tmp_path, "fp8 by tensor")
    ranks(2).run(kept, str(tmp_path))


def test_of_weights_that_share_a_gather_the_widest_input_scale_holds():
    """The narrow one would cut half of x off."""
    x = 40 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    weights = [
        Stored(torch.eye(16, 32).to(torch.float8_e4m3fn), torch.ones(1, 1), torch.full((1, 1), scale))
        for scale in (0.02, 0.5)
    ]
    expected = ((x / 0.5).to(torch.float8_e4m3fn).float() * 0.5)[:, :16]
    for out in STORED.all_gather_gemm(x, weights, rows=4):
        torch.testing.assert_close(out, expected)


def test_forms_are_told_by_the_configuration():
    def form(**said):
        return form_of(SimpleNamespace(quantization_config=said))

    assert form_of(SimpleNamespace()) is None and form(quant_method="gptq") is None
    assert form(quant_method="modelopt", quantization={"quant_algo": "FP8"}) == Form("modelopt", static=True)
    with pytest.raises(QuantizedCheckpointError, match="modelopt: quant_algo must be 'FP8', got 'NVFP4'"):
        form(quant_method="modelopt", quant_algo="NVFP4")

    def group(**weights):
        return {"weights": {"type": "float", "num_bits": 8, "strategy": "channel", **weights}}

    one, tensor = group(), group(strategy="tensor")
    assert form(quant_method="compressed-tensors", config_groups={"a": one, "b": one}).block is None
    for groups, words in (
        ({"a": one, "b": group(strategy="block", block_structure=[64, 64])}, "has 2"),
        ({"a": group(type="int")}, r"\('int', 8, 'channel'\)"),
        ({"a": group(num_bits=4)}, r"\('float', 4, 'channel'\)"),
    ):
        with pytest.raises(QuantizedCheckpointError, match=words):
            form(quant_method="compressed-tensors", config_groups=groups)
    assert form(quant_method="compressed-tensors", config_groups={"a": tensor}) == Form("compressed-tensors")


@pytest.mark.parametrize("kind", ["float32", "ue8m0", "bytes"])
def test_slices_are_read_whatever_the_border(tmp_path, kind):
    """Of a weight whose last blocks are short, on both sides."""
    given = torch.Generator().manual_seed(0)
    values = torch.randn(70, 45, generator=given).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-3, 4, (3, 2), generator=given)
    written = {"float32": scale, "ue8m0": scale.to(torch.float8_e8m0fnu)}
    written["bytes"] = written["ue8m0"].view(torch.uint8)
    save_file({"a.weight": values, "a.weight_scale_inv": written[kind]}, tmp_path / "one.safetensors")
    with safe_open(tmp_path / "one.safetensors", framework="pt") as file:
        checkpoint = Checkpoint([file], Form("fp8", "weight_scale_inv", (32, 32)))
        assert checkpoint.stored == ["a"] and list(checkpoint.plain()) == []
        found = checkpoint.dequantized("a")
        every = scale.repeat_interleave(32, 0)[:70].repeat_interleave(32, 1)[:, :45]
        whole = values.float() * every
        assert torch.equal(found[...], whole) and found.get_shape() == [70, 45]
        for rows in (slice(0, 35), slice(35, 70), slice(31, 33), slice(70, 70)):
            assert torch.equal(found[rows, :], whole[rows])
            assert torch.equal(found[:, rows], whole[:, rows])
        assert torch.equal(found[10:40], whole[10:40])
        wrong = Checkpoint([file], Form("fp8", "weight_scale_inv", (64, 32)))
        with pytest.raises(QuantizedCheckpointError, match=r"must be \[2, 2\] for a weight \[70, 45\]"):
            wrong.scale("a")
