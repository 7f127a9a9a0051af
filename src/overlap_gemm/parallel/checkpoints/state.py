"""State dicts and files of a parallelized model: those of the unsharded model, out and in."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...api.kept_weights import Stored
from ...api.linears import sharded_as
from ...backends.scales.scaling import FLOAT8
from ..assignment import PAIRED, features_dim
from ..modules.experts import ExpertsForward, RouterForward
from ..modules.heads import SpreadNormForward
from ..modules.kept_linears import SCALES, KeptLinear
from ..modules.layouts import lying_as
from ..modules.parts import EmbeddingForward, PackedLinear, ReplicatedForward
from ..modules.styles import ColwiseForward, RowwiseForward
from ..places import place_of

FORWARDS = (
    ColwiseForward, EmbeddingForward, ExpertsForward, ReplicatedForward, RouterForward, RowwiseForward,
    SpreadNormForward,
)  # fmt: skip
"""Those of modules that hold parameters; they take local tensors for DTensors."""

NEVER_SAVED = ("column", "packed", "row", "shared head", "shared column", "shared row", "experts")
"""Roles of modules of whose parameters files of adapters hold biases at most."""


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict that the unsharded model would have. Collective.

    A parallelized model's `load_state_dict` takes it, and its `save_pretrained`, which every rank calls and
    rank 0 carries out, writes it.

    Args:
        model: What `parallelize` returned.

    Returns:
        `model.state_dict()` with whole tensors under their original names; the same on every rank.

    Raises:
        ValueError: Somebody has put local tensors in the place of the DTensors, and nobody knows the rest.
    """
    return dict(full_tensors(model))


def full_tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The entries of `full_state_dict`, one after the other, each gathered when it is asked for. Collective.

    For a rollout engine that shares the trainer's GPUs: a rank holds one full tensor at a time beside its
    shards. vLLM's `model.load_weights` takes the iterator as it is.

    Args:
        model: What `parallelize` returned, in peft's model or not. An adapter's tensors keep their names;
            merge it (`merge_adapter`) for an engine that has no adapters.

    Yields:
        Name and tensor; every rank iterates to the end.

    Raises:
        ValueError: As `full_state_dict`.
    """
    for name, module in model.named_modules():
        is_ours = isinstance(vars(module).get("forward"), FORWARDS)
        if is_ours and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(
                f"the parameters of {name!r} are no DTensors any more: DistributedDataParallel or exportable "
                f"has made local tensors of them, which are one rank's"
            )
    state = model.state_dict()
    paired = {f"{name}.{PAIRED}": features_dim(experts) for name, experts in mixed_experts(model)}
    parts_of = {
        f"{name}.{part}.{key}": (f"{name}.{key}", [f"{name}.{other}.{key}" for other in packed.sizes])
        for name, packed in packed_linears(model)
        for part in packed.sizes
        for key in ("weight", *SCALES)
    }
    for name in state:
        packed_name, parts = parts_of.get(name, (name, [name]))
        if name != parts[0]:
            continue
        tensors = [_whole(part) if isinstance(part, DTensor) else part for part in map(state.get, parts)]
        if name in paired:
            yield name, tensors[0].flatten(paired[name], paired[name] + 1)
        else:
            yield packed_name, torch.cat(tensors) if len(tensors) > 1 and len(tensors[0]) > 1 else tensors[0]


def _whole(value: DTensor) -> Tensor:
    """All of it; of 8 bits as bytes, since not every backend of torch.distributed has a type for those."""
    if value.dtype not in FLOAT8:
        return value.full_tensor()
    return lying_as(value, value.to_local().view(torch.uint8)).full_tensor().view(value.dtype)


def packed_linears(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """The packed linears of a parallelized model, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear))


def mixed_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The experts of a parallelized model, by name."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), ExpertsForward):
            yield name, module


def save_pretrained(model: Any, *args: Any, stored: "StoredAs | None" = None, **kwargs: Any) -> None:
    """`save_pretrained` of full tensors: by itself it would write this rank's shards.

    Args:
        model: A parallelized model.
        *args: As for transformers' `save_pretrained`.
        stored: How the checkpoint of a model kept in 8 bits is stored. It is written so, bit for bit, while
            all of it is kept; where adapters have been merged all is written in the model's dtype.
        **kwargs: The same.
    """
    is_kept = False
    if kwargs.get("state_dict") is None:
        kwargs["state_dict"] = state = full_state_dict(model)
        if stored is not None:
            is_kept = stored.linears == sum(1 for _ in kept_linears(model))
            (_name_as_stored if is_kept else _dequantize)(model, state)
    kwargs.setdefault("is_main_process", dist.get_rank() == 0)
    if stored is not None and is_kept:
        model.config.quantization_config = stored.quantization_config
    ranks, model._tp_size = model._tp_size, None  # transformers before 5.15 would gather what is whole
    try:
        type(model).save_pretrained(model, *args, **kwargs)
    finally:
        model._tp_size = ranks
        if is_kept:
            del model.config.quantization_config


def save_adapters(holder: Any, *args: Any, **kwargs: Any) -> None:
    """`save_pretrained` of a `PeftModel`, which is given full tensors. Collective.

    Args:
        holder: peft's model around a parallelized model.
        *args: As for peft's `save_pretrained`.
        **kwargs: The same.
    """
    state = kwargs.pop("state_dict", None)
    state = holder.state_dict() if state is None else state
    places = [(name, place_of(module)) for name, module in holder.named_modules()]
    bases = tuple(f"{name}." for name, place in places if place is not None and place.role in NEVER_SAVED)
    wanted = {
        key: _whole(value) if isinstance(value, DTensor) else value
        for key, value in state.items()
        if not key.startswith(bases) or key.endswith("bias")
    }
    type(holder).save_pretrained(holder, *args, state_dict=wanted, **kwargs)


@dataclass(frozen=True)
class StoredAs:
    """How the checkpoint of a model that is kept in 8 bits is stored.

    Attributes:
        quantization_config: The entry of its `config.json`.
        linears: How many linears are kept.
    """

    quantization_config: Any
    linears: int


def kept_linears(model: nn.Module) -> Iterator[tuple[str, KeptLinear]]:
    """Returns the linears kept in 8 bits with their names; of a packed one its name, and its first part."""
    parts = {id(part) for _, packed in packed_linears(model) for part in packed.children()}
    for name, module in model.named_modules():
        linear = next(module.children()) if isinstance(module, PackedLinear) else module
        if isinstance(linear, KeptLinear) and id(module) not in parts:
            yield name, linear


def _name_as_stored(model: nn.Module, state: dict[str, Any]) -> None:
    """Gives the scales in a state dict the names, shapes and types that they have in the checkpoint."""
    for name, linear in kept_linears(model):
        for own, (theirs, like) in linear.files.items():
            scale = state.pop(f"{name}.{own}").reshape(like.shape)
            is_bytes = like.dtype == torch.uint8
            state[f"{name}.{theirs}"] = (
                scale.to(torch.float8_e8m0fnu).view(torch.uint8) if is_bytes else scale.to(like.dtype)
            )


def _dequantize(model: nn.Module, state: dict[str, Any]) -> None:
    for name, linear in kept_linears(model):
        scale, _ = (state.pop(f"{name}.{own}", None) for own in SCALES)
        weight = Stored(state[f"{name}.weight"], scale, block=linear.block)
        state[f"{name}.weight"] = weight.dequantized(linear.compute_dtype)


def shard_incoming(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: cuts the tensors of an unsharded model; leaves shards as they are."""
    for name, packed in packed_linears(model):
        for key in ("weight", "bias", *SCALES):
            whole = state.pop(f"{prefix}{name}.{key}", None)
            if whole is not None:  # one scale is every part's
                parts = (
                    whole.split(list(packed.sizes.values()))
                    if len(whole) > 1
                    else [whole] * len(packed.sizes)
                )
                for part, rows in zip(packed.sizes, parts, strict=True):
                    state[f"{prefix}{name}.{part}.{key}"] = rows
    for name, experts in mixed_experts(model):
        key, dim = f"{prefix}{name}.{PAIRED}", features_dim(experts)
        if key in state and state[key].ndim < experts.gate_up_proj.ndim:
            state[key] = state[key].unflatten(dim, (2, -1))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (value := state.get(prefix + name)) is not None:
            state[prefix + name] = sharded_as(parameter, value)
