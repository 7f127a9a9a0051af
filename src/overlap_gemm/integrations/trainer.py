"""transformers' Trainer for parallelized models, with checkpoints from which training can continue.

    from overlap_gemm.integrations.trainer import TensorParallelTrainer
    TensorParallelTrainer(parallelize(model, mesh), args, train_dataset=data).train()

A plain Trainer also trains parallelized models (`parallel.stacks`) and saves the model. It refuses, however,
to save the optimizer state of a model that is already sharded. These classes save the state as a distributed
checkpoint next to the model's full weights. Any number of ranks can continue from it.

| file of a checkpoint | written by |
|---|---|
| full weights, or the adapter | the rank with `args.should_save`, after all ranks have gathered them |
| `optimizer_shards/` | every rank |
| `scheduler.pt` | the rank with `args.should_save` |
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import Trainer

from ..parallel.checkpoints.state import full_adapter_state_dict, full_state_dict
from ..parallel.optimizers import check_class, check_optimizer
from ..parallel.places import placed
from ..parallel.stacks import as_unsharded
from ..runtime import agree, group

_Base: Any = Trainer if TYPE_CHECKING else object

OPTIMIZER = "optimizer_shards"
"""Folder of the distributed checkpoint within a Trainer's checkpoint."""
SCHEDULER = "scheduler.pt"


@contextmanager
def on_cpus() -> Iterator[None]:
    """Lets accelerate accept tensor parallelism between processes on CPUs within the block.

    accelerate refuses it by the kind of device only. `TensorParallelTrainer` does this itself for a model on
    CPUs. Create other Trainers, or an `Accelerator`, within the block.
    """
    from accelerate import Accelerator

    original = Accelerator.multi_device
    Accelerator.multi_device = property(lambda accelerator: accelerator.num_processes > 1)
    try:
        yield
    finally:
        Accelerator.multi_device = original


def _together(what: str, attempt: Callable[[], Any]) -> Any:
    """Returns the result of an attempt that every rank of the job makes, if it succeeds on all of them."""
    return agree.together(group.find(None), what, attempt)


class ShardedCheckpoints(_Base):
    """Mixin for a Trainer class, such as TRL's: saves and loads the optimizer's shards. List it first.

    The constructor raises ValueError for a parallelized model whose logits are sharded (use
    ``parallelize(..., logits="replicated")``), or with an optimizer that `parallel.optimizers` refuses.
    """

    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    get_optimizer_cls_and_kwargs: Any
    lr_scheduler: Any
    args: Any
    hub_model_id: Any

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        with as_unsharded(model) as is_sharded:
            is_on_cpus = is_sharded and model.device.type == "cpu"
            create = partial(super().__init__, model, *args, **kwargs)
            with on_cpus() if is_on_cpus else nullcontext():
                # Rank 0 alone makes folders and repositories: its peers would train without it.
                _together("creating the Trainer", create) if is_sharded else create()
        self.is_distributed_loading_by_transformers = is_sharded
        if is_sharded:
            self._check()

    def _check(self) -> None:
        """Raises a ValueError if training a parallelized model would be wrong or impossible."""
        if any(place.sharding.logits_are_sharded for _, place in placed(self.model, None)):
            raise ValueError(
                "a Trainer's losses need replicated logits: use parallelize(..., logits='replicated')"
            )
        if self.optimizer is not None:
            check_optimizer(self._torch_optimizer)
        else:
            kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, self.model
            )
            check_class(kind, [settings])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves full weights, or the adapter. Collective; the rank with `args.should_save` writes.

        Raises:
            DisagreementError: On every rank, if that rank cannot write.
        """
        if not self.is_distributed_loading_by_transformers:
            super().save_model(output_dir, _internal_call)
            return
        has_adapters, folder = hasattr(self.model, "get_base_model"), output_dir or self.args.output_dir
        state = (full_adapter_state_dict if has_adapters else full_state_dict)(self.model)

        def write() -> None:
            if self.args.should_save:
                self._save(folder, state_dict=state)

        _together(f"saving into {folder}", write)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Creates the hub's repository by transformers. If it fails on one rank, every rank raises."""
        create = super().init_hf_repo

        def attempt() -> str | None:
            create(*args, **kwargs)
            return self.hub_model_id

        # Only rank 0 gets a name; a rank without one would call this again at each push.
        names = agree.gather(group.find(None), "creating the hub's repository", attempt)
        self.hub_model_id = next(filter(None, names))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Saves and uploads by transformers. Collective. If it fails on one rank, every rank raises."""
        push = super().push_to_hub
        return _together("pushing to the hub", lambda: push(*args, **kwargs))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves the optimizer's shards, and the scheduler. Called by Trainer on every rank."""
        state = {"optimizer": get_optimizer_state_dict(self.model, self._torch_optimizer)}
        dcp.save(state, checkpoint_id=Path(output_dir) / OPTIMIZER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | os.PathLike[str] | None) -> None:
        """Loads the optimizer's shards, and the scheduler. Called by Trainer on every rank."""
        if checkpoint is None:
            return
        optimizer = self._torch_optimizer
        state = {"optimizer": get_optimizer_state_dict(self.model, optimizer)}
        dcp.load(state, checkpoint_id=Path(checkpoint) / OPTIMIZER)
        set_optimizer_state_dict(self.model, optimizer, state["optimizer"])
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    @property
    def _torch_optimizer(self) -> torch.optim.Optimizer:
        """Returns the optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


class TensorParallelTrainer(ShardedCheckpoints, Trainer):
    """transformers' Trainer with checkpoints from which parallelized models can continue."""
