"""Parallelized models for `torch.export`, which does not support DTensor parameters."""

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
    """Makes the parameters of a parallelized model plain tensors, this rank's shards, within the block.

        with torch.no_grad(), exportable(model):
            program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)

    The exported program holds this rank's shards and calls `torch.ops.overlap_gemm.*`. Every rank exports its
    own program and runs it together with the others. The program is for inference: its parameters require no
    gradients. It contains the name of the process group, so a process that loads it must create its groups in
    the same order.

    Args:
        model: Model returned by `parallelize`, or a module whose DTensor parameters all belong to linears
            with the styles of this package.

    Yields:
        `model`.

    Raises:
        ValueError: FSDP or torch's own styles have sharded a module's parameters, or a module returns a
            DTensor.
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
        what = "its forward takes DTensors; it has no style of overlap_gemm.parallel"
    elif isinstance(forward, (ColwiseForward, RowwiseForward)) and not forward.style.use_local_output:
        what = "its output is a DTensor; use logits='replicated' in parallelize"
    elif isinstance(parameter, DTensor) and parameter.device_mesh.ndim != 1:
        what = "its parameters are sharded along a second dimension of the mesh, too; export the model before"
    if what is not None:
        raise ValueError(f"exportable: {name!r} ({type(module).__name__}) cannot be exported: {what}")
