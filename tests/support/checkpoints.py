"""Checkpoints of 8-bit linears, made by the libraries that make them, for tests."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.models import tiny

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 32,
    "dtype": torch.bfloat16,
}
IDS = torch.arange(11).view(1, 11)


def model_of(family: str) -> Any:
    """Returns the model that is stored."""
    biases: dict[str, Any] = {"attention_bias": False, "mlp_bias": True} if family == "llama" else {}
    model: Any = tiny(family, 2, **SIZES, **biases).eval()
    model.config.architectures = [type(model).__name__]
    return model


def linears(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns those that are stored in 8 bits, by name."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]


def by_transformers(folder: Path, family: str = "llama", **options: Any) -> Any:
    """`fp8`; no library quantises on CPUs, but the operation that does is transformers' own."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model, config = model_of(family), FineGrainedFP8Config(**options)
    operation = Fp8Quantize(SimpleNamespace(quantization_config=config))
    state = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    state["lm_head.weight"] = model.lm_head.weight.detach()
    for name, linear in linears(model):
        state.update(operation.convert({f"{name}.weight": linear.weight.detach()}))
        if options.get("activation_scheme") == "static":
            state[f"{name}.activation_scale"] = torch.tensor(0.02)
    model.config.quantization_config = config.to_dict()
    model.config.save_pretrained(folder)
    save_file({k: v.contiguous() for k, v in state.items()}, f"{folder}/model.safetensors", {"format": "pt"})
    return reference(folder)


def by_compressed_tensors(folder: Path, family: str = "llama", *, preset: str) -> Any:
    """Scales as its observers find them: of the least and the largest element."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model = model_of(family)
    groups = {"all": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for _, linear in linears(model):
        given, weight = linear.quantization_scheme.weights, linear.weight.detach().float()
        rows, columns = given.block_structure or (1, weight.shape[1])
        if given.strategy == "tensor":
            rows = len(weight)
        padded = nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))
        parts = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
        scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), given)
        linear.weight_scale.data.copy_(scale.view(linear.weight_scale.shape))
        if hasattr(linear, "input_scale"):
            linear.input_scale.data.fill_(0.02)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return reference(folder, quantization_config=CompressedTensorsConfig(dequantize=True))


def by_modelopt(folder: Path, family: str = "llama") -> Any:
    """ModelOpt's own, where it is installed."""
    quantization = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor

    model = model_of(family)
    quantization.quantize(model, quantization.FP8_DEFAULT_CFG, lambda model: model(IDS))
    export_hf_checkpoint(model, export_dir=folder)
    state = load_file(Path(folder) / "model.safetensors")
    for name, _ in linears(model_of(family)):  # by its own tensors: q, k and v have been given one scale
        scale, weight = state.pop(f"{name}.weight_scale"), state[f"{name}.weight"]
        del state[f"{name}.input_scale"]
        whole = FP8QTensor(weight.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
        state[f"{name}.weight"] = whole.to(torch.bfloat16)
    plain = model_of(family)
    plain.load_state_dict(state)
    return plain


def reference(folder: Path, **options: Any) -> Any:
    """The model as transformers itself dequantises it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


FORMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "fp8 by tensor": (by_transformers, {"weight_block_size": None}),
    "fp8 by tensor, static": (
        by_transformers,
        {"weight_block_size": None, "activation_scheme": "static"},
    ),
    "fp8 128x128": (by_transformers, {"weight_block_size": (128, 128)}),
    "fp8 128x128 ue8m0": (by_transformers, {"weight_block_size": (128, 128), "scale_fmt": "ue8m0"}),
    "fp8 32x32 ue8m0": (by_transformers, {"weight_block_size": (32, 32), "scale_fmt": "ue8m0"}),
    "compressed-tensors FP8": (by_compressed_tensors, {"preset": "FP8"}),
    "compressed-tensors FP8_DYNAMIC": (by_compressed_tensors, {"preset": "FP8_DYNAMIC"}),
    "compressed-tensors FP8_BLOCK": (by_compressed_tensors, {"preset": "FP8_BLOCK"}),
    "compressed-tensors FP8_DYNAMIC packed": (
        by_compressed_tensors,
        {"preset": "FP8_DYNAMIC", "family": "phi3"},
    ),
    "compressed-tensors FP8 packed": (by_compressed_tensors, {"preset": "FP8", "family": "phi3"}),
    "modelopt": (by_modelopt, {}),
}
BLOCKS = [name for name, (_, options) in FORMS.items() if options.get("weight_block_size")]
BLOCKS.append("compressed-tensors FP8_BLOCK")


def make(folder: Path, form: str) -> None:
    """Writes a checkpoint, and alongside it what its own library makes of it."""
    maker, options = FORMS[form]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = maker(folder, **options).eval()
    with torch.no_grad():
        logits = model(IDS).logits
    # transformers 5.10 keeps the scales of a checkpoint that it has dequantised.
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("_scale")}
    torch.save({"state": state, "logits": logits}, Path(folder) / "expected.pt")
