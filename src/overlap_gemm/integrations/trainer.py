"""transformers' Trainer for parallelized models, with checkpoints to go on from.

    from overlap_gemm.integrations.trainer import TensorParallelTrainer
    TensorParallelTrainer(parallelize(model, mesh), args, train_dataset=data).train()

A plain Trainer trains them, too (`parallel.stacks`), and saves the model; it refuses to save the state of the
optimizer of a model that was sharded before. These save it as a distributed checkpoint alongside the model's
whole weights: any number of ranks goes on from it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from packaging.version import Version
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import Trainer, __version__

from ..parallel.checkpoints.state import full_state_dict
from ..parallel.optimizers import check_class, check_optimizer
from ..parallel.places import placed
from ..parallel.stacks import as_unsharded

_Base: Any = Trainer if TYPE_CHECKING else object

OPTIMIZER = "optimizer_shards"
"""The distributed checkpoint's folder in a Trainer's."""
SCHEDULER = "scheduler.pt"
SAVES_ON_EVERY_RANK = Version(__version__) >= Version("5.19")
"""Whether transformers' own Trainer calls `save_pretrained` on every rank, since it gathers."""


@contextmanager
def on_cpus() -> Iterator[None]:
    """Within the block accelerate accepts tensor parallelism between processes on CPUs.

    accelerate refuses it by the kind of device; nothing else differs. `TensorParallelTrainer` does this by
    itself where a model is on CPUs. Another Trainer, or an `Accelerator`, is made within the block.
    """
    from accelerate import Accelerator

    original = Accelerator.multi_device
    Accelerator.multi_device = property(lambda accelerator: accelerator.num_processes > 1)
    try:
        yield
    finally:
        Accelerator.multi_device = original


class ShardedCheckpoints(_Base):
    """In front of a Trainer class, such as TRL's: it saves and loads the optimizer's shards."""

    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    get_optimizer_cls_and_kwargs: Any
    lr_scheduler: Any
    args: Any

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        with as_unsharded(model) as is_sharded:
            is_on_cpus = is_sharded and model.device.type == "cpu"
            with on_cpus() if is_on_cpus else nullcontext():
                super().__init__(model, *args, **kwargs)
        self.is_distributed_loading_by_transformers = is_sharded
        if is_sharded:
            self._check()

    def _check(self) -> None:
        """Raises a ValueError where a parallelized model would be trained wrongly, or not at all."""
        if any(place.sharding.logits_are_sharded for _, place in placed(self.model, None)):
            raise ValueError(
                "a Trainer's losses want whole logits: parallelize with logits='replicated', its default"
            )
        if self.optimizer is not None:
            check_optimizer(self._torchs_optimizer)
        else:
            kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, self.model
            )
            check_class(kind, [settings])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves full weights, or the adapter. Collective."""
        if SAVES_ON_EVERY_RANK or not self.is_distributed_loading_by_transformers:
            super().save_model(output_dir, _internal_call)
            return
        state = full_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Called by Trainer on every rank."""
        state = {"optimizer": get_optimizer_state_dict(self.model, self._torchs_optimizer)}
        dcp.save(state, checkpoint_id=Path(output_dir) / OPTIMIZER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | os.PathLike[str] | None) -> None:
        """Called by Trainer on every rank."""
        if checkpoint is None:
            return
        optimizer = self._torchs_optimizer
        state = {"optimizer": get_optimizer_state_dict(self.model, optimizer)}
        dcp.load(state, checkpoint_id=Path(checkpoint) / OPTIMIZER)
        set_optimizer_state_dict(self.model, optimizer, state["optimizer"])
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    @property
    def _torchs_optimizer(self) -> torch.optim.Optimizer:
        """Without accelerate's wrapping."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


class TensorParallelTrainer(ShardedCheckpoints, Trainer):
    """transformers' Trainer, all of it, with checkpoints that parallelized models go on from."""
