"""Linears of a parallelized model whose weights stay in 8 bits, as their checkpoint stores them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from ...api.kept_weights import Stored
from ...spec.sharding import ceil_div
from ..places import set_parameter
from .layouts import as_output, local, with_layout_of
from .parts import PackedLinear

SCALES = ("weight_scale", "input_scale")
"""Parameters of a `KeptLinear` in addition to weight and bias."""

KEPT_AS = "_overlap_gemm_kept_as"
"""Attribute of linears that were `KeptLinear`s before a merge; its value is a `KeptAs`."""

_INTEGERS = {1: torch.uint8, 4: torch.int32}
"""Integer dtype by the number of bytes of an element."""


class KeptLinear(nn.Linear):
    """Linear with a frozen 8-bit weight. `stored.keep` converts an `nn.Linear` to it.

    Attributes:
        weight_scale: Scales of the weight, float32: `[N, 1]`, `[1, 1]`, or one for each block.
        input_scale: Scale of the input, `[1, 1]`; None: each row is scaled at each call.
        block: Rows and columns that share a scale; None: scales are per row or per tensor.
        rows: Rows that this rank multiplies of a full weight that every rank has. The weight is not sharded
            because shards would split blocks, or because ranks share heads. None: the weight is this rank's
            shard.
        compute_dtype: dtype of the model, in which adapters are made (peft reads it) and weights dequantized.
        files: Stored name and meta tensor of each scale in the checkpoint, by the scale's name here.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    input_scale: nn.Parameter | None
    block: int | None
    rows: range | None
    compute_dtype: torch.dtype
    files: dict[str, tuple[str, Tensor]]

    def stored(self, layout: Placement) -> Stored:
        """Returns this rank's part of the weight, in 8 bits with scales."""
        scales = (getattr(self, name, None) for name in SCALES)
        scale, input_scale = (part.to_local() if isinstance(part, DTensor) else part for part in scales)
        assert scale is not None
        if self.rows is None:
            return Stored(local(self.weight, layout), scale, input_scale, self.block)
        weight: Any = self.weight
        start, stop, rows_per_scale = self.rows.start, self.rows.stop, self.block or 1
        if len(scale) > 1:
            scale = scale[start // rows_per_scale : ceil_div(stop, rows_per_scale)]
        return Stored(local(weight, weight.placements[-1])[start:stop], scale, input_scale, self.block)

    def dequantized(self) -> Tensor:
        """Returns this rank's part of the weight in the model's dtype."""
        weight: Any = self.weight
        with torch.no_grad():
            return self.stored(weight.placements[-1]).dequantized(self.compute_dtype)

    def become_plain(self, part: Tensor) -> None:
        """Converts the linear to an `nn.Linear` with a weight in the model's dtype.

        Args:
            part: This rank's part of the weight.
        """
        weight: Any = self.weight
        scales = {name: self._parameters.pop(name, None) for name in SCALES}
        layout = with_layout_of(weight, weight.to_local().to("meta"))
        kept_as = KeptAs(self.block, self.rows, self.files, layout, scales)
        for name in ("block", "rows", "compute_dtype", "files"):
            delattr(self, name)
        self.__class__ = nn.Linear  # type: ignore[assignment]
        plain: Any = with_layout_of(weight, part) if kept_as.rows is None else _sharded_by_rows(weight, part)
        set_parameter(self, "weight", plain)
        setattr(self, KEPT_AS, kept_as)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the bits without casting them, in `.to`, `.float()` and similar methods. Called by torch."""
        kept = {name: self._parameters.pop(name) for name in ("weight", *SCALES) if name in self._parameters}
        super()._apply(fn, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        for name, parameter in kept.items():
            self._parameters[name] = None if parameter is None else _moved(parameter, fn)
        return self


@dataclass(frozen=True)
class KeptAs:
    """Storage of a kept linear before adapters were merged into it.

    Attributes:
        block: `block` of the `KeptLinear`.
        rows: `rows` of the `KeptLinear`.
        files: `files` of the `KeptLinear`.
        weight: Meta tensor with the layout and dtype of the 8-bit weight.
        scales: Scales by their names in the `KeptLinear`.
    """

    block: int | None
    rows: range | None
    files: dict[str, tuple[str, Tensor]]
    weight: DTensor
    scales: dict[str, Any]


def requantize(model: nn.Module) -> dict[str, float]:
    """Converts linears with merged adapters back to their checkpoint's 8-bit format. Collective.

    `save_pretrained` then writes the checkpoint's format again. Scales are computed anew, from the largest
    element of each tensor, row or block; activation scales stay unchanged. Precision is lost: an update
    smaller than half a quantization step of its element is rounded away.

    Args:
        model: Model kept in 8 bits, after `merge_and_unload`.

    Returns:
        Relative error (Frobenius norm, over all ranks) of each requantized linear, by name.

    Raises:
        ValueError: No linear kept in 8 bits has merged adapters.
    """
    linears = {name: module for name, module in model.named_modules() if KEPT_AS in vars(module)}
    if not linears:
        raise ValueError("requantize: the model has no linear that was kept in 8 bits before a merge")
    groups: dict[str, list[str]] = {}  # parts of a packed linear share a per-tensor scale in the file
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
    """Returns the largest element of each tensor, row or block of a linear, over the ranks that share it."""
    kept_as: KeptAs = vars(linear)[KEPT_AS]
    values, scale = _to_quantize(linear, kept_as), kept_as.scales["weight_scale"]
    if kept_as.block is not None:
        rows, columns = (-size % kept_as.block for size in values.shape)
        padded = nn.functional.pad(values, (0, columns, 0, rows))
        blocks = padded.unflatten(1, (-1, kept_as.block)).unflatten(0, (-1, kept_as.block))
        return blocks.abs().amax((1, 3))
    largest = values.abs().amax().view(1, 1) if scale.numel() == 1 else values.abs().amax(1, keepdim=True)
    if scale.numel() == 1 or kept_as.weight.placements[-1] != Shard(0):
        dist.all_reduce(largest, dist.ReduceOp.MAX, kept_as.weight.device_mesh.get_group())
    return largest


def _to_quantize(linear: Any, kept_as: KeptAs) -> Tensor:
    """Returns the float32 values that this rank quantizes.

    They are its part of the weight, or the full weight if every rank keeps it.
    """
    weight: Any = linear.weight.detach()
    values: Tensor = weight.to_local() if kept_as.rows is None else weight.full_tensor()
    return values.float()


def _sharded_by_rows(full: DTensor, part: Tensor) -> Tensor:
    return as_output(part, full.shape, full.device_mesh, Shard(0), use_local_output=False)


def _keep_again(linear: Any, largest: Tensor) -> float:
    kept_as: KeptAs = getattr(linear, KEPT_AS)
    delattr(linear, KEPT_AS)
    values_f32, old = _to_quantize(linear, kept_as), kept_as.scales["weight_scale"]
    limit = torch.finfo(kept_as.weight.dtype).max
    scale = torch.where(largest > 0, largest / limit, torch.ones_like(largest))
    dtype = kept_as.files["weight_scale"][1].dtype
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = torch.exp2(torch.log2(scale).ceil())
    else:
        scale = scale.to(dtype).float()  # rounded as in the file
    spread_scale = Stored(values_f32, scale, block=kept_as.block).spread_scale()
    values = (values_f32 / spread_scale).clamp(-limit, limit).to(kept_as.weight.dtype)
    squares = torch.stack(
        [(values.float() * spread_scale - values_f32).square().sum(), values_f32.square().sum()]
    )
    if kept_as.rows is None:
        dist.all_reduce(squares, group=kept_as.weight.device_mesh.get_group())
    compute_dtype = linear.weight.dtype
    linear.__class__ = KeptLinear
    linear.block, linear.rows, linear.files = kept_as.block, kept_as.rows, kept_as.files
    linear.compute_dtype = compute_dtype
    set_parameter(linear, "weight", with_layout_of(kept_as.weight, values))
    linear.register_parameter("weight_scale", nn.Parameter(with_layout_of(old, scale), requires_grad=False))
    linear.register_parameter("input_scale", kept_as.scales["input_scale"])
    return float((squares[0] / squares[1]).sqrt())


def _moved(parameter: Any, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    moved = fn(part.view(_INTEGERS[part.element_size()])).view(part.dtype)
    if isinstance(parameter, DTensor):
        moved = with_layout_of(parameter, moved)
    return nn.Parameter(moved, requires_grad=False)


def weight_of(module: Any, layout: Placement) -> Any:
    """Returns this rank's part of a linear's weight; a `Stored` if it is kept in 8 bits."""
    return module.stored(layout) if isinstance(module, KeptLinear) else local(module.weight, layout)
