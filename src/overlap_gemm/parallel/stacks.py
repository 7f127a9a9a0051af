"""What transformers' Trainer and accelerate ask a model that is sharded already."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

SHARDED_BEFORE = "_is_distributed_loading_by_transformers"
"""Attribute of models that a Trainer is given in shards."""


def describe(model: Any, mesh: DeviceMesh) -> None:
    """Says in transformers' own terms that `model` is tensor-parallel over `mesh`.

    transformers' Trainer then gives all ranks of the mesh the same batches, wraps the model in nothing,
    divides what it sums over processes, and calls `save_pretrained` on every rank; accelerate takes
    `ParallelismConfig(tp_size=)` for true; `generate` makes static caches of the rank's heads.

    `_device_mesh` stays None: peft would cut adapters by transformers' plan, which is not ours.
    """
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

    if not isinstance(model, PreTrainedModel):
        return
    model._tp_size = mesh.size()
    setattr(model, SHARDED_BEFORE, True)
    # One data-parallel rank: accelerate refuses a world with more, until somebody says who sums gradients.
    if "tp_size" in {field.name for field in fields(DistributedConfig)}:  # transformers >= 5.13
        model.config.distributed_config = DistributedConfig(tp_size=mesh.size())


@contextmanager
def as_unsharded(model: Any) -> Iterator[bool]:
    """Within the block a Trainer does not see that a model was sharded before it, and so keeps its optimizer.

    Args:
        model: A model, in peft's or not.

    Yields:
        Whether it is a parallelized one.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_sharded = getattr(base, SHARDED_BEFORE, False)
    if is_sharded:
        setattr(base, SHARDED_BEFORE, False)
    try:
        yield is_sharded
    finally:
        if is_sharded:
            setattr(base, SHARDED_BEFORE, True)
