"""Checkpoints whose linears are stored in 8 bits: read, and either kept so or dequantised.

What the files hold is the same in every form: of `a.linear.weight`, e4m3, scales whose name and shape differ.

    quant_method            scales                       of                     activations
    "fp8"                   weight_scale_inv             tensor, blocks         dynamic; or activation_scale
    "compressed-tensors"    weight_scale                 tensor, rows, blocks   dynamic; or input_scale
    "modelopt" (FP8)        weight_scale                 tensor                 input_scale

Scales of blocks are float32 or ue8m0 (also as bytes); the size of a block is as the checkpoint says.
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
from ..modules.layouts import lying_as
from ..modules.styles import ColwiseForward, RowwiseForward
from ..places import place_of, set_layout

Quantized: TypeAlias = Literal["keep", "dequantize"]

E4M3 = torch.float8_e4m3fn
INPUT_SCALES = ("input_scale", "activation_scale")


class QuantizedCheckpointError(ValueError):
    """A checkpoint that cannot be kept in 8 bits, or read at all; the message says what to do."""


@dataclass(frozen=True)
class Form:
    """How a checkpoint stores its linears.

    Attributes:
        method: Its name for it.
        scale: The name, after the module's, of a weight's scales.
        block: Rows and columns of the weight that share a scale; None: all of it, or a row.
        static: Whether activations have a scale in the file.
    """

    method: str
    scale: str = "weight_scale"
    block: tuple[int, int] | None = None
    static: bool = False

    def __str__(self) -> str:
        blocks = "" if self.block is None else f", blocks of {self.block[0]} x {self.block[1]}"
        return f"{self.method} of 8 bits{blocks}"


def form_of(config: Any) -> Form | None:
    """How a model's configuration says that its checkpoint is stored; None: not in 8 bits by us.

    Args:
        config: transformers' configuration of the model.

    Raises:
        QuantizedCheckpointError: In several ways at once, or in one of these methods' others.
    """
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    said: Mapping[str, Any] = given if isinstance(given, dict) else given.to_dict()
    match said.get("quant_method"):
        case "fp8":
            block, static = said.get("weight_block_size"), said.get("activation_scheme") == "static"
            return Form("fp8", "weight_scale_inv", _pair(block), static)
        case "modelopt":
            said = {**said, **said.get("quantization", {})}
            if said.get("quant_algo") != "FP8":
                raise QuantizedCheckpointError(
                    f"of modelopt's checkpoints quant_algo 'FP8' is read, not {said.get('quant_algo')!r}"
                )
            return Form("modelopt", static=True)
        case "compressed-tensors":
            forms = {_of_group(group) for group in said.get("config_groups", {}).values()}
            if len(forms) != 1:
                raise QuantizedCheckpointError(
                    f"compressed-tensors: one way to store all linears is read, this checkpoint has "
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
            f"compressed-tensors: weights of 8-bit floats by tensor, channel or block are read, got (type, "
            f"num_bits, strategy) = {kind}"
        )
    block = _pair(weights.get("block_structure")) if kind[2] == "block" else None
    return Form("compressed-tensors", block=block, static=bool(inputs) and inputs.get("dynamic") is False)


def _pair(block: Any) -> tuple[int, int] | None:
    return None if block is None else (int(block[0]), int(block[1]))


class Checkpoint:
    """The tensors of files, unread, by name; those of 8 bits with their scales.

    Args:
        files: safetensors' open files.
        form: How linears are stored.
    """

    def __init__(self, files: list[Any], form: Form):
        self.form = form
        self._where = {key: file for file in files for key in file.keys()}  # noqa: SIM118 (no mapping)
        self.stored = [
            key.removesuffix(".weight")
            for key in self._where
            if key.endswith(".weight") and f"{key.removesuffix('weight')}{form.scale}" in self._where
        ]
        """Names of the modules whose weights are stored in 8 bits."""

    def whole(self, key: str) -> Any:
        """A tensor, unread."""
        return self._where[key].get_slice(key)

    def scale(self, name: str) -> Tensor:
        """A module's scales in float32: `[1, 1]`, `[N, 1]`, or one for each block.

        Raises:
            QuantizedCheckpointError: They do not fit the weight.
        """
        key, (rows, columns) = f"{name}.{self.form.scale}", self.whole(f"{name}.weight").get_shape()
        scale = self._where[key].get_tensor(key)
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
        """The scale of what a module is given, `[1, 1]`; None where it has none."""
        for key in (f"{name}.{last}" for last in INPUT_SCALES):
            if key in self._where:
                return self._where[key].get_tensor(key).float().reshape(1, 1)
        return None

    def files(self, name: str) -> dict[str, tuple[str, Tensor]]:
        """Returns name and tensor, without memory, of each scale of a module, by its name when kept."""
        inputs = INPUT_SCALES if self.form.static else ()
        names = {"weight_scale": (self.form.scale,), "input_scale": inputs}
        return {
            own: (last, self._where[key].get_tensor(key).to("meta"))
            for own, theirs in names.items()
            for last in theirs
            if (key := f"{name}.{last}") in self._where
        }

    def plain(self) -> Iterator[str]:
        """Names of the tensors that are no scales of stored modules, and no weights of theirs."""
        theirs = {f"{n}.{last}" for n in self.stored for last in ("weight", self.form.scale, *INPUT_SCALES)}
        return (key for key in self._where if key not in theirs)

    def dequantized(self, name: str) -> "Dequantized":
        """A module's weight in float32, unread."""
        return Dequantized(self.whole(f"{name}.weight"), self.scale(name), self.form.block)


class Dequantized:
    """A stored weight as float32, read slice by slice as transformers' loader asks for it.

    Args:
        values: safetensors' slice, of 8 bits.
        scale: As `Checkpoint.scale` has it.
        block: Rows and columns that share a scale, where there is more than one of either.
    """

    def __init__(self, values: Any, scale: Tensor, block: tuple[int, int] | None):
        self.values, self.scale, self.block = values, scale, block

    def get_shape(self) -> list[int]:
        """As safetensors says it."""
        shape: list[int] = self.values.get_shape()
        return shape

    def get_dtype(self) -> str:
        """As safetensors says it."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Reads: `...`, or a slice for each dimension."""
        index = (index,) if not isinstance(index, tuple) else index
        slices = (slice(None),) * 2 if index[0] is Ellipsis else (*index, slice(None))[:2]
        ranges = [range(size)[part] for size, part in zip(self.get_shape(), slices, strict=True)]
        values = self.values[slices].float()
        if self.scale.numel() == 1:
            return values * self.scale
        block = self.block or (1, self.get_shape()[1])
        rows, columns = (torch.tensor(given) // size for given, size in zip(ranges, block, strict=True))
        return values * self.scale[rows.long()][:, columns.long()]


class Whole:
    """A tensor that has been read, as safetensors' slices are asked."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        """As safetensors says it."""
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """As safetensors says it."""
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        """Some of it."""
        return self.tensor[index]


def keep(model: nn.Module, name: str, checkpoint: Checkpoint, source: str) -> None:
    """Makes a linear of a parallelized model on the meta device a `KeptLinear`.

    Args:
        model: The model.
        name: The linear's.
        checkpoint: Where it will be read from.
        source: The name it has there.

    Raises:
        QuantizedCheckpointError: There is no product of ours for it.
    """
    module: Any = model.get_submodule(name)
    form = checkpoint.form
    why = _why_not_kept(module, form)
    if why is None and form.block is not None and name != source:
        why = "a packed projection's scales are kept of rows or of a tensor alone"
    if why is not None:
        raise QuantizedCheckpointError(
            f"{name!r} ({form}) cannot be kept in 8 bits: {why}. from_pretrained(..., "
            f"quantized='dequantize') makes the model's dtype of it"
        )
    rows = _replicated_rows(module, form)
    if rows is not None and module.weight.placements != (Replicate(),):
        full = torch.empty(module.weight.shape, dtype=module.weight.dtype, device="meta")
        set_layout(module, "weight", distribute_tensor(full, module.weight.device_mesh, [Replicate()]))
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
    set_layout(module, "weight", lying_as(weight, torch.empty_like(weight.to_local(), dtype=E4M3)))
    for own, extents, layout in (("weight_scale", shape, placement), ("input_scale", (1, 1), Replicate())):
        parameter = None
        if own in module.files:
            empty = torch.empty(extents, device="meta")
            parameter = _frozen(distribute_tensor(empty, weight.device_mesh, [layout]))
        module.register_parameter(own, parameter)


SHARED = (".k_proj", ".v_proj")
"""Linears of few rows, which every rank may keep whole."""


def _why_not_kept(module: Any, form: Form) -> str | None:
    forward = vars(module).get("forward")
    if form.block is not None and (1, *form.block) not in PROMOTED:
        known = " and ".join(f"{rows} x {columns}" for _, rows, columns in PROMOTED)
        return f"of blocks the ops take those of {known}"
    if not isinstance(forward, (ColwiseForward, RowwiseForward)):
        return "it is no linear that is cut by rows or columns"
    if form.block is None or _replicated_rows(module, form) is not None:
        return None
    by_depth = isinstance(forward, RowwiseForward)
    extent, block = module.in_features if by_depth else module.out_features, form.block[by_depth]
    ranks = forward.mesh.size()
    if _ends_on_borders(extent, block, ranks):
        return None
    most = max(p for p in range(1, ranks) if _ends_on_borders(extent, block, p))
    sizes = Shards.even(extent, ranks).sizes
    return f"its shards, {sizes}, do not end on borders of blocks of {block}; at P={most} they do"


def keeps_blocks(sizes: tuple[int, int, int, int], block: int, ranks: int) -> bool:
    """Returns whether a decoder's linears can be kept in square blocks on so many ranks.

    Args:
        sizes: Query heads, width of a head, key/value heads, features of the MLP.
        block: Rows and columns that share a scale.
        ranks: P.
    """
    heads, width, kv_heads, features = sizes
    if heads % ranks or kv_heads % ranks and ranks % kv_heads:
        return False
    if not all(_ends_on_borders(extent, block, ranks) for extent in (heads * width, features)):
        return False
    own = width * max(kv_heads // ranks, 1)
    starts = range(0, kv_heads * width, own)
    return all(_has_one_start(range(start, start + own), block) for start in starts)


def _ends_on_borders(extent: int, block: int, ranks: int) -> bool:
    cut = Shards.even(extent, ranks)
    return len(cut.sizes) == 1 or cut.chunk % block == 0


def _replicated_rows(module: Any, form: Form) -> range | None:
    """Rows that this rank multiplies of a weight that every rank keeps whole; None: the weight is sharded.

    Of k and v each shard may lie within one block, whose scale is then all its rows'.
    """
    forward = vars(module).get("forward")
    if isinstance(forward, SharedHeadForward):
        rows = forward.rows()
        return rows if form.block is None or _has_one_start(rows, form.block[0]) else None
    place = place_of(module)
    if form.block is None or place is None or not place.name.endswith(SHARED):
        return None
    ranks, block = forward.mesh.size(), form.block[0]
    if _ends_on_borders(module.out_features, block, ranks) or module.out_features % ranks:
        return None
    size = module.out_features // ranks
    shards = [range(start, start + size) for start in range(0, module.out_features, size)]
    if not all(_has_one_start(rows, block) for rows in shards):
        return None
    return shards[forward.mesh.get_local_rank()]


def _has_one_start(rows: range, block: int) -> bool:
    """Whether blocks begin where rows do, or all rows are within one block."""
    return rows.start % block == 0 or rows.start // block == (rows.stop - 1) // block


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
