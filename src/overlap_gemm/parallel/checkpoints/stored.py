"""Checkpoints whose linears are stored in 8 bits: they are kept in 8 bits or dequantized.

All formats store `a.linear.weight` as e4m3. The names and shapes of the scales differ:

| quant_method | weight scales | a scale per | activation scale |
|---|---|---|---|
| "fp8" | weight_scale_inv | tensor, block | dynamic, or activation_scale |
| "compressed-tensors" | weight_scale | tensor, row, block | dynamic, or input_scale |
| "modelopt" (FP8) | weight_scale | tensor | input_scale |

Block scales are float32 or ue8m0 (possibly stored as bytes). The checkpoint's configuration gives the block
size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ...config.scale_blocks import PROMOTED
from ...spec.sharding import Shards
from ..modules.heads import SharedHeadForward
from ..modules.kept_linears import KeptLinear
from ..modules.layouts import with_layout_of
from ..modules.styles import ColwiseForward, RowwiseForward
from ..places import place_of, set_parameter

Quantized: TypeAlias = Literal["keep", "dequantize"]

E4M3 = torch.float8_e4m3fn
INPUT_SCALES = ("input_scale", "activation_scale")


class QuantizedCheckpointError(ValueError):
    """A checkpoint whose 8-bit format cannot be kept, or cannot be read; the message says what to do."""


@dataclass(frozen=True)
class Form:
    """Storage format of the linears of an 8-bit checkpoint.

    Attributes:
        method: `quant_method` of the checkpoint's configuration.
        scale: Name of a weight's scales, after the module's name.
        block: Rows and columns of the weight that share a scale; None: one scale for the tensor, or one a
            row.
        static: True if the file contains scales of activations.
    """

    method: str
    scale: str = "weight_scale"
    block: tuple[int, int] | None = None
    static: bool = False

    def __str__(self) -> str:
        blocks = "" if self.block is None else f", blocks of {self.block[0]} x {self.block[1]}"
        return f"{self.method} of 8 bits{blocks}"


def form_of(config: Any) -> Form | None:
    """Returns the 8-bit storage format of a model's checkpoint; None: it is not one of ours.

    Args:
        config: transformers' configuration of the model.

    Raises:
        QuantizedCheckpointError: The configuration mixes formats, or uses a format of its method that is not
            supported.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    settings: Mapping[str, Any] = quantization if isinstance(quantization, dict) else quantization.to_dict()
    match settings.get("quant_method"):
        case "fp8":
            block, static = settings.get("weight_block_size"), settings.get("activation_scheme") == "static"
            return Form("fp8", "weight_scale_inv", _pair(block), static)
        case "modelopt":
            settings = {**settings, **settings.get("quantization", {})}
            if settings.get("quant_algo") != "FP8":
                raise QuantizedCheckpointError(
                    f"modelopt: quant_algo must be 'FP8', got {settings.get('quant_algo')!r}"
                )
            return Form("modelopt", static=True)
        case "compressed-tensors":
            forms = {_of_group(group) for group in settings.get("config_groups", {}).values()}
            if len(forms) != 1:
                raise QuantizedCheckpointError(
                    f"compressed-tensors: all linears must have one format, this checkpoint has "
                    f"{len(forms)}: {', '.join(map(str, forms))}"
                )
            return forms.pop()
        case _:
            return None


def _of_group(group: Mapping[str, Any]) -> Form:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    if kind[:2] != ("float", 8) or kind[2] not in ("tensor", "channel", "block"):
        raise QuantizedCheckpointError(
            f"compressed-tensors: weights must be 8-bit floats by tensor, channel or block, got (type, "
            f"num_bits, strategy) = {kind}"
        )
    block = _pair(weights.get("block_structure")) if kind[2] == "block" else None
    return Form("compressed-tensors", block=block, static=bool(inputs) and inputs.get("dynamic") is False)


def _pair(block: Any) -> tuple[int, int] | None:
    return None if block is None else (int(block[0]), int(block[1]))


class Checkpoint:
    """Unread tensors of open files by name, and the 8-bit weights among them with their scales.

    Args:
        files: Open safetensors files.
        form: Storage format of the linears.
    """

    def __init__(self, files: list[Any], form: Form):
        self.form = form
        self._file_of = {key: file for file in files for key in file.keys()}  # noqa: SIM118 (no mapping)
        self.stored = [
            key.removesuffix(".weight")
            for key in self._file_of
            if key.endswith(".weight") and f"{key.removesuffix('weight')}{form.scale}" in self._file_of
        ]
        """Names of the modules whose weights are stored in 8 bits."""

    def unread(self, key: str) -> Any:
        """Returns a tensor of the files, unread."""
        return self._file_of[key].get_slice(key)

    def scale(self, name: str) -> Tensor:
        """Returns a module's scales in float32: `[1, 1]`, `[N, 1]`, or one for each block.

        Raises:
            QuantizedCheckpointError: The shape of the scales does not fit the weight.
        """
        key, (rows, columns) = f"{name}.{self.form.scale}", self.unread(f"{name}.weight").get_shape()
        scale = self._file_of[key].get_tensor(key)
        scale = (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
        if scale.numel() == 1:
            scale = scale.reshape(1, 1)
        if self.form.block is None:
            if scale.numel() == 1:
                return scale
            expected = [rows, 1]
            scale = scale.reshape(-1, 1) if scale.ndim == 1 else scale
        else:
            expected = [-(-rows // self.form.block[0]), -(-columns // self.form.block[1])]
        if list(scale.shape) != expected:
            raise QuantizedCheckpointError(
                f"{key} must be {expected} for a weight [{rows}, {columns}] of {self.form}, got "
                f"{list(scale.shape)}"
            )
        return scale

    def input_scale(self, name: str) -> Tensor | None:
        """Returns the scale of a module's input, `[1, 1]`, or None."""
        for key in (f"{name}.{last}" for last in INPUT_SCALES):
            if key in self._file_of:
                return self._file_of[key].get_tensor(key).float().reshape(1, 1)
        return None

    def files(self, name: str) -> dict[str, tuple[str, Tensor]]:
        """Returns stored name and meta tensor of each scale of a module, by its name in `KeptLinear`."""
        inputs = INPUT_SCALES if self.form.static else ()
        names = {"weight_scale": (self.form.scale,), "input_scale": inputs}
        return {
            local_name: (last, self._file_of[key].get_tensor(key).to("meta"))
            for local_name, stored_names in names.items()
            for last in stored_names
            if (key := f"{name}.{last}") in self._file_of
        }

    def plain(self) -> Iterator[str]:
        """Returns the names of the tensors that are neither 8-bit weights nor scales."""
        quantized = {
            f"{n}.{last}" for n in self.stored for last in ("weight", self.form.scale, *INPUT_SCALES)
        }
        return (key for key in self._file_of if key not in quantized)

    def dequantized(self, name: str) -> "Dequantized":
        """Returns a module's weight in float32, unread."""
        return Dequantized(self.unread(f"{name}.weight"), self.scale(name), self.form.block)


class Dequantized:
    """8-bit weight that reads as float32, slice by slice, as transformers' loader requests it.

    Args:
        values: safetensors slice of the 8-bit values.
        scale: Scales as `Checkpoint.scale` returns them.
        block: Rows and columns that share a scale; None: one scale for the tensor, or one a row.
    """

    def __init__(self, values: Any, scale: Tensor, block: tuple[int, int] | None):
        self.values, self.scale, self.block = values, scale, block

    def get_shape(self) -> list[int]:
        """Returns the shape, as a safetensors slice does."""
        shape: list[int] = self.values.get_shape()
        return shape

    def get_dtype(self) -> str:
        """Returns the dtype's name in safetensors."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Reads `...`, or one slice for each dimension."""
        index = (index,) if not isinstance(index, tuple) else index
        slices = (slice(None),) * 2 if index[0] is Ellipsis else (*index, slice(None))[:2]
        ranges = [range(size)[part] for size, part in zip(self.get_shape(), slices, strict=True)]
        values = self.values[slices].float()
        if self.scale.numel() == 1:
            return values * self.scale
        block = self.block or (1, self.get_shape()[1])
        rows, columns = (torch.tensor(indices) // size for indices, size in zip(ranges, block, strict=True))
        return values * self.scale[rows.long()][:, columns.long()]


class AlreadyRead:
    """A tensor in memory with the interface of a safetensors slice."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        """Returns the shape, as a safetensors slice does."""
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """Returns the dtype's name in safetensors."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Returns a part of the tensor."""
        return self.tensor[index]


def keep(model: nn.Module, name: str, checkpoint: Checkpoint, source: str) -> None:
    """Converts a linear of a parallelized model on the meta device to a `KeptLinear`.

    Args:
        model: Model.
        name: Name of the linear in the model.
        checkpoint: Checkpoint from which the linear will be read.
        source: Name of the linear in the checkpoint.

    Raises:
        QuantizedCheckpointError: No product of this library supports the linear's format.
    """
    module: Any = model.get_submodule(name)
    form = checkpoint.form
    why = _why_not_kept(module, form)
    if why is None and form.block is not None and name != source:
        why = "a packed projection must have scales of rows or of the tensor, not of blocks"
    if why is not None:
        raise QuantizedCheckpointError(
            f"{name!r} ({form}) cannot be kept in 8 bits: {why}. Use from_pretrained(..., "
            f"quantized='dequantize'), which converts it to the model's dtype"
        )
    rows = _replicated_rows(module, form)
    if rows is not None and module.weight.placements != (Replicate(),):
        full = torch.empty(module.weight.shape, dtype=module.weight.dtype, device="meta")
        set_parameter(module, "weight", distribute_tensor(full, module.weight.device_mesh, [Replicate()]))
    weight, scale = module.weight, checkpoint.scale(source)
    shape, (placement,) = (1, 1), weight.placements
    if scale.numel() > 1:
        shape = (len(weight), 1) if form.block is None else tuple(scale.shape)
    if placement != Shard(0) and form.block is None or scale.numel() == 1:
        placement = Replicate()
    module.__class__ = KeptLinear
    module.rows = rows
    module.block = None if form.block is None else form.block[1]
    module.compute_dtype = weight.dtype
    module.files = checkpoint.files(source)
    set_parameter(module, "weight", with_layout_of(weight, torch.empty_like(weight.to_local(), dtype=E4M3)))
    for scale_name, extents, layout in (
        ("weight_scale", shape, placement),
        ("input_scale", (1, 1), Replicate()),
    ):
        parameter = None
        if scale_name in module.files:
            empty = torch.empty(extents, device="meta")
            parameter = _frozen(distribute_tensor(empty, weight.device_mesh, [layout]))
        module.register_parameter(scale_name, parameter)


SHARED = (".k_proj", ".v_proj")
"""Name endings of linears of which every rank may keep the full weight, since they have few rows.

Other linears whose shards would split blocks are refused (`QuantizedCheckpointError`).
"""


def _why_not_kept(module: Any, form: Form) -> str | None:
    forward = vars(module).get("forward")
    if form.block is not None and (1, *form.block) not in PROMOTED:
        known = " or ".join(f"{rows} x {columns}" for _, rows, columns in PROMOTED)
        return f"the blocks must be {known}"
    if not isinstance(forward, (ColwiseForward, RowwiseForward)):
        return "only a linear sharded by output or input features can be kept"
    if form.block is None or _replicated_rows(module, form) is not None:
        return None
    by_depth = isinstance(forward, RowwiseForward)
    extent, block = module.in_features if by_depth else module.out_features, form.block[by_depth]
    ranks = forward.mesh.size()
    if _ends_on_borders(extent, block, ranks):
        return None
    most = max(p for p in range(1, ranks) if _ends_on_borders(extent, block, p))
    sizes = Shards.even(extent, ranks).sizes
    return f"its shards, {sizes}, do not end at multiples of the block, {block}; with P={most} they do"


def keeps_blocks(sizes: tuple[int, int, int, int], block: int, ranks: int) -> bool:
    """Returns whether a decoder's linears can be kept in square blocks on a number of ranks.

    Args:
        sizes: Number of query heads, width of a head, number of key/value heads, features of the MLP.
        block: Rows and columns that share a scale.
        ranks: Number of ranks P.
    """
    heads, width, kv_heads, features = sizes
    if heads % ranks or kv_heads % ranks and ranks % kv_heads:
        return False
    if not all(_ends_on_borders(extent, block, ranks) for extent in (heads * width, features)):
        return False
    return _have_one_start(kv_heads * width, width * max(kv_heads // ranks, 1), block)


def _ends_on_borders(extent: int, block: int, ranks: int) -> bool:
    cut = Shards.even(extent, ranks)
    return len(cut.sizes) == 1 or cut.chunk % block == 0


def _replicated_rows(module: Any, form: Form) -> range | None:
    """Returns the rows that this rank multiplies of a weight that every rank keeps in full.

    None: the weight is sharded. For k and v a rank's rows may lie within one block; the rank then uses that
    block's scale for all of them.
    """
    forward = vars(module).get("forward")
    if isinstance(forward, SharedHeadForward):
        rows = forward.rows()
        is_kept = form.block is None or _have_one_start(module.out_features, len(rows), form.block[0])
        return rows if is_kept else None
    place = place_of(module)
    if form.block is None or place is None or not place.name.endswith(SHARED):
        return None
    ranks, block = forward.mesh.size(), form.block[0]
    if _ends_on_borders(module.out_features, block, ranks) or module.out_features % ranks:
        return None
    size = module.out_features // ranks
    if not _have_one_start(module.out_features, size, block):
        return None
    start = forward.mesh.get_local_rank() * size
    return range(start, start + size)


def _have_one_start(extent: int, size: int, block: int) -> bool:
    """Returns whether each shard of `size` of `extent` rows begins at a block, or lies within one block."""
    starts = range(0, extent, size)
    return all(start % block == 0 or start // block == (start + size - 1) // block for start in starts)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
