"""State dicts and files of a parallelized model, in the format of the unsharded model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...api.kept_weights import Stored
from ...api.linears import sharded_as
from ...backends.scales.scaling import FLOAT8
from ...runtime import agree
from ...runtime.group import Group, find
from ..assignment import PAIRED, features_dim
from ..modules.experts import ExpertsForward, RouterForward
from ..modules.heads import SpreadNormForward
from ..modules.kept_linears import SCALES, KeptLinear
from ..modules.layouts import with_layout_of
from ..modules.parts import EmbeddingForward, PackedLinear, ReplicatedForward
from ..modules.styles import ColwiseForward, RowwiseForward
from ..places import place_of

FORWARDS = (
    ColwiseForward, EmbeddingForward, ExpertsForward, ReplicatedForward, RouterForward, RowwiseForward,
    SpreadNormForward,
)  # fmt: skip
"""Forwards of modules that hold parameters; they accept local tensors in place of DTensors."""

NEVER_SAVED = ("column", "packed", "row", "shared head", "shared column", "shared row", "experts")
"""Roles of modules whose weights are not in adapter files; their biases may be."""


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of the unsharded model. Collective.

    `load_state_dict` of a parallelized model accepts it. `save_pretrained` of a parallelized model writes it:
    every rank of the world calls it, rank 0 writes. If a part of the world has the model, rank 0 among it,
    pass `state_dict=full_state_dict(model)`.

    Args:
        model: Model returned by `parallelize`.

    Returns:
        `model.state_dict()` with full tensors under their original names; the same on every rank.

    Raises:
        ValueError: The DTensor parameters were replaced by local tensors, so the full tensors are not known.
    """
    return dict(full_tensors(model))


def full_tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the entries of `full_state_dict` one by one, each gathered when it is requested. Collective.

    It is for a rollout engine that shares the trainer's GPUs: a rank holds one full tensor at a time (of a
    packed linear, such as gate_up_proj, also its parts) in addition to its shards. vLLM's
    `model.load_weights` accepts the iterator.

    Args:
        model: Model returned by `parallelize`, possibly wrapped by peft. Tensors of an adapter keep their
            names; merge it (`merge_adapter`) for an engine without adapters.

    Yields:
        Name and full tensor; every rank must iterate to the end.

    Raises:
        ValueError: The DTensor parameters were replaced by local tensors, so the full tensors are not known.
    """
    for name, module in model.named_modules():
        is_ours = isinstance(vars(module).get("forward"), FORWARDS)
        if is_ours and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(
                f"full_tensors: the parameters of {name!r} are no DTensors any more: exportable or "
                f"DistributedDataParallel has replaced them by one rank's local tensors"
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
        tensors = [_full(part) if isinstance(part, DTensor) else part for part in map(state.get, parts)]
        if name in paired:
            yield name, tensors[0].flatten(paired[name], paired[name] + 1)
        else:
            yield packed_name, torch.cat(tensors) if len(tensors) > 1 and len(tensors[0]) > 1 else tensors[0]


def _full(value: DTensor) -> Tensor:
    """Returns the full tensor. 8-bit values are gathered as bytes: not every backend has a type for them."""
    if value.dtype not in FLOAT8:
        return value.full_tensor()
    return with_layout_of(value, value.to_local().view(torch.uint8)).full_tensor().view(value.dtype)


def packed_linears(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yields name and module of the packed linears of a parallelized model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear))


def mixed_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and module of the experts of a parallelized model."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), ExpertsForward):
            yield name, module


def save_pretrained(model: Any, *args: Any, stored: "StoredAs | None" = None, **kwargs: Any) -> None:
    """Runs transformers' `save_pretrained` with full tensors: without them it would write this rank's shards.

    Args:
        model: Parallelized model.
        *args: Positional arguments of transformers' `save_pretrained`.
        stored: Format of the checkpoint of a model kept in 8 bits. The same bits are written in this format
            if all linears are still kept. If adapters have been merged, all weights are written in the
            model's dtype.
        **kwargs: Keyword arguments of transformers' `save_pretrained`; `state_dict` as `full_state_dict`
            returns it. Without it the call is collective.
    """
    state = kwargs.get("state_dict")
    write = agree.together if state is None else _by_itself
    kwargs["state_dict"] = state = full_state_dict(model) if state is None else dict(state)
    is_kept = stored is not None and stored.linears == sum(1 for _ in kept_linears(model))
    if stored is not None:
        (_name_as_stored if is_kept else _dequantize)(model, state)
    is_main = kwargs.setdefault("is_main_process", dist.get_rank() == 0)
    if stored is not None and is_kept:
        model.config.quantization_config = stored.quantization_config
    ranks, model._tp_size = model._tp_size, None  # transformers before 5.15 would gather full tensors
    config = getattr(model.config, "distributed_config", None)
    if config is not None:  # transformers would wait for the other ranks, even if it fails on one
        model.config.distributed_config = None
    try:
        # transformers 5.10 writes weights on all ranks, and others than an adapter's into an adapter's file
        save = partial(type(model).save_pretrained, model, *args, **kwargs)
        write(find(None), "save_pretrained", save if is_main else lambda: None)
    finally:
        model._tp_size = ranks
        if config is not None:
            model.config.distributed_config = config
        if is_kept:
            del model.config.quantization_config


def _by_itself(_: Group, __: str, attempt: Callable[[], Any]) -> Any:
    """Returns the result of an attempt that one rank makes alone."""
    return attempt()


def save_adapters(holder: Any, *args: Any, **kwargs: Any) -> None:
    """Runs `save_pretrained` of a `PeftModel` with full tensors. Collective unless `state_dict` is passed.

    Args:
        holder: peft's model around a parallelized model.
        *args: Positional arguments of peft's `save_pretrained`.
        **kwargs: Keyword arguments of peft's `save_pretrained`.
    """
    passed = kwargs.pop("state_dict", None)
    write = agree.together if passed is None else _by_itself
    state = full_adapter_state_dict(holder, passed)
    save = partial(type(holder).save_pretrained, holder, *args, state_dict=state, **kwargs)
    write(find(None), "save_pretrained", save)


def full_adapter_state_dict(holder: Any, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the full tensors of a `PeftModel`'s state dict that adapter files may have. Collective.

    Args:
        holder: peft's model around a parallelized model.
        state: State dict to take the entries from; None: the model's.
    """
    state = holder.state_dict() if state is None else state
    places = [(name, place_of(module)) for name, module in holder.named_modules()]
    bases = tuple(f"{name}." for name, place in places if place is not None and place.role in NEVER_SAVED)
    return {
        key: _full(value) if isinstance(value, DTensor) else value
        for key, value in state.items()
        if not key.startswith(bases) or key.endswith("bias")
    }


@dataclass(frozen=True)
class StoredAs:
    """Storage format of the checkpoint from which a model was loaded and kept in 8 bits.

    Attributes:
        quantization_config: Entry of the checkpoint's `config.json`.
        linears: Number of linears that were kept.
    """

    quantization_config: Any
    linears: int


def kept_linears(model: nn.Module) -> Iterator[tuple[str, KeptLinear]]:
    """Yields name and module of the linears kept in 8 bits.

    For a packed linear these are its name and its first part.
    """
    parts = {id(part) for _, packed in packed_linears(model) for part in packed.children()}
    for name, module in model.named_modules():
        linear = next(module.children()) if isinstance(module, PackedLinear) else module
        if isinstance(linear, KeptLinear) and id(module) not in parts:
            yield name, linear


def _name_as_stored(model: nn.Module, state: dict[str, Any]) -> None:
    """Converts the scales in a state dict to the names, shapes and dtypes of the checkpoint."""
    for name, linear in kept_linears(model):
        for local_name, (stored_name, like) in linear.files.items():
            scale = state.pop(f"{name}.{local_name}").reshape(like.shape)
            is_bytes = like.dtype == torch.uint8
            state[f"{name}.{stored_name}"] = (
                scale.to(torch.float8_e8m0fnu).view(torch.uint8) if is_bytes else scale.to(like.dtype)
            )


def _dequantize(model: nn.Module, state: dict[str, Any]) -> None:
    for name, linear in kept_linears(model):
        scale, _ = (state.pop(f"{name}.{key}", None) for key in SCALES)
        weight = Stored(state[f"{name}.weight"], scale, block=linear.block)
        state[f"{name}.weight"] = weight.dequantized(linear.compute_dtype)


def shard_incoming(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Shards an unsharded model's tensors before `load_state_dict`; shards stay unchanged."""
    for name, packed in packed_linears(model):
        for key in ("weight", "bias", *SCALES):
            full = state.pop(f"{prefix}{name}.{key}", None)
            if full is not None:  # all parts share a single scale
                parts = (
                    full.split(list(packed.sizes.values())) if len(full) > 1 else [full] * len(packed.sizes)
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
