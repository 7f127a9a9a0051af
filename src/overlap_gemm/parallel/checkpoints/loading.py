"""Models that are larger than a device: made without memory, cut, and only then filled.

transformers' own loader does the reading: it makes the model on the meta device, and then reads of every
tensor in the safetensors files the slice that a DTensor parameter has on this rank. So `from_pretrained`
lends it a class that is parallelized before the loader reads. What comes with the loader (the hub, renamed
and merged checkpoints, dtypes, generation settings, reports of missing keys) is transformers', and so it is
for the next release's families.

Loaders before 5.14 assign full tensors. They are given slices that read as DTensors; experts, which they
rename and merge, they read whole, and the model cuts them as they are assigned.
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
from ...spec.promises import Invariant, Partials
from ..assignment import PAIRED
from ..model import Logits, Model, parallelize
from ..modules.experts import put_together, set_apart
from ..modules.layouts import lying_as
from ..parameters import remember
from .initialization import DONE
from .state import StoredAs, kept_linears, mixed_experts, packed_linears, save_pretrained
from .stored import Checkpoint, Quantized, Whole, form_of, keep


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
    quantized: Quantized = "keep",
    **loading: Any,
) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, parallelized: a rank holds and reads its shards alone.

    Args:
        name: As for transformers: a folder, or a name on the hub. Its weights must be in safetensors.
        mesh: As for `parallelize`, as are the options.
        sequence_parallel: As for `parallelize`.
        logits: As for `parallelize`.
        backend: As for `parallelize`.
        float8: As for `parallelize`.
        partials: As for `parallelize`.
        invariant: As for `parallelize`.
        quantized: Of a checkpoint whose linears are stored in 8 bits (`stored`): "keep" them so, for
            inference alone, or "dequantize" each rank's slices to the model's dtype while they are read.
        **loading: transformers' own arguments: `dtype`, `revision`, `attn_implementation`, ...

    Returns:
        The model, in evaluation mode as transformers gives it, on the mesh's devices.

    Raises:
        UnknownModuleError: As `parallelize`.
        QuantizedCheckpointError: A ValueError: the checkpoint's 8-bit form is not read, or cannot be kept.
        ValueError: An argument that says where the weights go: the mesh does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if wrong := {"device_map", "distributed_config", "tp_plan", "tp_size"} & loading.keys():
        raise ValueError(f"{sorted(wrong)}: from_pretrained places weights by its mesh, and by nothing else")
    config = loading.pop("config", None) or AutoConfig.from_pretrained(name)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{name!r} is no causal language model of transformers: {type(config).__name__}")
    original = AutoModelForCausalLM._model_mapping[type(config)]
    if quantized not in get_args(Quantized):
        raise ValueError(f"quantized must be one of {', '.join(get_args(Quantized))}, got {quantized!r}")
    form = form_of(config)
    if form is not None:  # it is read here, not by transformers' quantizer
        config, quantization = copy(config), config.quantization_config
        del config.quantization_config

    def distribute(model: nn.Module) -> None:
        model.tie_weights()  # transformers does when they are loaded, and parallelize must know
        how: dict[str, Any] = {"logits": logits, "backend": backend, "float8": float8}
        how |= {"partials": partials, "invariant": invariant}
        parallelize(model, mesh, sequence_parallel=sequence_parallel, **how)
        for _name, experts in mixed_experts(model):
            put_together(experts)

    # Named and placed as the original: transformers looks conversions of checkpoints up by these names.
    lent: Any = type(
        original.__name__,
        (_ReadsPacked, original),
        {
            "__module__": original.__module__,
            "_distribute": staticmethod(distribute),
            "_stored": (form, quantized),
        },
    )
    model = lent.from_pretrained(
        name,
        config=config,
        device_map={"": _device_of(mesh)},
        **{"use_safetensors": True, **loading},
    )
    model.__class__ = original
    _begin_storages(model)
    if form is not None and quantized == "keep":
        model.requires_grad_(False)
        stored = StoredAs(quantization, sum(1 for _ in kept_linears(model)))
        model.save_pretrained = partial(save_pretrained, model, stored=stored)
    for _, experts in mixed_experts(model):
        set_apart(experts)
    remember(model)
    return model


def _begin_storages(model: nn.Module) -> None:
    """Makes every local tensor begin its storage: a DTensor of a later part has no `copy.deepcopy` in torch.

    transformers reads a rank's slice as a view, whose offset is 0 on rank 0 alone.
    """
    copied: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and parameter.storage_offset():
                if parameter not in copied:
                    own = lying_as(parameter, parameter.to_local().detach().clone())
                    copied[parameter] = nn.Parameter(own, requires_grad=parameter.requires_grad)
                module.register_parameter(key, copied[parameter])


def materialize(model: Model) -> Model:
    """Gives a parallelized model that was made on the meta device memory for its shards.

    For weights that come from elsewhere than `from_pretrained`'s files: a distributed checkpoint,
    `load_state_dict`, or `model.init_weights()`, which draws the numbers of the unsharded model into the
    shards. Parameters are NaN until then; buffers, such as the frequencies of the rotary embedding, which no
    checkpoint has, are computed.

    Args:
        model: What `parallelize` made of a model built under `torch.device("meta")`.

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
        setattr(parameter, DONE, True)  # of them nothing is drawn, and buffers are computed
    opened = [module for module in model.modules() if not getattr(module, DONE, False)]
    model.initialize_weights()
    for each in (*made.values(), *opened):
        setattr(each, DONE, False)
    remember(model)
    return model


def _filled(parameter: Any) -> nn.Parameter:
    whole = isinstance(parameter, DTensor)
    own = parameter.to_local() if whole else parameter
    device = _device_of(parameter.device_mesh) if whole else torch.get_default_device()
    own = torch.full_like(own, float("nan"), device=device)
    return nn.Parameter(lying_as(parameter, own) if whole else own, requires_grad=parameter.requires_grad)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


class _ReadsPacked:
    """A model class, cut before it is read; parts of a `PackedLinear` are found in one tensor."""

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any
    ) -> Any:
        """Transformers' own, which reads what it is given slice by slice."""
        original: Any = type(model).__mro__[2]
        form, quantized = type(model)._stored
        type(model)._distribute(model)
        with ExitStack() as opened:
            if state_dict is None and (
                form is not None or any(packed_linears(model)) or not _loader_reads_slices()
            ):
                from safetensors import safe_open

                files = [opened.enter_context(safe_open(path, framework="pt")) for path in checkpoint_files]
                whole = _whole(files) if form is None else _stored(model, Checkpoint(files, form), quantized)
                state_dict = dict(_in_parts(model, whole))
                if not _loader_reads_slices():
                    state_dict = _as_dtensors(model, state_dict)
            return original._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args)


def _loader_reads_slices() -> bool:
    """Returns whether transformers' loader reads of a tensor what a DTensor has on this rank (since 5.14)."""
    from transformers import core_model_loading

    return hasattr(core_model_loading, "DtensorShardOperation")


def _as_dtensors(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """The same; tensors that are parameters of the model under their own name read as DTensors."""
    prefix = getattr(model, "base_model_prefix", "")
    own = dict(model.named_parameters(remove_duplicate=False))

    def one(key: str, tensor: Any) -> Any:
        parameter = own.get(key, own.get(f"{prefix}.{key}"))
        is_read_here = isinstance(parameter, DTensor) and not key.endswith(PAIRED)
        return _ReadAsDTensor(tensor, parameter) if is_read_here else tensor

    return {key: one(key, tensor) for key, tensor in tensors.items()}


class _ReadAsDTensor:
    """An unread tensor, with what transformers' loader asks of a safetensors slice; read, it is a DTensor.

    Args:
        whole: The unread tensor.
        like: The parameter that it will be.
    """

    def __init__(self, whole: Any, like: DTensor):
        self.whole, self.like = whole, like

    def get_shape(self) -> list[int]:
        """As safetensors says it."""
        shape: list[int] = self.whole.get_shape()
        return shape

    def get_dtype(self) -> str:
        """As safetensors says it."""
        dtype: str = self.whole.get_dtype()
        return dtype

    def __getitem__(self, _: Any) -> Tensor:
        """This rank's slice. A tensor of another shape is read whole, for the loader to report."""
        if self.get_shape() != list(self.like.shape):
            tensor: Tensor = self.whole[...]
            return tensor
        shape, offsets = compute_local_shape_and_global_offset(
            self.like.shape, self.like.device_mesh, self.like.placements
        )
        index = tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
        return lying_as(self.like, self.whole[index])


def _whole(files: list[Any]) -> Iterator[tuple[str, Any]]:
    """Every tensor of the files, unread."""
    for file in files:
        for key in file.keys():  # noqa: SIM118 (no mapping)
            yield key, file.get_slice(key)


def _stored(model: nn.Module, checkpoint: Checkpoint, quantized: Quantized) -> Iterator[tuple[str, Any]]:
    """Every tensor of a checkpoint of 8 bits, unread; what is kept so gets parameters for it."""
    packed = dict(packed_linears(model))
    for key in checkpoint.plain():
        yield key, checkpoint.whole(key)
    for name in checkpoint.stored:
        if quantized == "dequantize":
            yield f"{name}.weight", checkpoint.dequantized(name)
            continue
        parts = [f"{name}.{part}" for part in packed[name].sizes] if name in packed else [name]
        for part in parts:
            keep(model, part, checkpoint, name)
        yield f"{name}.weight", checkpoint.whole(f"{name}.weight")
        yield f"{name}.weight_scale", Whole(checkpoint.scale(name))
        if checkpoint.form.static and (scale := checkpoint.input_scale(name)) is not None:
            yield f"{name}.input_scale", Whole(scale)


def _in_parts(model: nn.Module, tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The same, those of packed linears as their parts."""
    packed = dict(packed_linears(model))
    for key, whole in tensors:
        name, _, last = key.rpartition(".")
        if name not in packed:
            yield key, whole
            continue
        start = 0
        for part, rows in packed[name].sizes.items():
            by_rows = whole.get_shape()[0] > 1  # one scale is every part's
            yield f"{name}.{part}.{last}", _Rows(whole, start, rows) if by_rows else whole
            start += rows


class _Rows:
    """Some rows of a safetensors slice, with what transformers' loader asks of one."""

    def __init__(self, whole: Any, start: int, rows: int):
        self.whole, self.start, self.rows = whole, start, rows

    def get_shape(self) -> list[int]:
        """As safetensors says it."""
        return [self.rows, *self.whole.get_shape()[1:]]

    def get_dtype(self) -> str:
        """As safetensors says it."""
        return self.whole.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        """Reads: `...`, or a slice for each dimension."""
        rows, *others = (slice(None),) if index is Ellipsis else index
        start, stop, _ = rows.indices(self.rows)
        index = slice(self.start + start, self.start + stop), *others
        return self.whole[index]
