"""A plug-in for vLLM: row-parallel linears whose all-reduce overlaps the product, where that is faster.

vLLM finds it by its entry point (group `vllm.general_plugins`) and loads it in every process; it does nothing
unless `OVERLAP_GEMM_VLLM=1`. Then every unquantized `RowParallelLinear` becomes one opaque op that decides at
each call, by the tokens there are: `gemm_all_reduce` where the model of `overlap_gemm.tuning` predicts the
fused kernel to be faster than product and collective, vLLM's own product and all-reduce otherwise.

Never run with vLLM: written against the sources of 0.33.0, run with a stand-in of its layer. What it costs:
an all-reduce in an opaque op is out of reach of vLLM's fusion of all-reduce and RMSNorm.
"""

import logging
import os
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.base import Problem
from ..backends.select import choose
from ..functional import gemm_all_reduce
from ..runtime.group import resolve

logger = logging.getLogger(__name__)

SWITCH = "OVERLAP_GEMM_VLLM"
"""Environment variable; "1" switches the plug-in on."""


def register() -> None:
    """The entry point. vLLM may call it several times in a process."""
    if os.environ.get(SWITCH) == "1":
        _register()


@cache
def _register() -> type:
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    @RowParallelLinear.register_oot
    class OverlapRowParallelLinear(RowParallelLinear):
        """vLLM's layer with its weights and loaders; the forward is ours where ours can serve."""

        def forward(self, input_: Tensor) -> Any:
            plain = type(self.quant_method) is UnquantizedLinearMethod and self.weight.ndim == 2
            if not (plain and self.input_is_parallel and self.reduce_results and self.tp_size > 1):
                return super().forward(input_)
            bias = None if self.skip_bias_add else self.bias
            group = get_tp_group().device_group.group_name
            out = torch.ops.overlap_gemm.vllm_row_parallel(input_, self.weight, bias, self.input_size, group)
            if not self.return_bias:
                return out
            return out, self.bias if self.skip_bias_add else None

    logger.info("vLLM's RowParallelLinear is overlap_gemm's; %s=1", SWITCH)
    return OverlapRowParallelLinear


@torch.library.custom_op("overlap_gemm::vllm_row_parallel", mutates_args=())
def _row_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, group: str) -> Tensor:
    """X `[..., K_local]`, weight `[N, K_local]` -> `[..., N]`, summed over the ranks, plus bias."""
    ranks = resolve(group)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    problem = Problem.of("gemm_all_reduce", rows, weight.shape[0], k, x, ranks, None)
    if _overlaps(problem):
        return gemm_all_reduce(x, weight, bias=bias, group=group, k=k)
    from vllm.distributed import tensor_model_parallel_all_reduce

    out = tensor_model_parallel_all_reduce(F.linear(x, weight))
    return out if bias is None else out + bias


@_row_parallel.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, group: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@cache
def _overlaps(problem: Problem) -> bool:
    """Whether our way overlaps, and so beats what vLLM does."""
    return choose(problem).backend.name in ("fused", "decomposed")
