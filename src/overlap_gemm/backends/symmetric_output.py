"""GEMM all-gather and all-reduce into a symmetric output: an opt-in in addition to the ops, for inference.

::

    output = symmetric_output(rows, columns, torch.bfloat16, group=group)      # collective, once
    gathered = gemm_all_gather_into(output, x, weight)                         # output.tensor
    reduced = gemm_all_reduce_into(output, x_of_rank, weight_of_rank)          # output.tensor again

Complete tiles go straight to their columns in every rank's output (`kernels.symmetric_output`), without the
copies of M x N elements that `gemm_all_gather`, and `gemm_all_reduce` in its second half, make since their
result is any memory of the caller's. Outputs serve both, in any order.

**Lifetime.** A result is `SymmetricOutput.tensor` itself: it is valid until the next call that is given the
same output. What was queued on that call's stream before it reads the old values, as with any ``out=``: peers
store only after this rank has entered the call. Work on other streams has to be waited for. The memory is a
workspace of the group: `close_workspaces` frees it, `OVERLAP_GEMM_WORKSPACE_LIMIT` bounds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..kernels.geometry import ExchangeShape, slots_offset
from ..runtime.group import Group, GroupLike, find
from ..runtime.workspace import SizeClass, Workspace, obtain
from ..spec import GEMM_ALL_GATHER, GEMM_ALL_REDUCE, PATTERNS, OpSpec, pattern_into
from ..spec.sharding import Shards
from ..tuning.settings import settings
from ..tuning.space import default_config
from .compiled import compiled_symmetric
from .operands import ROW_ELEMENTS, aligned, aligned_vector, major
from .plan import Plan, Product
from .plans import DTYPES, exchange_arguments, keep_plan, kind_of, peers_for, resident_clusters, signature_of
from .ways import STORES, obtain_way

KIND = "output "
"""Of the workspaces that are outputs; their numbers follow."""


@dataclass(frozen=True)
class SymmetricOutput:
    """A matrix of the same sizes on every rank of a group, which all of them store to.

    Attributes:
        tensor: `[rows, columns]`, this rank's; rows lie at multiples of 16 bytes.
        group: the ranks.
        number: which of the group's outputs it is.
        workspace: the memory.
    """

    tensor: Tensor
    group: Group
    number: int
    workspace: Workspace

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Of the matrix at the next rank, the one after it, ..., this one."""
        bases, rank, offset = (
            self.workspace.memory.bases.tolist(),
            self.group.rank,
            self.workspace.size.zeroed,
        )
        return tuple(bases[(rank + 1 + i) % len(bases)] + offset for i in range(len(bases)))


def symmetric_output(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    *,
    group: GroupLike = None,
    device: torch.device | None = None,
) -> SymmetricOutput:
    """A new output. Collective: every rank of the group asks for the same ones, in the same order.

    Args:
        rows: M.
        columns: N.
        dtype: bfloat16 or float16.
        group: a ProcessGroup, a 1-D DeviceMesh, or None for the world.
        device: where; default: the current CUDA device, or the emulator's.

    Raises:
        ValueError: sizes or dtype that no kernel stores, or peers that stores do not reach.
        SymmetricMemoryError: on every rank, if one of them could not allocate.
    """
    found = find(group)
    if found.size == 1 or rows < 1 or columns < 1 or dtype not in DTYPES:
        raise ValueError(
            f"a symmetric output is bfloat16 or float16, of one element at least, of a group of two ranks at "
            f"least; got {rows} x {columns}, {dtype}, {found.size} ranks"
        )
    _check_columns(columns)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        device = device if torch.cuda.is_available() else torch.device("cpu")
    peers = peers_for(found, device)
    number = sum(size.kind.startswith(KIND) for size in peers.workspaces)
    nbytes = rows * columns * dtype.itemsize
    workspace = obtain(peers, SizeClass(slots_offset(0), nbytes, 1, 0, f"{KIND}{number}"))
    if not workspace.reaches_all:
        raise ValueError("a symmetric output needs ranks that reach each other's memory by stores")
    block = workspace.memory.local[workspace.size.zeroed :].view(dtype)
    return SymmetricOutput(block.view(rows, columns), found, number, workspace)


def gemm_all_gather_into(
    output: SymmetricOutput, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`gemm_all_gather` of the fused backend, without gradients, into ``output``; see there for its lifetime.

    Args:
        output: `[M, N]`, the same one on every rank.
        x: `[M, K]`, of its dtype, the same on every rank.
        weight: `[N_local, K]`, this rank's rows as `torch.chunk` cuts them, 8 or a multiple on every rank.
        bias: `[N_local]`.

    Returns:
        ``output.tensor``.

    Raises:
        ValueError: Sizes or dtypes that do not fit.
        CommTimeoutError, OverlappingCallsError, MismatchedCallsError: An earlier call here failed.
    """
    group, columns = output.group, output.tensor.shape[1]
    _check_columns(columns, group.size)
    return _into(GEMM_ALL_GATHER, output, x, weight, bias, Shards.even(columns, group.size).size(group.rank))


def gemm_all_reduce_into(
    output: SymmetricOutput, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`gemm_all_reduce` of the fused backend, in two shots, without gradients, into ``output``.

    Args:
        output: `[M, N]`, the same one on every rank.
        x: `[M, K_local]`, of its dtype.
        weight: `[N, K_local]`.
        bias: `[N]`, the same on every rank.

    Returns:
        ``output.tensor``, see there for its lifetime.

    Raises:
        ValueError: Sizes or dtypes that do not fit, or `configured` asks for a kernel whose epilogue does not
            sum (``mma="swap_ab"``).
        CommTimeoutError, OverlappingCallsError, MismatchedCallsError: An earlier call here failed.
    """
    return _into(GEMM_ALL_REDUCE, output, x, weight, bias, output.tensor.shape[1])


def _into(
    op: OpSpec, output: SymmetricOutput, x: Tensor, weight: Tensor, bias: Tensor | None, features: int
) -> Tensor:
    """Launches a call into an output, with a weight of so many ``features``."""
    tensor, pattern = output.tensor, pattern_into(op.name)
    (rows, columns), depth = tensor.shape, x.shape[1]
    wanted = (rows, depth), (features, depth)
    if (x.shape, weight.shape) != wanted or {x.dtype, weight.dtype} != {tensor.dtype}:
        raise ValueError(
            f"an output of {rows} x {columns}, {tensor.dtype}, takes x and weight of {wanted[0]} and "
            f"{wanted[1]}; got {tuple(x.shape)} {x.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )
    if not features:  # no columns of its own, but the others': B is some matrix that is not read
        weight, bias = x, None
    a, b = aligned(x), aligned(weight)
    extras = None if bias is None else (aligned_vector(bias, len(weight)),)
    # Of an all-reduce K is a rank's own, and kernels follow from what all ranks know.
    known = None if PATTERNS[pattern].returns else depth
    plan = _plan_for(pattern, output, known, major(a, "m"), major(b, "n"), bias is not None)
    plan.launch(a, (b,), (tensor,), (extras,))
    return tensor


def _plan_for(
    pattern: str, output: SymmetricOutput, depth: int | None, a_major: str, b_major: str, bias: bool
) -> Plan:
    """The plan of a call into this output; made at the first one of its kind."""
    group, tensor, asked = output.group, output.tensor, settings()
    peers = peers_for(group, tensor.device)
    key = (pattern, output.number, depth, a_major, b_major, bias, asked)

    def make() -> Plan:
        agreed, executor = peers.agreed, peers.executor
        kind, fields = kind_of(tensor.dtype, None, bias)
        shape = ExchangeShape.even(tensor.shape[0], tensor.shape[1], group.size, pattern)
        fields |= {"a_major": a_major, "b_major": b_major}
        if shape.spec.returns:
            fields |= {"own_last": True}
        config = default_config(agreed.arch, kind, shape, agreed.num_sms, depth, **fields)
        workspace, way = obtain_way(
            peers,
            STORES,
            lambda way: way.calls_class if shape.spec.to_all else way.tiles_class(config, shape),
        )
        reserve = peers.reserve_sms if asked.reserve_sms is None else asked.reserve_sms

        def compiled() -> Product:
            gemm = compiled_symmetric(executor, config, group.size, pattern)
            resident = resident_clusters(executor, config.cluster_ctas, reserve)
            return Product(config, gemm, min(resident, shape.num_clusters(config)))

        same = (replace(config, a_major="k", b_major="k", epilogue=()), "into", pattern)
        product = peers.prepare(same, f"compiling {config.name} for an output", compiled)
        exchange = exchange_arguments(workspace, way, shape.shard, peers.agreed.timeout_ns, executor)
        signature = signature_of(config, shape, way.device, output=output.number)
        return Plan(executor, pattern, (product,), workspace, exchange, into=output, signature=signature)

    return keep_plan(peers, key, make)


def _check_columns(columns: int, parts: int = 1) -> None:
    each = Shards.even(columns, parts).chunk
    if columns % ROW_ELEMENTS or each % ROW_ELEMENTS:
        raise ValueError(
            f"N={columns} and a rank's {each} columns of it must be multiples of {ROW_ELEMENTS}: tiles are "
            f"stored 16 bytes at a time"
        )
