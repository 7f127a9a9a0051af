"""peft's LoRA of the linears of a parallelized model. Imported only where peft is in use.

In `y = x W^T + s (x A^T) B^T` one of A and B has W's sharded dimension. It is sharded as W is and computed by
the same op; every rank has the other one in full:

    column   h = x_rows A^T on this rank's rows, B [N/P, r]: all_gather_gemm(h, B); without a gather if x is
    replicated
    row      A [r, K/P]: gemm_reduce_scatter(x, A), then B on this rank's rows; or gemm_all_reduce

So the communicated tensors are r wide. If the full matrix multiplies this rank's rows only, its gradient is
summed over the ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...api.linears import gather_dtensor
from ...nn import Dropout
from ..assignment import UnknownModuleError
from ..places import PLACE, Place, layouts_of, place_of
from .kept_linears import KeptLinear
from .layouts import distribute
from .parts import SEQUENCE_DIM, GradientAsContiguous, PackedLinear, ReplicatedForward
from .styles import ColwiseForward, OverlapColwiseParallel, OverlapSharedGather

INITS = (True, False, "gaussian")
"""Values of `init_lora_weights` that do not need the weight of the base."""


class ShardedLoraLinear(Linear):
    """`peft.tuners.lora.layer.Linear` around a linear of a parallelized model.

    peft recognizes an adapted linear ("all-linear") by `Linear` in the name of its class.
    """

    def _get_in_out_features(self, module: nn.Module) -> Any:
        """Returns the full linear's features.

        Adapters are drawn in full, as without parallelism, then sharded.
        """
        return module.in_features, module.out_features

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Adds an adapter and shards it. Called by peft."""
        variant = self.resolve_lora_variant(config=config)
        if variant is not None:
            _refuse(self, f"{type(variant).__name__.removesuffix('LinearVariant')} is not supported; LoRA is")
        if config.init_lora_weights not in INITS:
            _refuse(self, f"init_lora_weights={config.init_lora_weights!r} needs the full weight")
        if kwargs.get("tied_adapter"):
            _refuse(self, "tied adapters are not supported")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        if isinstance(
            self.get_base_layer(), PackedLinear
        ):  # it has no weight from which peft could take device and dtype
            part: Any = next(iter(self.get_base_layer().children()))
            dtype = getattr(part, "compute_dtype", part.weight.dtype)
            for halves in (self.lora_A, self.lora_B):
                halves[adapter_name].to(part.weight.device, dtype)
        _shard(self, adapter_name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs peft's forward, which passes one x to adapters and linear.

        In a shared gather, x is replaced by this rank's rows.
        """
        forward = _linears(self.get_base_layer())[0].forward
        if isinstance(forward, ColwiseForward):
            x = forward.local_rows(x)
        return super().forward(x, *args, **kwargs)

    def enable_adapters(self, enabled: bool) -> None:
        """Unmerges disabled adapters now: peft would do it in forward, after a shared product."""
        if not enabled and self.merged:
            self.unmerge()
        super().enable_adapters(enabled)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merges this rank's parts, as peft does; no communication is needed."""
        with _as_local(self):
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)

    def unmerge(self) -> None:
        """Reverts `merge` on this rank's parts."""
        with _as_local(self):
            super().unmerge()


def take_over(layer: Any, base: nn.Module) -> None:
    """Converts a LoRA layer of peft's to a `ShardedLoraLinear`, with or without adapters.

    Args:
        layer: Layer of peft's around `base`.
        base: Linear of a parallelized model.
    """
    layer.__class__ = ShardedLoraLinear
    for hook in base._forward_pre_hooks.values():
        if isinstance(hook, GradientAsContiguous):  # the adapter adds its gradient after the base's hook
            layer.register_forward_pre_hook(hook)
    for name in layer.__dict__.get("r", ()):
        _shard(layer, name)


@contextmanager
def _as_local(layer: Any) -> Iterator[None]:
    """Replaces parameters by this rank's parts within the block.

    peft assigns `.data`, which on a DTensor would change nothing. Weights kept in 8 bits have the model's
    dtype within the block, and keep it if an adapter was merged.
    """
    if any(isinstance(each, DTensor) and each.device_mesh.ndim > 1 for each in layer.parameters()):
        _refuse(
            layer, "FSDP has sharded its adapters, too: save them, and merge them in a model without FSDP"
        )
    swapped: list[tuple[nn.Module, str, list[Tensor]]] = []
    for module in (layer.get_base_layer(), *layer.lora_A.values(), *layer.lora_B.values()):
        for key in ("weight", "bias"):
            linears = _linears(module)
            if isinstance(getattr(linears[0], key), DTensor):
                swapped.append((module, key, [_local_detached(linear, key) for linear in linears]))
    before = [(module, dict(module._parameters)) for module, _, _ in swapped]
    merged = list(layer.merged_adapters)
    for module, key, parts in swapped:
        module._parameters[key] = nn.Parameter(torch.cat(parts), requires_grad=False)
    try:
        yield
    finally:
        for module, key, parts in swapped:
            new = module._parameters[key]
            assert new is not None
            for part, rows in zip(parts, new.detach().split([len(part) for part in parts]), strict=True):
                part.copy_(rows)
        for module, parameters in before:
            module._parameters.clear()
            module._parameters.update(parameters)
        if layer.merged_adapters != merged:
            for module, key, parts in swapped:
                for linear, part in zip(_linears(module), parts, strict=True):
                    if key == "weight" and isinstance(linear, KeptLinear):
                        linear.become_plain(part)


def _local_detached(linear: Any, key: str) -> Tensor:
    if key == "weight" and isinstance(linear, KeptLinear):
        return linear.dequantized()
    values: Tensor = getattr(linear, key).to_local().detach()
    return values


def _shard(layer: Any, name: str) -> None:
    base = layer.get_base_layer()
    place = place_of(base)
    assert place is not None
    sharding, first = place.sharding, _linears(base)[0].forward
    style = first.style.without_float8()
    is_row = place.role in ("row", "shared row")
    by_rows = sharding.sequence_parallel and place.role in ("column", "packed", "row")
    if isinstance(base, PackedLinear):
        layer.lora_B[name] = PackedUp(layer.lora_B[name], base.sizes)
    down, up = layer.lora_A[name], layer.lora_B[name]
    sharded, replicated = (down, up) if is_row else (up, down)
    if by_rows and not is_row:
        rows, keywords = first.total_rows, style.keywords
        style = OverlapColwiseParallel(input_layouts=Shard(SEQUENCE_DIM), rows=rows, **keywords)
        if isinstance(up, PackedUp):
            style = OverlapColwiseParallel(**keywords)
            shared = OverlapSharedGather(
                *up.sizes, input_layouts=Shard(SEQUENCE_DIM), argument="x", rows=rows, **keywords
            )
    for linear in _linears(sharded):
        style._apply(linear, sharding.mesh)
    if isinstance(up, PackedUp) and by_rows:
        shared._apply(up, sharding.mesh)
    distribute(replicated, sharding.mesh, {"weight": Replicate(), "bias": Replicate()})
    replicated.forward = ReplicatedForward(replicated, sharding.group if by_rows else None)
    for half in (*_linears(sharded), replicated):
        vars(half)[PLACE] = Place(
            f"{place.name}.{name}", None, "all", sharding, vars(half)["forward"], layouts=layouts_of(half)
        )
    sharding.changes += 1
    _replace_dropout(layer, name, place, per_rank=by_rows or is_row)


class PackedUp(PackedLinear):
    """B of a packed linear's adapter, in the linear's parts.

    In state dicts it is one tensor, as in peft's files.
    """

    def __init__(self, linear: nn.Linear, sizes: dict[str, int]):
        super().__init__(linear, sizes)
        self.register_parameter("weight", None)

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Returns full weight and bias. Collective: a rank's parts are several ranges of their rows."""
        destination = {} if destination is None else destination
        for key in ("weight", "bias"):
            parts = [getattr(part, key) for part in self.children()]
            if parts[0] is not None:
                full = torch.cat([gather_dtensor(part) for part in parts])
                destination[prefix + key] = full if keep_vars else full.detach()
        return destination


def _linears(module: Any) -> list[Any]:
    """Returns the parts of a packed linear, or a list of the linear itself."""
    return list(module.children()) if isinstance(module, PackedLinear) else [module]


def _replace_dropout(layer: Any, name: str, place: Place, per_rank: bool) -> None:
    """Replaces a dropout by one whose random numbers fit x: per rank if x is sharded, otherwise equal."""
    old = layer.lora_dropout[name]
    if isinstance(old, nn.Dropout) and old.p:
        new = Dropout(old.p, per_rank=per_rank, tp_group=place.sharding.mesh)
        layer.lora_dropout[name] = new.train(old.training)
        place.sharding.replicated_dropout |= not per_rank


def _refuse(layer: Any, why: str) -> None:
    place = place_of(layer.get_base_layer())
    assert place is not None
    raise UnknownModuleError(f"parallelize has no rule for {place.name!r}: {why}")
