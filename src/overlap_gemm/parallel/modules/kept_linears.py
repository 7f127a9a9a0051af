"""Linears of a parallelized model whose weights are kept in 8 bits, as their checkpoint stores them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from ...api.kept_weights import Stored
from ...spec.sharding import ceil_div
from ..places import set_layout
from .layouts import as_output, local, lying_as
from .parts import PackedLinear

SCALES = ("weight_scale", "input_scale")
"""Parameters of a `KeptLinear` besides weight and bias."""

KEPT_AS = "_overlap_gemm_kept_as"
"""Attribute of linears that have been `KeptLinear`s: how they were."""

_INTEGERS = {1: torch.uint8, 4: torch.int32}
"""By bytes an element."""


class KeptLinear(nn.Linear):
    """A linear with a frozen weight of 8 bits; `stored.keep` makes it of an `nn.Linear`, and its parameters.

    Attributes:
        weight_scale: Of the weight, float32: `[N, 1]`, `[1, 1]` or of blocks.
        input_scale: Of what it is multiplied with, `[1, 1]`; None: each row has its own, at each call.
        block: Rows and columns that share a scale; None: scales are of rows, or of the weight.
        rows: Rows that this rank multiplies of a weight that every rank has whole, since shards of it would
            cut blocks, or since ranks share heads; None: all rows of this rank's part.
        compute_dtype: The model's dtype, in which adapters are made (peft asks) and weights dequantised.
        files: Name and tensor (without memory) of each scale in the checkpoint, by its name here.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    input_scale: nn.Parameter | None
    block: int | None
    rows: range | None
    compute_dtype: torch.dtype
    files: dict[str, tuple[str, Tensor]]

    def stored(self, layout: Placement) -> Stored:
        """Returns this rank's part of the weight."""
        scales = (getattr(self, name, None) for name in SCALES)
        scale, given = (part.to_local() if isinstance(part, DTensor) else part for part in scales)
        assert scale is not None
        if self.rows is None:
            return Stored(local(self.weight, layout), scale, given, self.block)
        weight: Any = self.weight
        start, stop, each = self.rows.start, self.rows.stop, self.block or 1
        if len(scale) > 1:
            scale = scale[start // each : ceil_div(stop, each)]
        return Stored(local(weight, weight.placements[-1])[start:stop], scale, given, self.block)

    def dequantized(self) -> Tensor:
        """Returns this rank's part of the weight in the model's dtype."""
        weight: Any = self.weight
        with torch.no_grad():
            return self.stored(weight.placements[-1]).dequantized(self.compute_dtype)

    def become_plain(self, own: Tensor) -> None:
        """Makes the linear one whose weight is of the model's dtype.

        Args:
            own: This rank's part of the weight.
        """
        weight: Any = self.weight
        scales = {name: self._parameters.pop(name, None) for name in SCALES}
        layout = lying_as(weight, weight.to_local().to("meta"))
        kept_as = KeptAs(self.block, self.rows, self.files, layout, scales)
        for name in ("block", "rows", "compute_dtype", "files"):
            delattr(self, name)
        self.__class__ = nn.Linear  # type: ignore[assignment]
        plain: Any = lying_as(weight, own) if kept_as.rows is None else _sharded_by_rows(weight, own)
        set_layout(self, "weight", plain)
        setattr(self, KEPT_AS, kept_as)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Called by torch for `.to`, `.float()` and others: bits are moved, and cast to no other dtype."""
        kept = {name: self._parameters.pop(name) for name in ("weight", *SCALES) if name in self._parameters}
        super()._apply(fn, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        for name, parameter in kept.items():
            self._parameters[name] = None if parameter is None else _moved(parameter, fn)
        return self


@dataclass(frozen=True)
class KeptAs:
    """How a linear was kept before adapters were merged into it.

    Attributes:
        block: As of `KeptLinear`.
        rows: The same.
        files: The same.
        weight: Layout and dtype of the weight as it was, without memory.
        scales: Its scales.
    """

    block: int | None
    rows: range | None
    files: dict[str, tuple[str, Tensor]]
    weight: DTensor
    scales: dict[str, Any]


def requantize(model: nn.Module) -> dict[str, float]:
    """Puts linears into which adapters have been merged back into the 8 bits of their checkpoint. Collective.

    `save_pretrained` then writes the checkpoint's form again. Scales are computed anew, from the largest
    element of each tensor, row or block; scales of activations stay the checkpoint's. Bits are lost: an
    update smaller than half a step of its element is rounded away.

    Args:
        model: What `merge_and_unload` returned of a model kept in 8 bits.

    Returns:
        Relative error (Frobenius norm, over all ranks) of each linear that was requantised, by its name.

    Raises:
        ValueError: Nothing has been merged into linears kept in 8 bits.
    """
    linears = {name: module for name, module in model.named_modules() if KEPT_AS in vars(module)}
    if not linears:
        raise ValueError("requantize: the model has no linear that was kept in 8 bits before a merge")
    groups: dict[str, list[str]] = {}  # parts of a packed linear of one tensor's scale share it in the file
    for name, linear in linears.items():
        packed = name.rpartition(".")[0]
        is_one = vars(linear)[KEPT_AS].scales["weight_scale"].numel() == 1
        is_part = is_one and isinstance(model.get_submodule(packed), PackedLinear)
        groups.setdefault(packed if is_part else name, []).append(name)
    errors = {}
    for names in groups.values():
        largest = [_largest(linears[name]) for name in names]
        shared = largest[0] if len(names) == 1 else torch.stack(largest).amax(0)
        errors.update({name: _keep_again(linears[name], shared) for name in names})
    return errors


def _largest(linear: Any) -> Tensor:
    """The largest element of each tensor, row or block of a linear, over the ranks that share it."""
    kept_as: KeptAs = vars(linear)[KEPT_AS]
    own, scale = _to_quantize(linear, kept_as), kept_as.scales["weight_scale"]
    if kept_as.block is not None:
        rows, columns = (-size % kept_as.block for size in own.shape)
        padded = nn.functional.pad(own, (0, columns, 0, rows))
        blocks = padded.unflatten(1, (-1, kept_as.block)).unflatten(0, (-1, kept_as.block))
        return blocks.abs().amax((1, 3))
    largest = own.abs().amax().view(1, 1) if scale.numel() == 1 else own.abs().amax(1, keepdim=True)
    if scale.numel() == 1 or kept_as.weight.placements[-1] != Shard(0):
        dist.all_reduce(largest, dist.ReduceOp.MAX, kept_as.weight.device_mesh.get_group())
    return largest


def _to_quantize(linear: Any, kept_as: KeptAs) -> Tensor:
    """What this rank quantises of a weight, in float32: its part, or all where every rank keeps all."""
    weight: Any = linear.weight.detach()
    own: Tensor = weight.to_local() if kept_as.rows is None else weight.full_tensor()
    return own.float()


def _sharded_by_rows(full: DTensor, own: Tensor) -> Tensor:
    return as_output(own, full.shape, full.device_mesh, Shard(0), use_local_output=False)


def _keep_again(linear: Any, largest: Tensor) -> float:
    kept_as: KeptAs = getattr(linear, KEPT_AS)
    delattr(linear, KEPT_AS)
    own, old = _to_quantize(linear, kept_as), kept_as.scales["weight_scale"]
    limit = torch.finfo(kept_as.weight.dtype).max
    scale = torch.where(largest > 0, largest / limit, torch.ones_like(largest))
    dtype = kept_as.files["weight_scale"][1].dtype
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = torch.exp2(torch.log2(scale).ceil())
    else:
        scale = scale.to(dtype).float()  # as the file will have it
    every = Stored(own, scale, block=kept_as.block).spread_scale()
    values = (own / every).clamp(-limit, limit).to(kept_as.weight.dtype)
    squares = torch.stack([(values.float() * every - own).square().sum(), own.square().sum()])
    if kept_as.rows is None:
        dist.all_reduce(squares, group=kept_as.weight.device_mesh.get_group())
    compute_dtype = linear.weight.dtype
    linear.__class__ = KeptLinear
    linear.block, linear.rows, linear.files = kept_as.block, kept_as.rows, kept_as.files
    linear.compute_dtype = compute_dtype
    set_layout(linear, "weight", lying_as(kept_as.weight, values))
    linear.register_parameter("weight_scale", nn.Parameter(lying_as(old, scale), requires_grad=False))
    linear.register_parameter("input_scale", kept_as.scales["input_scale"])
    return float((squares[0] / squares[1]).sqrt())


def _moved(parameter: Any, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    moved = fn(own.view(_INTEGERS[own.element_size()])).view(own.dtype)
    if isinstance(parameter, DTensor):
        moved = lying_as(parameter, moved)
    return nn.Parameter(moved, requires_grad=False)


def weight_of(module: Any, layout: Placement) -> Any:
    """Returns this rank's part of a linear's weight, `Stored` where it is kept in 8 bits."""
    return module.stored(layout) if isinstance(module, KeptLinear) else local(module.weight, layout)
