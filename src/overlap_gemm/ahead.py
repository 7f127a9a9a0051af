"""What a program can have done before it serves, or captures a CUDA graph: compile, allocate, agree, load.

overlap_gemm.reserve(max_rows=8192, columns=8192)                      # the workspaces of all calls below
overlap_gemm.warmup("gemm_reduce_scatter", (8192, 8192, 28672), (1, 8192, 28672))
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import functional
from .backends import ahead
from .backends.base import OPS, Op, Problem
from .backends.fused import Fused
from .backends.select import choose
from .runtime.group import Group, GroupLike, find
from .runtime.order import forbid_capture
from .sharding import Shards


def warmup(
    op: Op,
    *shapes: tuple[int, int, int],
    group: GroupLike = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    bias: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
    backward: bool = False,
) -> None:
    """Makes calls of `op` on each shape, so that later ones compile, allocate and ask the ranks nothing.

    Collective: every rank of the group calls it with the same arguments. The operands are uninitialised and
    freed again. What `auto` takes in a CUDA graph is warmed up with what it takes outside of one, and both
    for callers that say the third extent (`k=`, `columns=`) and for those that do not.

    Args:
        op: The op's name.
        *shapes: (M, N, K) of the product over all ranks.
        group: As for the op.
        dtype: Of the operands.
        device: Of the operands; default: this process's GPU if the group serves GPUs, else the CPU.
        bias: Whether the calls will have one.
        backend: As for the op.
        deterministic: As for the op.
        reserve_sms: As for the op.
        backward: Warm the gradients up, too.

    Raises:
        CaptureError: A CUDA graph is being captured.
        ValueError, RuntimeError: As the op.
    """
    _check_op(op)
    ranks = find(group)
    where = _device(ranks, device)
    forbid_capture(where, "warmup cannot compile and allocate")
    call = getattr(functional, op)
    for m, n, k in shapes:
        x, weight, own_bias = _operands(op, m, n, k, ranks, dtype, where)
        for extents in _extents(op, m, n, k):
            third = "columns" if op == "all_gather_gemm" else "k"
            across = k if op == "gemm_all_gather" else extents.get(third)
            width = k if op == "all_gather_gemm" else n
            problem = Problem.of(op, m, width, across, x, ranks, deterministic, backend)
            eager, captured = (
                choose(replace(problem, captured=c), backend).backend.name for c in (False, True)
            )
            for way in [backend] if captured == eager else [backend, captured]:
                given = [t.requires_grad_(backward) for t in (x, weight, own_bias)]
                how: dict[str, Any] = {"bias": given[2] if bias else None, "backend": way, **extents}
                how |= {"deterministic": deterministic, "reserve_sms": reserve_sms}
                out = call(given[0], given[1], group=group, **how)
                if backward:
                    torch.autograd.grad(out, given[: 2 + bias], torch.empty_like(out))
                del out
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def reserve(
    *ops: Op,
    max_rows: int,
    columns: int,
    group: GroupLike = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> int:
    """Allocates the workspaces of all fused calls up to a size; those then allocate none.

    Collective: every rank of the group calls it with the same arguments.

    Args:
        *ops: The ops' names; all four if none. Those that exchange tiles share one workspace, of
            `2 * max_rows * columns` elements and more; `all_gather_gemm` has its own, of
            `max_rows * columns`.
        max_rows: The largest M over all ranks.
        columns: The largest N over all ranks; of `all_gather_gemm` the largest K. (Both are a model's hidden
            size where its linears are column- and row-parallel in turn.)
        group: As for an op.
        dtype: Of the operands.
        device: As for `warmup`.

    Returns:
        Bytes of this rank's device memory that the workspaces hold; 0 where there are no fused kernels, or
        only one rank.

    Raises:
        CaptureError: A CUDA graph is being captured.
        DisagreementError, SymmetricMemoryError: On every rank, if one of them could not allocate.
        ValueError: No such op.
    """
    for op in ops:
        _check_op(op)
    ranks = find(group)
    where = _device(ranks, device)
    forbid_capture(where, "reserve cannot allocate")
    empty = torch.empty(0, dtype=dtype, device=where)

    def is_fused(op: Op) -> bool:
        problem = Problem.of(op, max_rows, columns, None, empty, ranks, None, "fused")
        return Fused().why_not(problem) is None

    wanted = [op for op in ops or OPS if is_fused(op)]
    return ahead.reserve(ranks, where, dtype, wanted, max_rows, columns) if wanted else 0


def _check_op(op: str) -> None:
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")


def _device(group: Group, given: torch.device | str | None) -> torch.device:
    if given is None:
        given = "cuda" if "cuda" in group.device_types and torch.cuda.is_available() else "cpu"
    device = torch.device(given)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _operands(
    op: Op, m: int, n: int, k: int, group: Group, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's x, weight and bias, laid out as a layer's, holding anything."""

    def own(extent: int) -> int:
        return Shards.even(extent, group.size).size(group.rank)

    x, weight = {
        "all_gather_gemm": ((own(m), k), (own(n), k)),
        "gemm_reduce_scatter": ((m, own(k)), (n, own(k))),
        "gemm_all_reduce": ((m, own(k)), (n, own(k))),
        "gemm_all_gather": ((m, k), (own(n), k)),
    }[op]
    made = [torch.empty(shape, dtype=dtype, device=device) for shape in (x, weight, weight[:1])]
    return made[0], made[1], made[2]


def _extents(op: Op, m: int, n: int, k: int) -> Iterator[dict[str, int]]:
    """What callers say of the extents over all ranks: more, or less."""
    if op == "all_gather_gemm":
        yield {"rows": m, "columns": n}
        yield {"rows": m}
    elif op == "gemm_all_gather":
        yield {"columns": n}
    else:
        yield {"k": k}
        yield {}
