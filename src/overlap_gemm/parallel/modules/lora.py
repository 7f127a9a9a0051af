"""peft's LoRA of the linears of a parallelized model. Imported where peft is in use only.

Of `y = x W^T + s (x A^T) B^T` the half that has W's sharded dimension is cut as W is, and carried out by the
same op; the other is on every rank:

    column   h = x_rows A^T on this rank's rows, B [N/P, r]: all_gather_gemm(h, B); or gemms, where x is whole
    row      A [r, K/P]: gemm_reduce_scatter(x, A), then B on this rank's rows; or gemm_all_reduce

so that what travels is r wide. Where the whole half sees this rank's rows only, its gradient is summed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...api.linears import whole_of
from ...nn import Dropout
from ..assignment import UnknownModuleError
from ..places import PLACE, Place, layouts_of, place_of
from .kept_linears import KeptLinear
from .layouts import distribute
from .parts import SEQUENCE_DIM, GradientAsContiguous, PackedLinear, ReplicatedForward
from .styles import ColwiseForward, OverlapColwiseParallel, OverlapSharedGather

INITS = (True, False, "gaussian")
"""`init_lora_weights` that do without the base's weight."""


class ShardedLora(Linear):
    """`peft.tuners.lora.layer.Linear` around a linear of a parallelized model."""

    def _get_in_out_features(self, module: nn.Module) -> Any:
        """The whole linear's: adapters are drawn whole, as without parallelism, then cut."""
        return module.in_features, module.out_features

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Called by peft for each new adapter."""
        variant = self.resolve_lora_variant(config=config)
        if variant is not None:
            _refuse(self, f"{type(variant).__name__.removesuffix('LinearVariant')} is not carried, LoRA is")
        if config.init_lora_weights not in INITS:
            _refuse(self, f"init_lora_weights={config.init_lora_weights!r} needs the whole weight")
        if kwargs.get("tied_adapter"):
            _refuse(self, "tied adapters are not carried")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        if isinstance(self.get_base_layer(), PackedLinear):  # of which peft cannot see where it is
            part: Any = next(iter(self.get_base_layer().children()))
            dtype = getattr(part, "compute_dtype", part.weight.dtype)
            for halves in (self.lora_A, self.lora_B):
                halves[adapter_name].to(part.weight.device, dtype)
        _shard(self, adapter_name)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """peft's, which gives the adapters what it gives the linear: of a shared gather this rank's rows."""
        forward = _linears(self.get_base_layer())[0].forward
        if isinstance(forward, ColwiseForward):
            x = forward.own_rows(x)
        return super().forward(x, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """peft's, of this rank's parts: what it does to the weight needs no other rank's."""
        with _as_local(self):
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)

    def unmerge(self) -> None:
        """peft's, of this rank's parts."""
        with _as_local(self):
            super().unmerge()


def take_over(layer: Any, base: nn.Module) -> None:
    """Makes a `ShardedLora` of peft's layer, whether it has adapters already or not.

    Args:
        layer: peft's, around `base`.
        base: A linear of a parallelized model.
    """
    layer.__class__ = ShardedLora
    for hook in base._forward_pre_hooks.values():
        if isinstance(hook, GradientAsContiguous):  # what the adapter adds to the gradient must not undo it
            layer.register_forward_pre_hook(hook)
    for name in layer.__dict__.get("r", ()):
        _shard(layer, name)


@contextmanager
def _as_local(layer: Any) -> Iterator[None]:
    """Within the block parameters are this rank's part. A DTensor's own `.data = ` would change nothing.

    Weights kept in 8 bits are of the model's dtype there, and stay so if an adapter has been merged.
    """
    swapped: list[tuple[nn.Module, str, list[Tensor]]] = []
    for module in (layer.get_base_layer(), *layer.lora_A.values(), *layer.lora_B.values()):
        for key in ("weight", "bias"):
            linears = _linears(module)
            if isinstance(getattr(linears[0], key), DTensor):
                swapped.append((module, key, [_own(linear, key) for linear in linears]))
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


def _own(linear: Any, key: str) -> Tensor:
    if key == "weight" and isinstance(linear, KeptLinear):
        return linear.dequantized()
    own: Tensor = getattr(linear, key).to_local().detach()
    return own


def _shard(layer: Any, name: str) -> None:
    base = layer.get_base_layer()
    place = place_of(base)
    assert place is not None
    sharding, first = place.sharding, _linears(base)[0].forward
    style = first.style.in_own_type()
    is_row = place.role in ("row", "shared row")
    by_rows = sharding.sequence_parallel and place.role in ("column", "packed", "row")
    if isinstance(base, PackedLinear):
        layer.lora_B[name] = PackedUp(layer.lora_B[name], base.sizes)
    down, up = layer.lora_A[name], layer.lora_B[name]
    cut, whole = (down, up) if is_row else (up, down)
    if by_rows and not is_row:
        rows, told = first.total_rows, style.told
        style = OverlapColwiseParallel(input_layouts=Shard(SEQUENCE_DIM), rows=rows, **told)
        if isinstance(up, PackedUp):
            style = OverlapColwiseParallel(**told)
            shared = OverlapSharedGather(
                *up.sizes, input_layouts=Shard(SEQUENCE_DIM), argument="x", rows=rows, **told
            )
    for linear in _linears(cut):
        style._apply(linear, sharding.mesh)
    if isinstance(up, PackedUp) and by_rows:
        shared._apply(up, sharding.mesh)
    distribute(whole, sharding.mesh, {"weight": Replicate(), "bias": Replicate()})
    whole.forward = ReplicatedForward(whole, sharding.group if by_rows else None)
    for half in (*_linears(cut), whole):
        vars(half)[PLACE] = Place(
            f"{place.name}.{name}", None, "all", sharding, vars(half)["forward"], layouts=layouts_of(half)
        )
    sharding.changes += 1
    _draw_apart(layer, name, place, per_rank=by_rows or is_row)


class PackedUp(PackedLinear):
    """B of a packed linear's adapter, in parts as the linear is; in state dicts one, as in peft's files."""

    def __init__(self, linear: nn.Linear, sizes: dict[str, int]):
        super().__init__(linear, sizes)
        self.register_parameter("weight", None)

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The whole weight, and bias. Collective: a rank's parts are several ranges of it."""
        destination = {} if destination is None else destination
        for key in ("weight", "bias"):
            parts = [getattr(part, key) for part in self.children()]
            if parts[0] is not None:
                whole = torch.cat([whole_of(part) for part in parts])
                destination[prefix + key] = whole if keep_vars else whole.detach()
        return destination


def _linears(module: Any) -> list[Any]:
    """A packed linear's parts; another linear itself."""
    return list(module.children()) if isinstance(module, PackedLinear) else [module]


def _draw_apart(layer: Any, name: str, place: Place, per_rank: bool) -> None:
    """Gives dropout, where there is some, the right random numbers: x may be whole, or this rank's part."""
    old = layer.lora_dropout[name]
    if isinstance(old, nn.Dropout) and old.p:
        new = Dropout(old.p, per_rank=per_rank, tp_group=place.sharding.mesh)
        layer.lora_dropout[name] = new.train(old.training)
        place.sharding.replicated_dropout |= not per_rank


def _refuse(layer: Any, why: str) -> None:
    place = place_of(layer.get_base_layer())
    assert place is not None
    raise UnknownModuleError(f"parallelize has no rule for {place.name!r}: {why}")
