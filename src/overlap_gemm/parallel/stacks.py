"""What transformers' Trainer and accelerate ask a model that is sharded already."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh


def describe(model: Any, mesh: DeviceMesh) -> None:
    """Says in transformers' own terms that `model` is tensor-parallel over `mesh`.

    transformers >= 5.23: its Trainer then gives all ranks of the mesh the same batches, wraps the model in
    nothing, divides what it sums over processes, and calls `save_pretrained` on every rank; accelerate takes
    `ParallelismConfig(tp_size=)` for true; `generate` makes static caches of the rank's heads; peft gathers
    what it saves.

    `_device_mesh` stays None: peft would cut adapters by transformers' plan, which is not ours.
    """
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

    if not isinstance(model, PreTrainedModel):
        return
    model._tp_size = mesh.size()
    model._is_distributed_loading_by_transformers = True
    # One data-parallel rank: accelerate refuses a world with more, until somebody says who sums gradients.
    model.config.distributed_config = DistributedConfig(tp_size=mesh.size())
