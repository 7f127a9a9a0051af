"""What users do to parameters and modules of a model, parallelized or not: one change, by its name."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.models import VOCABULARY


def drawn(like: torch.Tensor) -> nn.Parameter:
    torch.manual_seed(99)
    return nn.Parameter(1 + 0.1 * torch.randn(like.shape, dtype=like.dtype))


def assign(path: str, name: str = "weight") -> Callable[[Any], None]:
    def step(model: Any) -> None:
        module = model.get_submodule(path)
        setattr(module, name, drawn(getattr(module, name)))

    return step


def data(model: Any) -> None:
    model.model.norm.weight.data = drawn(model.model.norm.weight).data


def filled(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)


def bias(model: Any) -> None:
    torch.manual_seed(98)
    linear = model.model.layers[0].self_attn.o_proj
    linear.bias = nn.Parameter(torch.randn(linear.out_features, dtype=linear.weight.dtype))


def untie(model: Any) -> None:
    model.lm_head.weight = drawn(model.lm_head.weight)


def replaced(model: Any) -> None:
    linear = model.model.layers[0].self_attn.o_proj
    new = nn.Linear(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
    model.model.layers[0].self_attn.o_proj = new


def hooked(path: str) -> Callable[[Any], None]:
    return lambda model: model.get_submodule(path).register_forward_hook(lambda *_: None) and None


def other_forward(model: Any) -> None:
    mlp = model.model.layers[1].input_layernorm
    mlp.forward = lambda x, own=mlp.forward: own(x)


def pruned(model: Any) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.o_proj)


SURGERY: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: None,
    "embedding": assign("model.embed_tokens"),
    "norm": assign("model.norm"),
    "inner norm": assign("model.layers.1.input_layernorm"),
    "projection": assign("model.layers.0.self_attn.o_proj"),
    "column": assign("model.layers.0.self_attn.q_proj"),
    "data": data,
    "filled": filled,
    "bias": bias,
    "untie": untie,
    "replaced": replaced,
    "hook on the embedding": hooked("model.embed_tokens"),
    "hook on a layer": hooked("model.layers.0"),
    "hook on a projection": hooked("model.layers.0.self_attn.o_proj"),
    "forward": other_forward,
    "resize": lambda model: model.resize_token_embeddings(VOCABULARY + 3) and None,
    "frozen": lambda model: model.get_input_embeddings().requires_grad_(False) and None,
    "pruned": pruned,
    "weight norm": parametrized,
    "copied": copy.deepcopy,
    "single": lambda model: model.float(),
}
