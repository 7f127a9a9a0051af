"""Plug-in for vLLM: linears whose collective overlaps the product, if that is faster.

vLLM finds it by its entry point (group `vllm.general_plugins`) and loads it in every process. It does nothing
unless `OVERLAP_GEMM_VLLM=1`. It applies to every `RowParallelLinear` that is unquantized, or has 8-bit floats
with scales by tensor or channel. Its product becomes one opaque op that decides at each call, by the number
of tokens: `gemm_all_reduce` if the model of `overlap_gemm.tuning` predicts the fused kernel to be faster than
product and collective, otherwise vLLM's own product and all-reduce. Activations are quantised by vLLM's own
kernel.

Column-parallel linears of vLLM have no collective, with two exceptions, which become `gemm_all_gather` in the
same way if they are unquantized: `ColumnParallelLinear` with `gather_output=True`, and the head whose logits
`LogitsProcessor` gathers.

With `VLLM_BATCH_INVARIANT` all calls are `gemm_all_reduce(..., invariant="batch")`: a choice by the number of
tokens would make bits depend on it. vLLM's mode makes its own products and NCCL's sums independent of the
batch, in another order.

vLLM's own forward runs for all layers with a `linear_backend` other than "auto" or the pass `enable_sp`. The
logger reports it once. With `fuse_gemm_comms`, which needs `enable_sp`, vLLM's graphs call torch's fused
symmetric-memory ops for column-parallel and row-parallel products: these are then ours (`torch_symm_mem`).

vLLM 0.24 is the oldest that is supported. Tested in 0.32 on CPUs; written against the sources of 0.24 to
0.33. The disadvantage: vLLM can fuse an all-reduce with RMSNorm, but not one within an opaque op.
"""

import logging
import os
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api.functional import gemm_all_gather, gemm_all_reduce
from ..backends.base import Problem
from ..backends.op_call import CallOperands, OpCall, promises_of
from ..runtime.environment import choice
from ..runtime.group import find
from ..spec import GEMM_ALL_GATHER, GEMM_ALL_REDUCE
from ..spec.promises import Invariant
from . import torch_symm_mem
from .serving import overlaps as _overlaps

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows messages of its own loggers only

SWITCH = "OVERLAP_GEMM_VLLM"
"""Environment variable; "1" enables the plug-in, and "0" is the default."""


def register() -> None:
    """Registers the layer; the entry point. vLLM may call it several times in a process.

    Raises:
        RuntimeError: The plug-in is enabled, but vLLM is older than 0.24, or another plug-in has registered
            the layer.
        ValueError: The variable is neither 0 nor 1.
    """
    if choice(SWITCH, ("0", "1")) == "1":
        _register()


@cache
def _register() -> type:
    try:
        from vllm import envs
        from vllm.config import get_current_vllm_config_or_none
        from vllm.model_executor.custom_op import maybe_get_oot_by_class
        from vllm.model_executor.layers.linear import (
            ColumnParallelLinear,
            RowParallelLinear,
            UnquantizedLinearMethod,
        )
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    except ImportError as error:
        raise RuntimeError(f"{SWITCH}=1 needs vLLM 0.24 or newer: {error}") from error
    for kind in (RowParallelLinear, ColumnParallelLinear, LogitsProcessor):
        registered = maybe_get_oot_by_class(kind)
        if registered is not kind:
            raise RuntimeError(
                f"{SWITCH}=1, but another plug-in has registered vLLM's {kind.__name__}: "
                f"{registered.__module__}.{registered.__qualname__}; disable one of the two"
            )

    # vLLM includes its known variables in the key of stored graphs, so graphs of the other setting are not
    # used, and sends them to Ray's workers, so all workers have the same layer.
    envs.environment_variables[SWITCH] = lambda: os.environ.get(SWITCH)

    try:
        from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
    except ImportError:  # an older vLLM, whose quantized layers are not supported
        FP8ScaledMMLinearKernel = None

    class OverlapRowParallelLinear(RowParallelLinear):
        """vLLM's layer with its weights and loaders; the forward is replaced if our op supports it."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            config = get_current_vllm_config_or_none()
            why = _why_not(config)
            if why is not None:
                _log_fallback(why)
            if why == "enable_sp" and getattr(_passes(config), "fuse_gemm_comms", False):
                torch_symm_mem.install_once()
            self._uses_vllm_forward = why is not None
            self._scaled = _kernel_of(self, FP8ScaledMMLinearKernel)
            if envs.VLLM_BATCH_INVARIANT and self._scaled is not None and not _quantizes_rows(self._scaled):
                _log_fallback("VLLM_BATCH_INVARIANT, and an 8-bit input's scale depends on all tokens")
                self._scaled = None

        def forward(self, input_: Tensor) -> Any:
            plain = type(self.quant_method) is UnquantizedLinearMethod and self.weight.ndim == 2
            scaled = self._scaled is not None and _is_by_columns(self.weight, input_, self.output_size)
            sums = self.input_is_parallel and self.reduce_results and self.tp_size > 1
            if self._uses_vllm_forward or not sums or not (plain or scaled):
                return super().forward(input_)
            bias = None if self.skip_bias_add else self.bias
            if plain:
                out = torch.ops.overlap_gemm.vllm_row_parallel(input_, self.weight, bias, self.input_size)
            else:
                out = _multiply(self, self._scaled, input_, bias)
            if not self.return_bias:
                return out
            return out, self.bias if self.skip_bias_add else None

    class OverlapColumnParallelLinear(ColumnParallelLinear):
        """vLLM's layer; the forward is replaced if it gathers the result of an unquantized product."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._uses_vllm_forward = _why_not(get_current_vllm_config_or_none()) is not None

        def forward(self, input_: Tensor) -> Any:
            plain = type(self.quant_method) is UnquantizedLinearMethod and self.weight.ndim == 2
            if self._uses_vllm_forward or not (plain and self.gather_output and self.tp_size > 1):
                return super().forward(input_)
            bias = None if self.skip_bias_add else self.bias
            out = torch.ops.overlap_gemm.vllm_column_gathered(input_, self.weight, bias, self.tp_size)
            if not self.return_bias:
                return out
            return out, self.bias if self.skip_bias_add else None

    class OverlapLogitsProcessor(LogitsProcessor):
        """vLLM's layer; product and all-gather of an unquantized head are replaced."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._uses_vllm_forward = _why_not(get_current_vllm_config_or_none()) is not None

        def _get_logits(
            self,
            hidden_states: Tensor,
            lm_head: Any,
            embedding_bias: Tensor | None,
            skip_gather: bool = False,
        ) -> Any:
            kinds = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
            plain = type(lm_head.quant_method) in kinds and lm_head.weight.ndim == 2
            has_types = getattr(self, "head_dtype", None) in (None, hidden_states.dtype)
            gathers = self.use_all_gather and lm_head.tp_size > 1 and not skip_gather
            if self._uses_vllm_forward or not (plain and has_types and gathers):
                rest = (skip_gather,) if skip_gather else ()  # vLLM's before 0.33 have no such argument
                return super()._get_logits(hidden_states, lm_head, embedding_bias, *rest)
            product = torch.ops.overlap_gemm.vllm_column_gathered
            logits = product(hidden_states, lm_head.weight, embedding_bias, lm_head.tp_size)
            return logits[..., : self.org_vocab_size]  # without the padding of the vocabulary

    RowParallelLinear.register_oot(OverlapRowParallelLinear)
    ColumnParallelLinear.register_oot(OverlapColumnParallelLinear)
    LogitsProcessor.register_oot(OverlapLogitsProcessor)
    logger.info("vLLM's RowParallelLinear and gathered products are overlap_gemm's; %s=1", SWITCH)
    return OverlapRowParallelLinear


_kernels: dict[str, Any] = {}
"""vLLM's kernels of 8-bit products, by a name: a compiled graph cannot contain objects."""


def _kernel_of(layer: Any, kind: type | None) -> str | None:
    """Returns the name in `_kernels` of vLLM's kernel for a layer's 8-bit weight, or None."""
    if kind is None:
        return None
    for owner in (layer.quant_method, getattr(layer, "scheme", None)):
        for kernel in getattr(owner, "__dict__", {}).values():
            # A kernel that overrides apply_weights may not quantise x.
            if isinstance(kernel, kind) and type(kernel).apply_weights is kind.apply_weights:  # type: ignore[attr-defined]
                name = f"{type(kernel).__qualname__} {kernel.config}"  # type: ignore[attr-defined]
                return name if _kernels.setdefault(name, kernel) is not None else None
    return None


def _quantizes_rows(name: str) -> bool:
    """Returns whether a kernel in `_kernels` quantises each row of x independently of the others."""
    quantize = _kernels[name].quant_fp8
    return bool(quantize.static or quantize.use_per_token_if_dynamic)


def _is_by_columns(weight: Tensor, x: Any, columns: int) -> bool:
    """Returns whether a weight is float8_e4m3fn `[K, N]`, K contiguous, not packed or padded, and fits x."""
    return (
        isinstance(x, Tensor)
        and weight.dtype == torch.float8_e4m3fn
        and weight.shape == (x.shape[-1], columns)
        and weight.stride(0) == 1
    )


def _multiply(layer: Any, name: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the sum over the ranks of a layer's product; vLLM's kernel quantises the input."""
    kernel = _kernels[name]
    weight, scale_w, scale_x, bound = kernel._get_layer_params(layer)
    rows = x.reshape(-1, x.shape[-1])
    values, scale_x = kernel.quant_fp8(rows, scale_x, bound)
    if len(values) != len(rows):  # padded for torch's product
        values, scale_x = values[: len(rows)], scale_x if scale_x.numel() == 1 else scale_x[: len(rows)]
    dtype = kernel.config.out_dtype or x.dtype
    product = torch.ops.overlap_gemm.vllm_scaled_row_parallel
    out: Tensor = product(values, weight, scale_x, scale_w, bias, dtype, layer.input_size, name)
    return out.view(*x.shape[:-1], weight.shape[1])


def _why_not(config: Any) -> str | None:
    """Returns the first setting of vLLM that our op would not respect, or None.

    Sequence parallelism, a pass of vLLM up to 0.31, rewrites neighbouring all-reduces of a graph together. It
    does not find those within our op.
    """
    options = {
        "linear_backend": config is not None and config.kernel_config.linear_backend != "auto",
        "enable_sp": getattr(_passes(config), "enable_sp", False),
    }
    return next((name for name, is_set in options.items() if is_set), None)


def _passes(config: Any) -> Any:
    """Returns vLLM's settings of graph passes; those of newer versions have no sequence parallelism."""
    return None if config is None else config.compilation_config.pass_config


@cache
def _log_fallback(why: str) -> None:
    """Logs each reason once."""
    logger.warning("vLLM's own forward of RowParallelLinear runs: %s", why)


@torch.library.custom_op("overlap_gemm::vllm_row_parallel", mutates_args=())
def _row_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> Tensor:
    """Returns `[..., N]` for x `[..., K_local]` and weight `[N, K_local]`, summed over the ranks, plus bias.

    Our op adds the bias once, after the sum; in vLLM's path rank 0 adds it to its product.

    The group is vLLM's current one, not an argument: vLLM's cache keeps compiled graphs with their constants,
    and a group's name there would outlive the group.
    """
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().device_group
    ranks = find(group)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    call = OpCall(rows=rows, columns=weight.shape[0], k=k, invariant=_invariant())
    if call.invariant or _overlaps(Problem.of(GEMM_ALL_REDUCE.name, call, CallOperands(x, None), ranks)):
        return gemm_all_reduce(x, weight, bias=bias, group=group, k=k, invariant=call.invariant)
    # As in vLLM, the bias is added to one rank's product.
    return tensor_model_parallel_all_reduce(F.linear(x, weight, bias if ranks.rank == 0 else None))


@_row_parallel.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("overlap_gemm::vllm_column_gathered", mutates_args=())
def _column_gathered(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int) -> Tensor:
    """Returns `[..., N]` for x `[..., K]`, weight `[N / ranks, K]` and bias `[N / ranks]` of each rank."""
    from vllm.distributed import tensor_model_parallel_all_gather
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().device_group
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    columns = ranks * weight.shape[0]
    call = OpCall(rows=rows, columns=columns, k=weight.shape[1], invariant=_invariant())
    if call.invariant or _overlaps(
        Problem.of(GEMM_ALL_GATHER.name, call, CallOperands(x, None), find(group))
    ):
        return gemm_all_gather(x, weight, bias=bias, group=group, columns=columns, invariant=call.invariant)
    return tensor_model_parallel_all_gather(F.linear(x, weight, bias))


@_column_gathered.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], ranks * weight.shape[0])


@torch.library.custom_op("overlap_gemm::vllm_scaled_row_parallel", mutates_args=())
def _scaled_row_parallel(
    x: Tensor,
    weight: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    k: int,
    kernel: str,
) -> Tensor:
    """Returns `[M, N]` for 8-bit x `[M, K_local]` and weight `[K_local, N]`: the sum over ranks, plus bias.

    `kernel` is the name of vLLM's kernel in `_kernels`.
    """
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().device_group
    ranks = find(group)
    rows, columns = x.shape[0], weight.shape[1]
    call = OpCall(rows=rows, columns=columns, k=k, out_dtype=out_dtype, invariant=_invariant())
    if call.invariant or _overlaps(Problem.of(GEMM_ALL_REDUCE.name, call, CallOperands(x, weight), ranks)):
        by_row = scale_x.reshape(-1, 1) if scale_x.numel() > 1 else scale_x
        by_column = scale_w.reshape(1, -1) if scale_w.numel() > 1 else scale_w
        bias = None if bias is None else bias.to(out_dtype)
        return gemm_all_reduce(
            x, weight.t(), bias=bias, group=group, k=k, scale_x=by_row, scale_w=by_column,
            out_dtype=out_dtype, invariant=call.invariant,
        )  # fmt: skip
    product = _kernels[kernel].apply_scaled_mm(
        A=x, B=weight, out_dtype=out_dtype, As=scale_x, Bs=scale_w,
        bias=bias if ranks.rank == 0 else None, output_shape=[rows, columns],
    )  # fmt: skip
    return tensor_model_parallel_all_reduce(product)


@_scaled_row_parallel.register_fake
def _(
    x: Tensor, weight: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Any, out_dtype: torch.dtype, *_: Any
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=out_dtype)


def _invariant() -> Invariant | None:
    """Returns the invariance of calls: that of `OVERLAP_GEMM_INVARIANT`, else "batch" in vLLM's mode."""
    from vllm import envs

    return promises_of().invariant or ("batch" if envs.VLLM_BATCH_INVARIANT else None)
