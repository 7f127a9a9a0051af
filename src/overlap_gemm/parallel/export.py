"""Parallelized models for `torch.export`, which takes no DTensor parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .checkpoints.state import FORWARDS
from .model import Model
from .modules.styles import ColwiseForward, RowwiseForward
from .parameters import SHARD


@contextmanager
def exportable(model: Model) -> Iterator[Model]:
    """Within the block the parameters of a parallelized model are plain tensors: this rank's shards.

    with torch.no_grad(), exportable(model):
        program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)

    The exported program holds this rank's shards and calls `torch.ops.overlap_gemm.*`; every rank exports its
    own, and runs it together with the others. It is for inference: its parameters require no gradients. The
    process group is a name in it, so a process that loads it makes its groups in the same order.

    Args:
        model: What `parallelize` returned, or any module whose DTensor parameters belong to modules with the
            styles of this package.

    Yields:
        `model`.

    Raises:
        ValueError: A module's parameters are sharded by somebody else (FSDP, torch's own styles), or its
            output is a DTensor.
    """
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    plain: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                _check(name, module, parameter)
                swapped.append((module, key, parameter))
                plain[parameter] = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
                setattr(plain[parameter], SHARD, True)
    for module, key, parameter in swapped:
        module.register_parameter(key, plain[parameter])
    try:
        yield model
    finally:
        for module, key, parameter in swapped:
            module.register_parameter(key, parameter)


def _check(name: str, module: Any, parameter: Tensor) -> None:
    forward, what = module.forward, None
    if not isinstance(forward, FORWARDS):
        what = "its forward wants DTensors"
    elif isinstance(forward, (ColwiseForward, RowwiseForward)) and not forward.style.use_local_output:
        what = "its output is a DTensor (parallelize with logits='replicated')"
    elif isinstance(parameter, DTensor) and parameter.device_mesh.ndim != 1:
        what = "its parameters are sharded along a second dimension of the mesh, too; export before that"
    if what is not None:
        raise ValueError(f"cannot be exported: {name!r} ({type(module).__name__}): {what}")
