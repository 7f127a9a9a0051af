"""What users do to parameters and modules of a model, parallelized or not: one change, by its name."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

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


def emptied(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.bias = None


def embeddings(model: Any) -> None:
    old = model.get_input_embeddings()
    new = nn.Embedding(old.num_embeddings, old.embedding_dim, old.padding_idx, dtype=old.weight.dtype)
    new.weight = drawn(new.weight)
    model.set_input_embeddings(new)


def head(model: Any) -> None:
    old = model.lm_head
    new = nn.Linear(old.in_features, old.out_features, bias=False, dtype=old.weight.dtype)
    new.weight = drawn(new.weight)
    model.set_output_embeddings(new)


def penalised(path: str) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        model.get_submodule(path).weight.register_hook(lambda gradient: 2 * gradient)

    return step


def copied_into(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    new = drawn(weight).detach()
    if isinstance(weight, DTensor):  # torch mixes no plain tensors with DTensors
        new = distribute_tensor(new, weight.device_mesh, weight.placements)
    with torch.no_grad():
        weight.copy_(new)


def loaded(model: Any) -> None:
    norm = model.model.norm
    model.load_state_dict({"model.norm.weight": drawn(norm.weight).detach()}, strict=False)


def swapped(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def appended(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def frozen_layer(model: Any) -> None:
    model.model.layers[0].requires_grad_(False)


def pruned_weights(model: Any) -> None:
    nn.utils.prune.l1_unstructured(model.model.layers[0].self_attn.o_proj, "weight", amount=0.5)


def transposed(model: Any) -> None:
    module = model.model.layers[0].self_attn.o_proj
    module.weight = nn.Parameter(drawn(module.weight).detach().t().contiguous().t())


def initialized(model: Any) -> None:
    torch.manual_seed(17)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.25)
            elif "embed" in name:
                parameter.mul_(0.75)


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
    "no bias": emptied,
    "set embedding": embeddings,
    "set head": head,
    "hook on a gradient": penalised("model.layers.0.self_attn.q_proj"),
    "hook on a norm's gradient": penalised("model.norm"),
    "copied into": copied_into,
    "loaded": loaded,
    "swapped": swapped,
    "appended": appended,
    "frozen layer": frozen_layer,
    "pruned weights": pruned_weights,
    "transposed": transposed,
    "initialized": initialized,
    "eager attention": lambda model: model.set_attn_implementation("eager"),
    "tied again": lambda model: model.tie_weights() and None,
    "evaluated": lambda model: model.eval() and None,
    "by name": lambda model: model.requires_grad_(False).model.norm.requires_grad_(True) and None,
}
