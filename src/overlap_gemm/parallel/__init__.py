"""Tensor parallelism for whole models (`parallelize`) and for single linears (`ParallelStyle` classes).

    model = LlamaForCausalLM(config)
    parallelize(model, mesh["tp"])          # trains, generates, saves as before

Parameters become DTensors, so optimizers, gradient clipping and distributed checkpoints work unchanged.
"""

from . import replacements  # noqa: F401 - registers its hook with torch
from .checkpoints.loading import from_pretrained, materialize
from .checkpoints.state import full_state_dict, full_tensors
from .checkpoints.stored import QuantizedCheckpointError
from .export import exportable
from .model import parallelize
from .modules.kept_linears import requantize
from .modules.styles import OverlapColwiseParallel, OverlapRowwiseParallel, OverlapSharedGather
from .optimizers import full_norm
from .places import sees_shards

__all__ = [
    "OverlapColwiseParallel",
    "OverlapRowwiseParallel",
    "OverlapSharedGather",
    "QuantizedCheckpointError",
    "exportable",
    "from_pretrained",
    "full_norm",
    "full_state_dict",
    "full_tensors",
    "materialize",
    "parallelize",
    "requantize",
    "sees_shards",
]
