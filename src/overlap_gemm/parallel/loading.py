"""Models that are larger than a device: made without memory, cut, and only then filled.

transformers' own loader does the reading: it makes the model on the meta device, lets the model's class
distribute it, and then reads of every tensor in the safetensors files the slice that a DTensor parameter has
on this rank. So `from_pretrained` lends it a class that distributes with `parallelize`. What comes with the
loader (the hub, renamed and merged checkpoints, dtypes, generation settings, reports of missing keys) is
transformers', and so it is for the next release's families.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..backends.base import BackendName
from .experts import put_together, set_apart
from .model import Logits, Model, mixed_experts, packed_linears, parallelize


def from_pretrained(
    name: str,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = True,
    logits: Logits = "replicated",
    backend: BackendName = "auto",
    **loading: Any,
) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, parallelized: a rank holds and reads its shards alone.

    Args:
        name: As for transformers: a folder, or a name on the hub. Its weights must be in safetensors.
        mesh: As for `parallelize`, as are the options.
        sequence_parallel: As for `parallelize`.
        logits: As for `parallelize`.
        backend: As for `parallelize`.
        **loading: transformers' own arguments: `dtype`, `revision`, `attn_implementation`, ...

    Returns:
        The model, in evaluation mode as transformers gives it, on the mesh's devices.

    Raises:
        UnknownModuleError: As `parallelize`.
        ValueError: An argument that says where the weights go: the mesh does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if wrong := {"device_map", "distributed_config", "tp_plan", "tp_size"} & loading.keys():
        raise ValueError(f"{sorted(wrong)}: from_pretrained places weights by its mesh, and by nothing else")
    config = loading.pop("config", None) or AutoConfig.from_pretrained(name)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{name!r} is no causal language model of transformers: {type(config).__name__}")
    original = AutoModelForCausalLM._model_mapping[type(config)]

    def distribute(model: nn.Module, *_: Any) -> nn.Module:
        model.tie_weights()  # transformers does when they are loaded, and parallelize must know
        parallelize(model, mesh, sequence_parallel=sequence_parallel, logits=logits, backend=backend)
        for _name, experts in mixed_experts(model):
            put_together(experts)
        return model

    # Named and placed as the original: transformers looks conversions of checkpoints up by these names.
    lent: Any = type(
        original.__name__,
        (_ReadsPacked, original),
        {
            "__module__": original.__module__,
            "prepare_distribute_model": staticmethod(lambda config, device_map: (config, device_map, None)),
            "maybe_distribute_model": staticmethod(distribute),
        },
    )
    model = lent.from_pretrained(
        name,
        config=config,
        device_map={"": _device_of(mesh)},
        distributed_config=DistributedConfig(tp_size=1),
        **{"use_safetensors": True, **loading},
    )
    model.__class__ = original
    for _, experts in mixed_experts(model):
        set_apart(experts)
    return model


def materialize(model: Model) -> Model:
    """Gives a parallelized model that was made on the meta device memory for its shards.

    For weights that come from elsewhere than `from_pretrained`'s files: a distributed checkpoint, or
    `load_state_dict`. Parameters are NaN until then; buffers, such as the frequencies of the rotary
    embedding, which no checkpoint has, are computed.

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
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # what transformers asks before it makes new weights
    model.initialize_weights()
    return model


def _filled(parameter: Any) -> nn.Parameter:
    whole = isinstance(parameter, DTensor)
    own = parameter.to_local() if whole else parameter
    device = _device_of(parameter.device_mesh) if whole else torch.get_default_device()
    own = torch.full_like(own, float("nan"), device=device)
    if whole:
        own = DTensor.from_local(
            own, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
    return nn.Parameter(own, requires_grad=parameter.requires_grad)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


class _ReadsPacked:
    """A model class that finds the parts of a `PackedLinear` in its checkpoint's one tensor."""

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any
    ) -> Any:
        """Transformers' own, which reads what it is given slice by slice."""
        original: Any = type(model).__mro__[2]
        with ExitStack() as files:
            if state_dict is None and any(packed_linears(model)):
                state_dict = dict(_slices(model, checkpoint_files, files))
            return original._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args)


def _slices(model: nn.Module, paths: list[str], files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Every tensor of the files, unread; those of packed linears as their parts."""
    from safetensors import safe_open

    packed = {f"{name}.weight": linear for name, linear in packed_linears(model)}
    for path in paths:
        file = files.enter_context(safe_open(path, framework="pt"))
        for key in file.keys():  # noqa: SIM118 (no mapping)
            whole, start = file.get_slice(key), 0
            if key not in packed:
                yield key, whole
                continue
            for part, rows in packed[key].sizes.items():
                yield f"{key.removesuffix('weight')}{part}.weight", _Rows(whole, start, rows)
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
