"""Tensor-parallel layers with Megatron's names. Each equals the unsharded module of which it is a shard.

Parameters are plain tensors: of linears this rank's shards, of norms (and of `UlyssesAttention` without
`tp_group`) full ones. Code that is not aware of shards treats them as full tensors:

- torch's distributed checkpoints would store them as copies of one tensor: use `full_state_dict`.
- torch's `clip_grad_norm_` would use one rank's norm: use `clip_grad_norm_` of this module.
- `torch.amp.GradScaler` would skip a step only on ranks with an infinity: use `ShardedGradScaler` of
  `torch.distributed.fsdp.sharded_grad_scaler`, with the group.

`overlap_gemm.parallel` has styles that make DTensors.
"""

from ..api.float8 import Float8
from ..api.functional import column_parallel_gemm
from ..api.linears import clip_grad_norm_, full_state_dict
from ..api.norms import (
    LayerNorm,
    RMSNorm,
    SequenceParallelWarning,
    sequence_parallel_parameters,
    sum_sequence_parallel_gradients,
)
from ..api.random_numbers import Dropout, per_rank_random
from .attention import UlyssesAttention
from .block import ParallelAttention, ParallelBlock
from .head_exchange import gather_heads, scatter_heads
from .layers import ColumnParallelLinear, ParallelMLP, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "Float8",
    "LayerNorm",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "SequenceParallelWarning",
    "UlyssesAttention",
    "clip_grad_norm_",
    "column_parallel_gemm",
    "full_state_dict",
    "gather_heads",
    "per_rank_random",
    "scatter_heads",
    "sequence_parallel_parameters",
    "sum_sequence_parallel_gradients",
]
