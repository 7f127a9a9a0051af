"""Parameters that are assigned in a parallelized model: sharded by the module's layout, or refused by name.

    model.model.norm.weight = nn.Parameter(tensor)      # the full tensor, the same on every rank

torch calls `_registered` for every parameter that any module gets. Two assignments bypass it:
`module._parameters[...] =`, and `parameter.data = tensor`, which a DTensor ignores. `WatchParameters` detects
these before the next forward pass.
"""

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from .assignment import PAIRED, Role, unknown
from .inputs import digest_of
from .modules.experts import gates_and_ups
from .modules.kept_linears import KeptLinear
from .places import Place, place_of, placed, refuse

SHARD = "_overlap_gemm_shard"
"""Attribute that marks plain parameters as this rank's shards; set by `exportable`."""
SHARDS = (SHARD, "_st_info")
"""Attributes that mark a plain parameter as a shard; torch's `DistributedDataParallel` sets the second."""

BIASES: dict[Role | None, Placement] = {
    "column": Shard(0), "shared column": Shard(0), "head": Shard(0), "row": Replicate(),
    "shared row": Replicate(), "shared head": Replicate(),
}  # fmt: skip
"""Placement of a linear's bias, by the linear's role."""

storage_of: Callable[[Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]


def _registered(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """Returns the parameter that a module gets instead of `parameter`, or None for `parameter` itself.

    Called by torch for every registration of a parameter.
    """
    place = place_of(module)
    if place is None or _is_shard(parameter):
        return None
    sharding, old = place.sharding, module._parameters.get(name)
    layout = place.layouts.get(name)
    if layout is None and name == "bias" and place.role in BIASES and isinstance(module, nn.Linear):
        layout = BIASES[place.role], torch.Size([module.out_features])
    if layout is None:
        if place.part == "none":
            return None
        raise unknown(place.name, module, f"it has no parameter {name!r} to assign")
    placement, shape = layout
    full_tensor = parameter.detach().contiguous()  # FSDP takes no other shards
    if place.role == "experts" and name == PAIRED and full_tensor.ndim < len(shape):
        full_tensor = gates_and_ups(module, full_tensor)
    if full_tensor.shape != shape:
        why = f"its {name} must be the full tensor {list(shape)}, got {list(parameter.shape)}"
        raise unknown(place.name, module, why)
    if name == "weight" and sharding.are_tied and place.role in ("embedding", "head"):
        why = "embedding and lm_head are tied: assign their weight with load_state_dict"
        raise unknown(place.name, module, why)
    if isinstance(old, DTensor) and old.device_mesh.ndim > 1:
        why = f"its {name} is sharded along a second mesh dimension, too: assign it with load_state_dict"
        raise unknown(place.name, module, why)
    if name == "weight" and isinstance(module, KeptLinear):
        raise unknown(place.name, module, "its weight is kept in 8 bits and cannot be assigned")
    if name not in place.layouts:
        place.layouts[name] = layout
        sharding.changes += 1
    sharded = distribute_tensor(full_tensor, sharding.mesh, [placement], src_data_rank=None)
    sharding.assigned.append((f"{place.name}.{name}", _summary(parameter)))
    new = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))  # attributes, such as transformers' mark of initialized parameters
    return new


def _is_shard(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) or any(hasattr(parameter, mark) for mark in SHARDS)


def _summary(parameter: Tensor) -> str:
    """Returns shape and dtype, and on CPUs, where ranks compare it, a digest of the values."""
    digest = f", digest {digest_of(parameter)}" if parameter.device.type == "cpu" else ""
    return f"{list(parameter.shape)} {parameter.dtype}{digest}"


class WatchParameters:
    """Pre-forward hook of a model or decoder: refuses parameters that bypassed `_registered`.

    Does nothing while torch.compile traces.

    Args:
        sharding: State of the parallelized model.
        decoder: Submodule that is skipped because it has its own hook; None: check all modules.
    """

    def __init__(self, sharding: Any, decoder: nn.Module | None = None):
        self.sharding, self.decoder = sharding, decoder
        self.changes = -1
        self.slots: list[tuple[dict[str, Any], str]] = []
        self.owners: list[tuple[nn.Module, Place]] = []
        self.known: list[Any] = []
        self.storages: list[int] = []
        self.locals: list[Any] = []

    def __reduce__(self) -> Any:
        """Returns a new hook without recorded parameters: a copied model records its own."""
        return WatchParameters, (self.sharding, self.decoder)

    def __call__(self, model: nn.Module, _: tuple[Any, ...]) -> None:
        """Checks the parameters before the forward pass. Called by torch.

        It takes 30 us for 100 unchanged parameters.
        """
        if torch.compiler.is_compiling():
            return
        if self.changes != self.sharding.changes:
            self._list(model)
        now = [parameters.get(name) for parameters, name in self.slots]
        if not all(map(is_, now, self.known)) or list(map(_storage, now)) != self.storages:
            for i, parameter in enumerate(now):
                self._check(i, parameter)

    def _list(self, model: nn.Module) -> None:
        before = {
            (id(module), name): (parameter, storage, local)
            for (module, _), (_, name), parameter, storage, local in zip(
                self.owners, self.slots, self.known, self.storages, self.locals, strict=True
            )
        }
        self.slots, self.owners = [], []
        for module, place in placed(model, self.decoder):
            for name in place.layouts:
                self.slots.append((module._parameters, name))
                self.owners.append((module, place))
        kept = [
            before.get((id(module), name), (None, 0, None))
            for (module, _), (_, name) in zip(self.owners, self.slots, strict=True)
        ]
        self.known = [parameter for parameter, _, _ in kept]
        self.storages = [storage for _, storage, _ in kept]
        self.locals = [local for _, _, local in kept]
        self.changes = self.sharding.changes

    def _check(self, i: int, parameter: Any) -> None:
        (module, place), (_, name) = self.owners[i], self.slots[i]
        local, storage = getattr(parameter, "_local_tensor", None), _storage(parameter)
        is_unchanged = parameter is self.known[i] and local is self.locals[i]
        if is_unchanged and storage != self.storages[i] or not is_unchanged and _has_memory(parameter):
            why = (
                f"its {name}.data was assigned, which a DTensor ignores: assign an nn.Parameter of the full "
                f"tensor, or copy into the parameter"
            )
            refuse(module, place, why)
            return
        placement, shape = place.layouts[name]
        if isinstance(parameter, DTensor):
            if parameter.shape != shape or (
                parameter.device_mesh.ndim == 1 and parameter.placements != (placement,)
            ):
                actual = f"{list(parameter.shape)} {parameter.placements}"
                refuse(module, place, f"its {name} must be {list(shape)} ({placement},), got {actual}")
                return
        elif parameter is not None and not _is_shard(parameter):
            why = f"its {name} is an unsharded tensor in module._parameters: assign it to the module"
            refuse(module, place, why)
            return
        self.known[i], self.storages[i], self.locals[i] = parameter, storage, local


def record_parameters(model: nn.Module) -> None:
    """Records the parameters of a model as those with which `WatchParameters` compares later ones."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WatchParameters):
                hook(module, ())


def watch_prompts(holder: nn.Module) -> None:
    """Makes a `PeftModel` refuse to train prompts together with parameters of its parallelized model."""
    holder.register_forward_pre_hook(_check_prompts)


def _check_prompts(holder: Any, _: tuple[Any, ...]) -> None:
    """Raises if prompts and DTensors are trained: torch's clipping and optimizers do not mix them."""
    prompts = getattr(holder, "prompt_encoder", None)
    if prompts is None or not any(parameter.requires_grad for parameter in prompts.parameters()):
        return
    for name, parameter in holder.base_model.named_parameters():
        if parameter.requires_grad and isinstance(parameter, DTensor):
            why = f"prompts are unsharded and cannot be trained together with {name!r}: freeze one of them"
            raise unknown("prompt_encoder", prompts, why)


def _storage(parameter: Any) -> int:
    return 0 if parameter is None else storage_of(parameter)


def _has_memory(parameter: Any) -> bool:
    """Returns whether a DTensor has memory besides its local tensor: an assignment of `.data` provides it."""
    if not isinstance(parameter, DTensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return parameter.untyped_storage().data_ptr() != 0
        except RuntimeError:  # a wrapper's storage has no pointer
            return False


register_module_parameter_registration_hook(_registered)
