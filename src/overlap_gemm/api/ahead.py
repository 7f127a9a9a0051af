"""What a program can have done before it serves, or captures a CUDA graph: compile, allocate, agree, load.

overlap_gemm.reserve(max_rows=8192, columns=8192)                      # the workspaces of all calls below
overlap_gemm.warmup("gemm_reduce_scatter", (8192, 8192, 28672), (1, 8192, 28672))
"""

from dataclasses import replace
from typing import Any

import torch

from ..backends.autotuning import asking, share
from ..backends.base import Problem
from ..backends.fused import reserved as ahead
from ..backends.fused.fused_backend import Fused
from ..backends.op_call import OpCall, extents_of
from ..backends.scales.scaling import FLOAT8, OUT_DTYPES, Block, blocks_named, unit_scales
from ..backends.select import choose
from ..runtime.group import Group, GroupLike, find
from ..runtime.order import forbid_capture
from ..spec import OPS, op_named
from ..spec.sharding import Shards
from ..tuning.measured import POLICIES, Policy
from .registration import function_of


def warmup(
    op: str,
    *shapes: tuple[int, int, int],
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
) -> None:
    """Makes calls of `op` on each shape, so that later ones compile, allocate and ask the ranks nothing.

    On GPUs the candidates for each shape are timed, unless a file has them or calls were made before
    (`backends.autotuning`): seconds to a minute a shape, once on a machine.

    Collective: every rank of the group calls it with the same arguments. The operands are uninitialised and
    freed again. What `auto` takes in a CUDA graph is warmed up with what it takes outside of one, and both
    for callers that say the third extent (`k=`, `columns=`) and for those that do not (of equal shards, for
    those that say nothing at all, too).

    Args:
        op: The op's name.
        *shapes: (M, N, K) of the product over all ranks.
        group: As for the op.
        dtype: Of the operands; of 8 bits they have scales, and results are bfloat16.
        block: Rows of the weight, and elements of K, that share a scale, 128 or 32; ``"mx"``: scales are
            those of MX types; None: of rows.
        device: Of the operands; default: this process's GPU if the group serves GPUs, else the CPU.
        bias: Whether the calls will have one.
        backend: As for the op.
        deterministic: As for the op.
        reserve_sms: As for the op.
        backward: Warm the gradients up, too.
        autotune: ``"measure"``: `auto` takes what is fastest as measured now; ``"model"``: what is expected
            to be. None: what ``OVERLAP_GEMM_AUTOTUNE`` says, else ``"measure"`` on GPUs.

    Raises:
        CaptureError: A CUDA graph is being captured.
        ValueError, TypeError, RuntimeError: As the op, which has no gradient of 8-bit operands.
        ValueError: There is no such policy.
    """
    if autotune not in (None, *POLICIES):
        raise ValueError(f"autotune={autotune!r} must be one of {', '.join(POLICIES)}, or None")
    spec = op_named(op)
    ranks = find(group)
    where = _device(ranks, device)
    forbid_capture(where, "warmup cannot compile and allocate")
    call = function_of(op)
    own, out_dtype = Shards.owned_by(ranks.size, ranks.rank), OUT_DTYPES[0] if dtype in FLOAT8 else None
    blocks = blocks_named(block, dtype)
    asked = OpCall(backend=backend, deterministic=deterministic, out_dtype=out_dtype, block=block)
    for m, n, k in shapes:
        x_shape, weight_shape = spec.shapes(m, n, k, own)
        layouts = (x_shape, weight_shape, weight_shape[:1])
        kinds = (dtype, dtype, out_dtype or dtype)
        x, weight, own_bias = (
            torch.empty(shape, dtype=kind, device=where) for shape, kind in zip(layouts, kinds, strict=True)
        )
        scales: dict[str, Any] = {}
        if out_dtype is not None:
            of_both = unit_scales(x_shape, weight_shape, blocks, where)
            scales = {**dict(zip(("scale_x", "scale_w"), of_both, strict=True)), "block": block}
        said, least = (spec.arguments(m, n, k, least) for least in (False, True))
        ways_of = [said] if said == least else [said, least]
        problems = [
            Problem.of(op, asked._replace(**extents_of(spec.known(m, n, k, extents))), x, ranks, weight)
            for extents in ways_of
        ]

        def make(way: str, extents: dict[str, int]) -> None:
            given = [t.requires_grad_(backward) for t in (x, weight, own_bias)]  # noqa: B023
            how: dict[str, Any] = {"bias": given[2] if bias else None, "backend": way, **extents}
            how |= {"deterministic": deterministic, "reserve_sms": reserve_sms, **scales}  # noqa: B023
            out = call(given[0], given[1], group=group, **how)
            if backward:
                torch.autograd.grad(out, given[: 2 + bias], torch.empty_like(out))

        for problem, extents in zip(problems, ways_of, strict=True):
            if problem is not problems[0]:  # what was measured does not depend on what callers say
                share(problems[0], problem, backend, ranks, where)
            with asking(autotune, backend, ranks, where):
                make(backend, extents)
            eager, captured = (
                choose(replace(problem, captured=c), backend).backend.name for c in (False, True)
            )
            if captured != eager:
                make(captured, extents)
        if least and all(extent % ranks.size == 0 for extent in least.values()):
            make(backend, {})
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
    """Allocates the workspaces of all fused calls up to a size; those then allocate none.

    Collective: every rank of the group calls it with the same arguments.

    Args:
        *ops: The ops' names; all if none. Those that exchange tiles share one workspace, of
            `2 * max_rows * columns` elements and more; `all_gather_gemm` has its own, of
            `max_rows * columns`.
        max_rows: The largest M over all ranks.
        columns: The largest N over all ranks; of `all_gather_gemm` the largest K. (Both are a model's hidden
            size where its linears are column- and row-parallel in turn.)
        group: As for an op.
        dtype: Of the operands; of 8 bits it is for calls with scales, with results of 16 bits.
        block: As for `warmup`; what is reserved for scales of blocks is enough for scales of rows.
        device: As for `warmup`.

    Returns:
        Bytes of this rank's device memory that the workspaces hold; 0 where there are no fused kernels, or
        only one rank.

    Raises:
        CaptureError: A CUDA graph is being captured.
        DisagreementError, SymmetricMemoryError: On every rank, if one of them could not allocate.
        ValueError: No such op, or no such block.
    """
    for op in ops:
        op_named(op)
    ranks = find(group)
    where = _device(ranks, device)
    forbid_capture(where, "reserve cannot allocate")
    empty = torch.empty(0, dtype=dtype, device=where)
    blocks = blocks_named(block, dtype)

    out_dtype = OUT_DTYPES[0] if dtype in FLOAT8 else None  # float16 is as wide

    def is_fused(op: str) -> bool:
        call = OpCall(
            rows=max_rows, columns=columns, k=columns, backend="fused", out_dtype=out_dtype, block=block
        )
        problem = Problem.of(op, call, empty, ranks, empty)
        return Fused().why_not(problem) is None

    wanted = [op for op in ops or OPS if is_fused(op)]
    sizes = max_rows, columns, out_dtype, blocks
    return ahead.reserve(ranks, where, dtype, wanted, *sizes) if wanted else 0


def _device(group: Group, given: torch.device | str | None) -> torch.device:
    if given is None:
        given = "cuda" if "cuda" in group.device_types and torch.cuda.is_available() else "cpu"
    device = torch.device(given)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
