"""Models larger than a device: made without memory, sharded, then filled from files.

transformers' own loader reads the files. It makes the model on the meta device, and then reads from each
tensor in the safetensors files the slice of this rank's DTensor parameter. `from_pretrained` passes the
loader a subclass of the model whose modules are parallelized before it reads. All other features are
transformers' own, for future families, too: the hub, renamed and merged checkpoints, dtypes, generation
settings, reports of missing keys.

The loader of transformers before 5.14 assigns full tensors. It gets slices that read as DTensors in place of
full tensors. Because it renames and merges experts, it reads full experts, which the model shards when they
are assigned.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...api.float8 import Float8
from ...backends.op_call import BackendName
from ...epilogues import Epilogue
from ...spec.promises import Invariant, Partials
from ..assignment import PAIRED
from ..model import Logits, Model, parallelize
from ..modules.experts import merge_gates_and_ups, split_gates_and_ups
from ..modules.layouts import with_layout_of
from ..parameters import record_parameters
from .initialization import DONE
from .state import StoredAs, kept_linears, mixed_experts, packed_linears, save_pretrained
from .stored import AlreadyRead, Checkpoint, Quantized, form_of, keep


def from_pretrained(
    name: str,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = True,
    logits: Logits = "replicated",
    backend: BackendName = "auto",
    float8: Float8 | None = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
    fuse: bool | None = None,
    activation: Epilogue | None = None,
    quantized: Quantized = "keep",
    **loading: Any,
) -> Any:
    """Loads a causal language model, parallelized; each rank reads and holds its shards only.

    It corresponds to `AutoModelForCausalLM.from_pretrained`.

    Args:
        name: Folder, or name on the hub, of a checkpoint in safetensors.
        mesh: 1-D DeviceMesh of the ranks.
        sequence_parallel: Option of `parallelize`.
        logits: Option of `parallelize`.
        backend: Option of `parallelize`.
        float8: Option of `parallelize`.
        partials: Option of `parallelize`.
        invariant: Option of `parallelize`.
        fuse: Option of `parallelize`.
        activation: Option of `parallelize`.
        quantized: For a checkpoint whose linears are stored in 8 bits (`stored.py`). "keep": keep them so,
            with frozen weights; gradients of x pass, so adapters can be trained. "dequantize": convert each
            rank's slices to the model's dtype while they are read.
        **loading: transformers' own arguments: `dtype`, `revision`, `attn_implementation`, ...

    Returns:
        Model in evaluation mode, as transformers returns it, on the mesh's devices.

    Raises:
        UnknownModuleError: The model or the named module has no rule in `parallelize`.
        QuantizedCheckpointError: A ValueError: the 8-bit format of the checkpoint is not supported, or its
            linears cannot be kept in 8 bits. The shards may split blocks of scales, for example.
        ValueError: An argument places the weights (`device_map`, for example); the mesh does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if wrong := {"device_map", "distributed_config", "tp_plan", "tp_size"} & loading.keys():
        raise ValueError(f"from_pretrained: {sorted(wrong)} must not be set: it places weights by its mesh")
    config = loading.pop("config", None) or AutoConfig.from_pretrained(name)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"from_pretrained: {name!r} is no causal language model of transformers, its configuration is a "
            f"{type(config).__name__}"
        )
    original = AutoModelForCausalLM._model_mapping[type(config)]
    if quantized not in get_args(Quantized):
        raise ValueError(
            f"from_pretrained: quantized must be one of {', '.join(get_args(Quantized))}, got {quantized!r}"
        )
    form = form_of(config)
    if form is not None:  # `_stored` reads it, not transformers' quantizer
        config, quantization = copy(config), config.quantization_config
        del config.quantization_config

    def distribute(model: nn.Module) -> None:
        model.tie_weights()  # transformers ties after loading, but parallelize must see the tie
        how: dict[str, Any] = {"logits": logits, "backend": backend, "float8": float8}
        how |= {"partials": partials, "invariant": invariant, "fuse": fuse, "activation": activation}
        parallelize(model, mesh, sequence_parallel=sequence_parallel, **how)
        for _name, experts in mixed_experts(model):
            merge_gates_and_ups(experts)

    # Same name and module as the original: transformers looks up checkpoint conversions by these names.
    subclass: Any = type(
        original.__name__,
        (_ReadsPacked, original),
        {
            "__module__": original.__module__,
            "_distribute": staticmethod(distribute),
            "_stored": (form, quantized),
        },
    )
    model = subclass.from_pretrained(
        name,
        config=config,
        device_map={"": _device_of(mesh)},
        **{"use_safetensors": True, **loading},
    )
    model.__class__ = original
    _start_storages_at_zero(model)
    if form is not None and quantized == "keep":
        model.requires_grad_(False)
        stored = StoredAs(quantization, sum(1 for _ in kept_linears(model)))
        model.save_pretrained = partial(save_pretrained, model, stored=stored)
    for _, experts in mixed_experts(model):
        split_gates_and_ups(experts)
    record_parameters(model)
    return model


def _start_storages_at_zero(model: nn.Module) -> None:
    """Copies local tensors that do not start at offset 0 of their storage.

    transformers reads a rank's slice as a view, whose offset is 0 on rank 0 only. torch has no
    `copy.deepcopy` of a DTensor whose local tensor has another offset.
    """
    copied: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and parameter.storage_offset():
                if parameter not in copied:
                    copy_of_shard = with_layout_of(parameter, parameter.to_local().detach().clone())
                    copied[parameter] = nn.Parameter(copy_of_shard, requires_grad=parameter.requires_grad)
                module.register_parameter(key, copied[parameter])


def materialize(model: Model) -> Model:
    """Allocates the shards of a parallelized model that was made on the meta device.

    The weights then come from elsewhere than `from_pretrained`'s files: a distributed checkpoint,
    `load_state_dict`, or `model.init_weights()`, which draws the numbers of the unsharded model into the
    shards. Parameters are NaN until then. Buffers that no checkpoint contains, such as the frequencies of the
    rotary embedding, are computed.

    Args:
        model: Model built under `torch.device("meta")` and passed to `parallelize`.

    Returns:
        `model`.
    """
    made: dict[Tensor, nn.Parameter] = {}  # tied parameters stay one
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and parameter not in made:
                made[parameter] = _filled(parameter)
            if parameter in made:
                module.register_parameter(key, made[parameter])
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=_device_of(meshes[0]))
    for parameter in made.values():
        setattr(parameter, DONE, True)  # so `initialize_weights` computes buffers and draws no parameters
    unmarked = [module for module in model.modules() if not getattr(module, DONE, False)]
    model.initialize_weights()
    for each in (*made.values(), *unmarked):
        setattr(each, DONE, False)
    record_parameters(model)
    return model


def _filled(parameter: Any) -> nn.Parameter:
    is_sharded = isinstance(parameter, DTensor)
    local = parameter.to_local() if is_sharded else parameter
    device = _device_of(parameter.device_mesh) if is_sharded else torch.get_default_device()
    local = torch.full_like(local, float("nan"), device=device)
    return nn.Parameter(
        with_layout_of(parameter, local) if is_sharded else local, requires_grad=parameter.requires_grad
    )


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


class _ReadsPacked:
    """Base of the loaded model's class: parallelizes the model before it is read.

    It also splits the tensors of packed linears into parts.
    """

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any
    ) -> Any:
        """Shards the model, then runs transformers' method on tensors that are read slice by slice."""
        original: Any = type(model).__mro__[2]
        form, quantized = type(model)._stored
        type(model)._distribute(model)
        with ExitStack() as opened:
            if state_dict is None and (
                form is not None or any(packed_linears(model)) or not _loader_reads_slices()
            ):
                from safetensors import safe_open

                files = [opened.enter_context(safe_open(path, framework="pt")) for path in checkpoint_files]
                tensors = (
                    _unread(files) if form is None else _stored(model, Checkpoint(files, form), quantized)
                )
                state_dict = dict(_in_parts(model, tensors))
                if not _loader_reads_slices():
                    state_dict = _as_dtensors(model, state_dict)
            return original._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args)


def _loader_reads_slices() -> bool:
    """Returns whether transformers' loader reads a DTensor's slice on this rank only (since 5.14)."""
    from transformers import core_model_loading

    return hasattr(core_model_loading, "DtensorShardOperation")


def _as_dtensors(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors; those that are parameters of the model under their own name read as DTensors."""
    prefix = getattr(model, "base_model_prefix", "")
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def one(key: str, tensor: Any) -> Any:
        parameter = parameters.get(key, parameters.get(f"{prefix}.{key}"))
        is_read_here = isinstance(parameter, DTensor) and not key.endswith(PAIRED)
        return _ReadAsDTensor(tensor, parameter) if is_read_here else tensor

    return {key: one(key, tensor) for key, tensor in tensors.items()}


class _ReadAsDTensor:
    """Unread tensor with the interface of a safetensors slice; reading returns a DTensor.

    Args:
        full: Unread full tensor.
        like: Parameter that gets the values.
    """

    def __init__(self, full: Any, like: DTensor):
        self.full, self.like = full, like

    def get_shape(self) -> list[int]:
        """Returns the shape of the full tensor, as a safetensors slice does."""
        shape: list[int] = self.full.get_shape()
        return shape

    def get_dtype(self) -> str:
        """Returns the dtype's name in safetensors."""
        dtype: str = self.full.get_dtype()
        return dtype

    def __getitem__(self, _: Any) -> Tensor:
        """Returns this rank's slice.

        A tensor of another shape is returned in full, for the loader to report.
        """
        if self.get_shape() != list(self.like.shape):
            tensor: Tensor = self.full[...]
            return tensor
        shape, offsets = compute_local_shape_and_global_offset(
            self.like.shape, self.like.device_mesh, self.like.placements
        )
        index = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
        return with_layout_of(self.like, self.full[index])


def _unread(files: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yields name and unread tensor for every tensor of the files."""
    for file in files:
        for key in file.keys():  # noqa: SIM118 (no mapping)
            yield key, file.get_slice(key)


def _stored(model: nn.Module, checkpoint: Checkpoint, quantized: Quantized) -> Iterator[tuple[str, Any]]:
    """Yields name and unread tensor of an 8-bit checkpoint.

    Linears that stay in 8 bits get their parameters.
    """
    packed = dict(packed_linears(model))
    for key in checkpoint.plain():
        yield key, checkpoint.unread(key)
    for name in checkpoint.stored:
        if quantized == "dequantize":
            yield f"{name}.weight", checkpoint.dequantized(name)
            continue
        parts = [f"{name}.{part}" for part in packed[name].sizes] if name in packed else [name]
        for part in parts:
            keep(model, part, checkpoint, name)
        yield f"{name}.weight", checkpoint.unread(f"{name}.weight")
        yield f"{name}.weight_scale", AlreadyRead(checkpoint.scale(name))
        if checkpoint.form.static and (scale := checkpoint.input_scale(name)) is not None:
            yield f"{name}.input_scale", AlreadyRead(scale)


def _in_parts(model: nn.Module, tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the tensors; those of packed linears are split into the linear's parts."""
    packed = dict(packed_linears(model))
    for key, tensor in tensors:
        name, _, last = key.rpartition(".")
        if name not in packed:
            yield key, tensor
            continue
        start = 0
        for part, rows in packed[name].sizes.items():
            by_rows = tensor.get_shape()[0] > 1  # all parts share a single scale
            yield f"{name}.{part}.{last}", _Rows(tensor, start, rows) if by_rows else tensor
            start += rows


class _Rows:
    """Range of rows of a safetensors slice, with the interface of a slice."""

    def __init__(self, tensor: Any, start: int, rows: int):
        self.tensor, self.start, self.rows = tensor, start, rows

    def get_shape(self) -> list[int]:
        """Returns the shape of the range of rows."""
        return [self.rows, *self.tensor.get_shape()[1:]]

    def get_dtype(self) -> str:
        """Returns the dtype's name in safetensors."""
        return self.tensor.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        """Reads `...`, or one slice for each dimension."""
        rows, *others = (slice(None),) if index is Ellipsis else index
        start, stop, _ = rows.indices(self.rows)
        index = slice(self.start + start, self.start + stop), *others
        return self.tensor[index]
