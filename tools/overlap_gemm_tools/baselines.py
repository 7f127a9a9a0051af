"""Baselines of benchmarks: calls of torch and quack-kernels that use nothing of this library.

| name         | call                                                                     |
|--------------|--------------------------------------------------------------------------|
| `product`    | torch's matmul of a rank's operands; its scaled matmul if they are 8-bit |
| `collective` | the collective of torch.distributed, alone                               |
| `torch`      | `product` and `collective`, one after the other                          |
| `torch-symm` | torch's fused op on symmetric memory                                     |
| `one-shot`   | `product`, then torch's one-shot all-reduce on symmetric memory          |
| `two-shot`   | `product`, then torch's two-shot all-reduce on symmetric memory          |
| `quack`      | the all-gather GEMM of quack-kernels                                     |

No multicast object is created: on a shared machine they can take the GPUs out of service.
"""

from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_gemm.backends.scales import mx_scales as mx
from overlap_gemm.backends.scales.product_types import ProductTypes
from overlap_gemm.backends.scales.scale_layouts import LAYOUTS
from overlap_gemm.backends.scales.scaling import (
    BLOCK,
    FLOAT8,
    scaled_mm_by_torch,
    why_no_product,
)
from overlap_gemm.backends.torch_backend import reduce_scatter_single
from overlap_gemm.cli.link_rates import symmetric_name
from overlap_gemm.config.scale_blocks import ATOM_ROWS, MX
from overlap_gemm.runtime.group import Group
from overlap_gemm.testing.workload import Call, OpTensors, Workload


def baselines(workload: Workload, operands: OpTensors, group: Group) -> dict[str, Call]:
    """Returns the baselines of a workload by name, those that support every shape first.

    Args:
        workload: Op, shape and types.
        operands: Operands of this rank.
        group: Ranks of the op.
    """
    multiplied = workload.gathered(operands) if workload.spec.gathers_operand else operands
    if workload.spec.reshards_k:
        rows, _, depth = workload.spec.product(workload.m, workload.n, workload.k, group.size)
        multiplied, scale = operands._replace(x=operands.x.new_ones(rows, depth)), None
        if operands.scale_x is not None:
            shapes = (rows, depth), (workload.n, depth)
            scale, _ = LAYOUTS[workload.blocks].unit(*shapes, operands.x.device)
        multiplied = multiplied._replace(scale_x=scale)
    calls: dict[str, Call] = {"product": product(workload, multiplied)}
    if group.size > 1:
        calls["collective"] = _collective(workload, calls["product"], operands, group)
        calls["torch"] = lambda: _both(workload, operands, group)
        if operands.x.device.type == "cuda":
            calls |= symmetric(workload, operands, group)
    return calls


def product(workload: Workload, operands: OpTensors, fast: bool = False) -> Call:
    """Returns a call of torch's matmul.

    If torch has no matmul with these scales of blocks, the call uses the first block's scale of each row and
    column instead. The same holds for MX types. The number of operations is equal, the result is not.

    Args:
        workload: Op, shape and types.
        operands: Operands to multiply, as they are.
        fast: `use_fast_accum` of 8-bit operands.
    """
    x, weight, scale_x, scale_w = operands
    if scale_x is None or scale_w is None:
        return lambda: torch.mm(x, weight.t())
    types = ProductTypes(x.dtype, weight.dtype, workload.out_dtype, workload.blocks)
    layout = LAYOUTS[types.blocks]
    if types.blocks == MX:
        scale_x, scale_w = (
            mx.rows_of(scale, *matrix.shape)[:, :1].float()
            for scale, matrix in ((scale_x, x), (scale_w, weight))
        )
        layout = LAYOUTS[None]
    elif types.blocks and why_no_product(x.device.type, types):
        scale_x, scale_w = scale_x[:, :1], scale_w[:, :1].repeat_interleave(BLOCK, 0)[: len(weight)]
        layout = LAYOUTS[None]
    of_both = layout.for_torch(x, weight, scale_x, scale_w)
    return lambda: scaled_mm_by_torch(x, weight, *of_both, types.result, fast)


def _collective(workload: Workload, multiply: Call, operands: OpTensors, group: Group) -> Call:
    if workload.spec.gathers_operand:
        return lambda: _gathered(operands, workload.m, group)
    if workload.spec.operand_is_sent:
        return lambda: _exchanged(operands, workload.k, group)
    result = cast(Tensor, multiply())
    if workload.spec.gathers_output:
        return lambda: _blocks(result, workload, group)
    if not workload.spec.sums:
        return lambda: _columns_of_rows(result, workload, group)
    return lambda: _summed(result, workload, group)


def _both(workload: Workload, operands: OpTensors, group: Group) -> Tensor:
    if workload.spec.gathers_operand:
        operands = _gathered(operands, workload.m, group)
    elif workload.spec.operand_is_sent:
        operands = _exchanged(operands, workload.k, group)
    result = cast(Tensor, product(workload, operands)())
    if workload.spec.operand_is_sent:
        return result
    if workload.spec.result_move == ("all_to_all", "m", "n"):
        return _columns_of_rows(result, workload, group)
    return (_side_by_side if workload.spec.gathers_output else _summed)(result, workload, group)


def _gathered(operands: OpTensors, rows: int, group: Group) -> OpTensors:
    """Returns the operands with the gathered x, and its gathered scales."""
    _require_even(rows, group)
    x, scale = operands.x, operands.scale_x
    if x.dtype in FLOAT8:  # collectives have no 8-bit floating-point types
        gathered = _all(x.view(torch.uint8), rows, group).view(x.dtype)
    else:
        gathered = _all(x, rows, group)
    if scale is not None and scale.dtype == mx.SCALE:
        _require_atoms(len(x))
        scale = _all(scale.view(torch.uint8)[:, None], group.size * len(scale), group)[:, 0].view(mx.SCALE)
    elif scale is not None and scale.numel() > 1:
        scale = _all(scale, rows, group)
    return operands._replace(x=gathered, scale_x=scale)


def _exchanged(operands: OpTensors, depth: int, group: Group) -> OpTensors:
    """Returns the operands with this rank's rows of every rank's x, and of its scales of blocks."""
    x, scale = operands.x, operands.scale_x
    if scale is None:
        return operands._replace(x=_rows_of_columns(x, depth, group))
    rows, kind = _rows_of_columns(x.view(torch.uint8), depth, group).view(x.dtype), scale.dtype
    if kind == mx.SCALE:
        _require_atoms(len(rows))
        scale = scale.view(torch.uint8).view(len(x) // ATOM_ROWS, -1)
    scale = _rows_of_columns(scale.contiguous(), group.size * scale.shape[1], group)
    return operands._replace(x=rows, scale_x=scale.view(-1).view(kind) if kind == mx.SCALE else scale)


def _require_atoms(rows: int) -> None:
    if rows % ATOM_ROWS:
        raise ValueError(
            f"MX scales are sent by atoms of {ATOM_ROWS} rows: the rows of x of a rank must be "
            f"a multiple of {ATOM_ROWS}, got {rows}"
        )


def _all(local: Tensor, rows: int, group: Group) -> Tensor:
    gathered = local.new_empty(rows, local.shape[1])
    group.all_gather(gathered, local)
    return gathered


def _columns_of_rows(product: Tensor, workload: Workload, group: Group) -> Tensor:
    """Exchanges rows for columns of all ranks' rows."""
    _require_even(workload.m, group)
    _require_even(product.shape[1], group)
    sent = product.view(len(product), group.size, -1).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.process_group)
    return received.flatten(0, 1)


def _rows_of_columns(x: Tensor, columns: int, group: Group) -> Tensor:
    """Exchanges columns for rows of all ranks' columns."""
    _require_even(len(x), group)
    _require_even(columns, group)
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group.process_group)
    return received.view(group.size, -1, x.shape[1]).transpose(0, 1).reshape(-1, columns)


def _blocks(product: Tensor, workload: Workload, group: Group) -> Tensor:
    """Gathers every rank's columns, one block of rows after the other."""
    _require_even(workload.n, group)
    return _all(product, group.size * product.shape[0], group)


def _side_by_side(product: Tensor, workload: Workload, group: Group) -> Tensor:
    """Gathers every rank's columns next to each other, as the output has them."""
    blocks = _blocks(product, workload, group).view(group.size, *product.shape)
    return blocks.movedim(0, 1).reshape(product.shape[0], -1)


def _summed(product: Tensor, workload: Workload, group: Group) -> Tensor:
    """Returns the part of the sum that the op returns on this rank; overwrites `product`."""
    if workload.spec.out is None:
        dist.all_reduce(product, group=group.process_group)
        return product
    _require_even(product.shape[0], group)
    shard = product.new_empty(product.shape[0] // group.size, product.shape[1])
    reduce_scatter_single(shard, product, group=group.process_group)
    return shard


def _require_even(extent: int, group: Group) -> None:
    if extent % group.size:
        raise ValueError(f"this collective needs an extent divisible by P={group.size}, got {extent}")


def symmetric(workload: Workload, operands: OpTensors, group: Group, fast: bool = False) -> dict[str, Call]:
    """Returns the baselines that use torch's symmetric memory, by name; torch's fused op has no block scales.

    For `gemm_all_reduce` torch has no fused op: its one-shot and two-shot all-reduce follow the product.

    Args:
        workload: Op, shape and types.
        operands: Operands of this rank.
        group: Ranks of the op.
        fast: `use_fast_accum` of 8-bit operands.
    """
    ops, name = torch.ops.symm_mem, symmetric_name(group)
    spec, (x, weight, scale_x, scale_w), dtype = workload.spec, operands, workload.out_dtype
    if spec.gathers_output or spec.weight is None or (workload.blocks and spec.out != spec.x):
        return {}
    if spec.sums and spec.out is not None:

        def fused() -> Tensor:
            _require_even(workload.m, group)  # else torch's op fails with an IndexError
            if scale_x is None or scale_w is None:
                return ops.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group_name=name)
            return ops.fused_scaled_matmul_reduce_scatter(
                x, weight.t(), scale_x, scale_w.t(), "sum", 0, 0, name, [workload.m, workload.n],
                out_dtype=dtype, use_fast_accum=fast,
            )  # fmt: skip

        return {"torch-symm": fused}
    if spec.gathers_operand:

        def fused_gather() -> object:
            if scale_x is None or scale_w is None:
                return ops.fused_all_gather_matmul(x, [weight.t()], 0, group_name=name, return_A=False)
            return ops.fused_all_gather_scaled_matmul(
                x, [weight.t()], scale_x, [scale_w.t()], 0, name, [None], [None], [dtype], [fast]
            )

        quack = _quack(workload, x, weight, group) if scale_x is None else {}
        return {"torch-symm": fused_gather, **quack}
    import torch.distributed._symmetric_memory as symm_mem

    buffer: Tensor | None = None
    multiply = product(workload, operands, fast)

    def multiplied() -> Tensor:
        nonlocal buffer
        if buffer is None:  # at the first call, so that its failure is that variant's
            buffer = symm_mem.empty(workload.m, workload.n, dtype=dtype, device=x.device)
            symm_mem.rendezvous(buffer, group.process_group)
        if scale_x is None:
            return torch.mm(x, weight.t(), out=buffer)
        return buffer.copy_(cast(Tensor, multiply()))

    return {
        "one-shot": lambda: ops.one_shot_all_reduce(multiplied(), "sum", name),
        "two-shot": lambda: ops.two_shot_all_reduce_(multiplied(), "sum", name),
    }


QUACK_KERNEL = (128, 256, 2, 1)
"""Tile and cluster of quack's GEMM: the fastest on H200, and the ones of quack's benchmark."""


def _quack(workload: Workload, x: Tensor, weight: Tensor, group: Group) -> dict[str, Call]:
    """Returns the all-gather GEMM of quack-kernels, if installed; it supports the group of all ranks only."""
    if find_spec("quack") is None or group.size != dist.get_world_size():
        return {}
    runner: Any = None

    def gathered() -> Tensor:
        nonlocal runner
        from quack.distributed import AllGatherRunner
        from quack.gemm import gemm

        if runner is None:  # at the first call, so that its failure is this variant's
            _require_even(workload.m, group)
            runner = AllGatherRunner(len(x), workload.k, x.dtype, device=x.device)
        out = x.new_empty(workload.m, len(weight))
        with runner.gather(x) as (gathered_x, arrivals):
            gemm(gathered_x, weight, out, None, None, *QUACK_KERNEL, ag_args=arrivals)
        return out

    return {"quack": gathered}
