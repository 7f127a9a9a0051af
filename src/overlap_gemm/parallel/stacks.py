"""Attributes by which transformers' Trainer and accelerate recognize a model that is already sharded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

SHARDED_BEFORE = "_is_distributed_loading_by_transformers"
"""Attribute that marks a model as sharded before a Trainer gets it."""


def describe(model: Any, mesh: DeviceMesh) -> None:
    """Marks `model` in transformers' own terms as tensor-parallel over `mesh`.

    transformers' Trainer then passes the same batches to all ranks of the mesh and does not wrap the model.
    It divides its sums over processes, and calls `save_pretrained` on every rank. accelerate accepts
    `ParallelismConfig(tp_size=)`. `generate` makes static caches of the rank's heads.

    `_device_mesh` stays None: otherwise peft shards adapters by transformers' plan, which differs from ours.
    """
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

    if not isinstance(model, PreTrainedModel):
        return
    model._tp_size = mesh.size()
    setattr(model, SHARDED_BEFORE, True)
    # One data-parallel rank: accelerate refuses a larger world unless it is configured who sums gradients.
    if "tp_size" in {field.name for field in fields(DistributedConfig)}:  # transformers >= 5.13
        model.config.distributed_config = DistributedConfig(tp_size=mesh.size())


@contextmanager
def as_unsharded(model: Any) -> Iterator[bool]:
    """Hides within the block that a model is sharded: a Trainer then keeps its optimizer.

    Args:
        model: Model, possibly wrapped by peft.

    Yields:
        True if the model is parallelized.
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
