"""Models trained by the Trainer of transformers, for comparison."""

import contextlib
import os
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.models import VOCABULARY

SETTINGS = {
    "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2, "max_grad_norm": 0.5, "logging_steps": 1, "report_to": [], "use_cpu": True,
    "disable_tqdm": True, "save_only_model": True, "save_strategy": "no",
}  # fmt: skip


def samples():
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(VOCABULARY, (32, 13), generator=generator)
    return [{"input_ids": text, "labels": text} for text in texts]


@contextlib.contextmanager
def launched():
    """With a launcher's variables, which accelerate reads; its state is removed afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = dist.get_rank(), dist.get_world_size()
    names = dict(zip(("RANK", "LOCAL_RANK", "WORLD_SIZE"), (rank, rank, size), strict=True))
    names = {name: str(value) for name, value in names.items()}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the process group is there already
    try:
        with mock.patch.dict(os.environ, names if size > 1 else {}):
            yield
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()


@contextlib.contextmanager
def on_cpus():
    """The same, and accelerate takes tensor parallelism on CPUs."""
    from overlap_gemm.integrations import trainer

    with launched(), trainer.on_cpus():
        yield


def trained(kind, model, folder, resume=None, **settings):
    from transformers import Trainer, TrainingArguments

    with on_cpus() if kind is Trainer else launched():
        arguments = TrainingArguments(folder, **{**SETTINGS, **settings})
        trainer = kind(model, arguments, train_dataset=samples())
        trainer.train(resume_from_checkpoint=resume)
        if arguments.save_strategy == "no":
            trainer.save_model(folder)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return losses, norms
