"""Plug-in for SGLang: products whose collective overlaps them, in its workers.

SGLang finds it by its entry point (group `sglang.srt.plugins`) and loads it in every process before it builds
a model. It does nothing unless `OVERLAP_GEMM_SGLANG=1`.

- `torch.ops.symm_mem` products are this package's ops. `--enable-layernorm-sp` calls them for column- and
  row-parallel linears.
- `RowParallelLinear` that sums its own result, unquantized, calls `gemm_all_reduce` where the model of
  `overlap_gemm.tuning` predicts it to be faster than product and all-reduce; with
  `--enable-deterministic-inference` always, with `invariant="batch"`. Vision towers have such layers.

All other linears are SGLang's: its decoder layers sum the results of attention and MLP themselves, together
with the norm that follows, and its columns are not gathered. Tested with stand-ins of SGLang 0.5.23.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..api.functional import gemm_all_reduce
from ..backends.base import Problem
from ..backends.op_call import CallOperands, OpCall, promises_of
from ..runtime.environment import choice
from ..runtime.group import find
from ..spec import GEMM_ALL_REDUCE
from . import torch_symm_mem
from .serving import overlaps as _overlaps

SWITCH = "OVERLAP_GEMM_SGLANG"
"""Environment variable; "1" enables the plug-in, and "0" is the default."""

ROW_PARALLEL = "sglang.srt.layers.linear.RowParallelLinear.forward"


def register() -> None:
    """Installs ops and hook if the plug-in is enabled. SGLang may call it several times in a process.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    if choice(SWITCH, ("0", "1")) == "1":
        torch_symm_mem.install_once()
        _register()


@cache
def _register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ROW_PARALLEL, _row_parallel, HookType.AROUND)


def _row_parallel(
    forward: Callable[..., Any],
    layer: Any,
    input_: Tensor,
    skip_all_reduce: bool = False,
    forward_batch: Any = None,
    output_tensor: Tensor | None = None,
) -> Any:
    """Returns the result of `RowParallelLinear.forward`, which is `forward`: the sum, and a skipped bias."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    group = get_parallel().tp_group
    if (
        skip_all_reduce
        or output_tensor is not None
        or layer.tp_group is not group
        or group.world_size == 1
        or not _sums(layer, forward_batch)
        or not _is_plain(layer)
    ):
        return forward(layer, input_, skip_all_reduce, forward_batch, output_tensor)
    weight, bias = layer.weight, None if layer.skip_bias_add else layer.bias
    is_deterministic = get_exec().deterministic.enable_deterministic_inference
    invariant = promises_of().invariant or ("batch" if is_deterministic else None)
    rows = input_.numel() // input_.shape[-1] if input_.shape[-1] else 0
    call = OpCall(rows=rows, columns=weight.shape[0], k=layer.input_size, invariant=invariant)
    ranks, operands = find(group.device_group), CallOperands(input_, None)
    if not invariant and not _overlaps(Problem.of(GEMM_ALL_REDUCE.name, call, operands, ranks)):
        return forward(layer, input_, skip_all_reduce, forward_batch, output_tensor)
    out = gemm_all_reduce(
        input_, weight, bias=bias, group=group.device_group, k=layer.input_size, invariant=invariant
    )
    return out, layer.bias if layer.skip_bias_add else None


def _sums(layer: Any, forward_batch: Any) -> bool:
    """Returns whether the layer itself calls all-reduce, in the type of its result."""
    from sglang.srt.runtime_context import get_exec, get_forward

    flags = get_forward()
    is_quantized = (
        forward_batch is not None
        and not forward_batch.forward_mode.is_decode_or_idle()
        and get_exec().comm.enable_quant_communications
    )
    return (
        layer.reduce_results
        and not layer.use_dp_attention_reduce
        and not flags.sp_active
        and not flags.mlp_reduce_scatter
        and not is_quantized
    )


def _is_plain(layer: Any) -> bool:
    """Returns whether the product is that of an unquantized weight, not packed, and a sharded input."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    return (
        type(layer.quant_method) is UnquantizedLinearMethod
        and layer.input_is_parallel
        and layer.weight.shape == (layer.output_size, layer.input_size_per_partition)
        and not getattr(layer, "use_intel_amx_backend", False)
        and not torch.compiler.is_compiling()
    )
