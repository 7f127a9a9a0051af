"""Whole models and single linears made tensor-parallel: `parallelize`, and the styles it is made of.

    model = LlamaForCausalLM(config)
    parallelize(model, mesh["tp"])          # trains, generates, saves as before

Parameters become DTensors, so optimizers, gradient clipping and distributed checkpoints work on them
unchanged.
"""

from . import replacements  # noqa: F401 - registers its hook with torch
from .export import exportable
from .kept_linears import requantize
from .loading import from_pretrained, materialize
from .model import parallelize
from .optimizers import full_norm
from .places import sees_shards
from .state import full_state_dict, full_tensors
from .stored import QuantizedCheckpointError
from .styles import OverlapColwiseParallel, OverlapRowwiseParallel, OverlapSharedGather

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
