"""Preparation before serving or capturing a CUDA graph: compile, allocate, agree, load.

overlap_gemm.reserve(max_rows=8192, columns=8192)  # the workspaces of all calls below
overlap_gemm.warmup("gemm_reduce_scatter", (8192, 8192, 28672), (1, 8192, 28672))
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.autotuning import autotune_policy, copy_measurement
from ..backends.base import Problem
from ..backends.epilogues import with_empty_inputs
from ..backends.fused import reserved
from ..backends.fused.fused_backend import Fused
from ..backends.op_call import CallOperands, OpCall, extents_of
from ..backends.scales.product_types import ProductTypes
from ..backends.scales.scale_layouts import LAYOUTS
from ..backends.scales.scaling import FLOAT8, OUT_DTYPES, Block, blocks_named
from ..epilogues import Epilogue
from ..runtime.group import Group, GroupLike, find
from ..runtime.memory.workspace import SizeClass
from ..runtime.order import forbid_capture
from ..spec import OPS, op_named
from ..spec.promises import Invariant, Partials, Promises, check_promises
from ..spec.sharding import Shards
from ..tuning.measured import POLICIES, Policy
from .registration import function_of


def warmup(
    op: str,
    *shapes: tuple[int, int | Sequence[int], int],
    group: GroupLike = None,
    dtype: torch.dtype = torch.bfloat16,
    block: Block = None,
    device: torch.device | str | None = None,
    bias: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
    backward: bool = False,
    autotune: Policy | None = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """Makes calls of `op` on each shape, so that later calls need no compilation, allocation or agreement.

    On GPUs the candidates for each shape are timed, unless a file contains their times or calls were made
    before (`backends.autotuning`): seconds to a minute per shape, once per machine.

    Collective: every rank of the group calls it with the same arguments. The operands are uninitialized and
    freed afterwards; workspaces and kernels are kept. The choices of `auto` in a CUDA graph and outside of
    one are warmed up. They include calls with all extents, calls without the third one (`k=`, `columns=`),
    and, with equal shards, calls that pass no extent.

    Args:
        op: Name of the op.
        *shapes: (M, N, K) of the product over all ranks. A tuple N has the columns of each weight of a list.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        dtype: Type of the operands; 8-bit operands have scales and bfloat16 results.
        block: Rows of the weight, and elements of K, that share a scale: 128 or 32. ``"mx"``: scales of MX
            types. None: scales per row.
        device: Device of the operands; default: this process's GPU if the group supports GPUs, otherwise the
            CPU.
        bias: True if the calls will have a bias.
        backend: Backend of the calls.
        deterministic: `deterministic` of the calls.
        reserve_sms: `reserve_sms` of the calls.
        backward: Warm up the gradients, too.
        autotune: ``"measure"``: `auto` uses the fastest candidate as measured now. ``"model"``: the fastest
            as predicted. None: ``OVERLAP_GEMM_AUTOTUNE``, otherwise ``"measure"`` on GPUs.
        partials: Element type of partial sums between ranks, "float32" or None.
        invariant: Promise about bits, see `gemm_reduce_scatter`.
        epilogue: Epilogue of the calls, without its inputs: these are of `dtype`, scalars and values of rows
            float32. One of pairs is warmed up for a weight `[N, K]`, and in `all_gather_gemm` for two
            `[N / 2, K]`, too.

    Raises:
        CaptureError: A CUDA graph is being captured.
        ValueError, TypeError, RuntimeError: The op raises for these arguments; it has no gradient of 8-bit
        operands.
        ValueError: There is no such policy. Or N is a tuple, and the op takes one weight.
    """
    if autotune not in (None, *POLICIES):
        raise ValueError(f"warmup: autotune must be one of {', '.join(POLICIES)}, or None, got {autotune!r}")
    spec = op_named(op)
    ranks = find(group)
    where = _device(ranks, device)
    forbid_capture(where, "warmup cannot compile and allocate")
    call = function_of(op)
    local_shard = Shards.owned_by(ranks.size, ranks.rank)
    out_dtype = OUT_DTYPES[0] if dtype in FLOAT8 else None
    layout = LAYOUTS[blocks_named(block, dtype)]
    check_promises(Promises(partials, invariant))
    promises: dict[str, Any] = {"partials": partials} if partials else {}
    promises |= {"invariant": invariant} if invariant else {}
    options = OpCall(
        backend=backend, deterministic=deterministic, out_dtype=out_dtype, block=block, **promises
    )
    for m, columns, k in shapes:
        widths = (columns,) if isinstance(columns, int) else tuple(columns)
        if len(widths) != 1 and not (spec.takes_lists and widths):
            raise ValueError(f"warmup: {op} takes one weight, and N must be a number, got {columns}")
        n = sum(widths)
        x_shape, weight_shape = spec.shapes(m, n, k, local_shard)
        x = torch.empty(x_shape, dtype=dtype, device=where)
        of_weights = [
            torch.empty(spec.shapes(m, one, k, local_shard)[1], dtype=dtype, device=where) for one in widths
        ]
        weight, local_bias = of_weights[0], torch.empty(n, dtype=out_dtype or dtype, device=where)
        scales: dict[str, Any] = {}
        if out_dtype is not None:
            of_both = layout.unit(x_shape, weight_shape, where)
            scales = {**dict(zip(("scale_x", "scale_w"), of_both, strict=True)), "block": block}
        # Extents with and without the third one.
        every, least = (spec.arguments(m, n, k, least) for least in (False, True))
        variants = [every] if every == least else [every, least]
        operands = CallOperands(x, of_weights if len(widths) > 1 else weight)
        problems = [
            Problem.of(op, options._replace(**extents_of(spec.resolved(m, n, k, extents))), operands, ranks)
            for extents in variants
        ]

        several = [of_weights]
        applied = None
        if epilogue is not None:
            applied = with_empty_inputs(epilogue, spec, x, (m, n), local_shard)
            if epilogue.pairs and spec.takes_lists:
                several.append([x.new_empty(len(weight) // 2, weight.shape[1]) for _ in range(2)])

        def make(extents: dict[str, int]) -> None:
            how: dict[str, Any] = {"backend": backend, "epilogue": applied, **extents}  # noqa: B023
            how |= {"deterministic": deterministic, "reserve_sms": reserve_sms}
            how |= {**promises, **scales}  # noqa: B023
            for weights in several:  # noqa: B023
                biases = [local_bias[: len(one)] for one in weights] if bias else []  # noqa: B023
                operands = [t.requires_grad_(backward) for t in (x, *weights, *biases)]  # noqa: B023
                is_list = len(weights) > 1
                if is_list and scales:  # noqa: B023
                    each = [layout.unit(x_shape, one.shape, where)[1] for one in weights]  # noqa: B023
                    how["scale_w"] = each
                how["bias"] = (biases if is_list else biases[0]) if bias else None
                run = partial(call, x, weights if is_list else weights[0], group=group, **how)  # noqa: B023
                if backward and epilogue is not None:  # which is another call if a gradient is needed
                    with torch.no_grad():
                        run()
                out = run()
                if backward:
                    outs = out if isinstance(out, list) else [out[0] if isinstance(out, tuple) else out]
                    torch.autograd.grad(outs, operands, [torch.empty_like(one) for one in outs])

        for problem, extents in zip(problems, variants, strict=True):
            if problem is not problems[0]:  # measurements do not depend on the extents that callers pass
                copy_measurement(problems[0], problem, backend, ranks, where)
            with autotune_policy(spec, autotune, backend, ranks, where):
                make(extents)
        if least and all(extent % ranks.size == 0 for extent in least.values()):
            make({})
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def reserve(
    *ops: str,
    max_rows: int,
    columns: int,
    group: GroupLike = None,
    dtype: torch.dtype = torch.bfloat16,
    block: Block = None,
    device: torch.device | str | None = None,
) -> int:
    """Allocates the workspaces of all fused calls up to a size; these calls then allocate none.

    Collective: every rank of the group calls it with the same arguments.

    Args:
        *ops: Names of the ops; default: all. Ops that exchange tiles share a workspace of at least `2 *
            max_rows * columns` elements. Those that send x share one of `max_rows * columns`.
        max_rows: Maximum of M over all ranks.
        columns: Maximum of N over all ranks; of K for ops that send x. (Both are the hidden
            size in a model with alternating column- and row-parallel linears.)
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        dtype: Type of the operands; an 8-bit type stands for calls with scales and 16-bit results.
        block: Block of the scales, as in `warmup`; a workspace for block scales is large enough for row
            scales.
        device: Device of the operands, as in `warmup`.

    Returns:
        Bytes of this rank's device memory in workspaces; 0 without fused kernels, or with only one rank.

    Raises:
        CaptureError: A CUDA graph is being captured.
        DisagreementError, SymmetricMemoryError: On every rank, if one of them could not allocate.
        ValueError: There is no such op or block.
    """
    for op in ops:
        op_named(op)
    ranks = find(group)
    where = _device(ranks, device)
    forbid_capture(where, "reserve cannot allocate")
    needed = _needed_classes(ops or tuple(OPS), ranks, where, dtype, block, max_rows, columns)
    return reserved.allocate(ranks, where, needed)


def _needed_classes(
    ops: Sequence[str],
    ranks: Group,
    where: torch.device,
    dtype: torch.dtype,
    block: Block,
    max_rows: int,
    columns: int,
) -> dict[str, SizeClass]:
    """Returns the size classes that fused kernels need for these arguments of `reserve`, by kind."""
    empty = torch.empty(0, dtype=dtype, device=where)
    blocks = blocks_named(block, dtype)
    out_dtype = OUT_DTYPES[0] if dtype in FLOAT8 else None  # float16 has the same size

    def is_fused(op: str) -> bool:
        call = OpCall(
            rows=max_rows, columns=columns, k=columns, backend="fused", out_dtype=out_dtype, block=block
        )
        problem = Problem.of(op, call, CallOperands(empty, empty), ranks)
        return Fused().why_not(problem) is None

    fused_ops = [op for op in ops if is_fused(op)]
    if not fused_ops:
        return {}
    types = ProductTypes(dtype, None, out_dtype, blocks)
    return reserved.needed_classes(ranks, where, types, fused_ops, max_rows, columns)


class LayerOp(NamedTuple):
    """Op of a layer, whose gradient calls the op's dual.

    Attributes:
        module: Name of the module.
        op: Name of the op.
        columns: N of the op; for `all_gather_gemm` K.
        weight: Weight, for its dtype and device.
        group: ProcessGroup, mesh or None.
    """

    module: str
    op: str
    columns: int
    weight: Tensor
    group: GroupLike

    def symmetric_bytes(self, max_rows: int) -> dict[str, int]:
        """Returns the bytes of each kind of workspace of calls up to `max_rows` rows and of their gradients.

        Peers are assumed to have P2P access. The first call of a group is collective.
        """
        ranks, weight = find(self.group), self.weight
        ops = [op for op in (self.op, OPS[self.op].dual) if op is not None]
        needed = _needed_classes(ops, ranks, weight.device, weight.dtype, None, max_rows, self.columns)
        return {kind: size.nbytes(has_p2p=True) for kind, size in needed.items()}


def _device(group: Group, requested: torch.device | str | None) -> torch.device:
    """Returns the device of a group's operands: the requested one, with index, or the default."""
    if requested is None:
        requested = "cuda" if "cuda" in group.device_types and torch.cuda.is_available() else "cpu"
    device = torch.device(requested)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
