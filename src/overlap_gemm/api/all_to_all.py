"""`gemm_all_to_all` and its dual, `all_to_all_gemm`: registered ops (`registration.register_op`).

Sequence-parallel attention (Ulysses) exchanges rows of a sequence for columns of heads before attention, and
back after it. The tiles' exchange inside the fused kernel is `exchange.all_to_all`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from ..dispatch.head_shards import Heads, HeadShards, heads_of_each, refuse
from ..runtime.group import group_name, group_rank, group_size
from ..spec import ALL_TO_ALL_GEMM, GEMM_ALL_TO_ALL, PatternSpec
from .registration import listed, register_op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import AllToAllOptions, GemmAllToAllOptions

__all__ = ["all_to_all_gemm", "gemm_all_to_all"]

_gemm_all_to_all = register_op(
    GEMM_ALL_TO_ALL,
    PatternSpec(
        "column_exchange", GEMM_ALL_TO_ALL.name, cut="columns", to_all=False, returns=False,
        kernel="overlap_gemm.exchange.all_to_all:AllToAll", has_epilogue=True, takes_lists=True,
    ),
)  # fmt: skip
_all_to_all_gemm = register_op(
    ALL_TO_ALL_GEMM,
    PatternSpec(
        "input_exchange", ALL_TO_ALL_GEMM.name, cut="rows", to_all=False, returns=False,
        kernel="overlap_gemm.gather.input_exchange:InputExchange", has_epilogue=True,
    ),
)  # fmt: skip


def gemm_all_to_all(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    heads: Heads = None,
    **options: "Unpack[GemmAllToAllOptions]",
) -> Any:
    """Multiplies this rank's rows and exchanges them: this rank gets its columns of every rank's rows.

    It is the projection before attention. x is sharded by sequence; the result has the full sequence and this
    rank's heads.

    Args:
        x: This rank's rows `[S_local, ..., K]`, as for `all_gather_gemm`.
        weight: `[N, K]`, the same on every rank. Or a list of weights (q, k, v): their products are exchanged
            at once, fused by one kernel or one for each weight, as `explain` prints. Its gradient is summed
            over the ranks, and complete on every rank.
        heads: Heads, of N / heads columns each, that are not cut; of a list of weights one number for each,
            or one for all. Fewer than P must divide P: rank r gets head `r * heads // P`. If P does not
            divide the heads, `block` and `epilogue` raise TypeError. Default: columns are cut wherever
            `torch.chunk` does.
        **options: `bias`, `[N]` or a list, the same on every rank; `rows`, `dim` as for `all_gather_gemm`;
            `group`, `backend`, `deterministic`, `reserve_sms`, `scale_x`, `scale_w`, `out_dtype`, `block`,
            `partials`, `invariant`, `epilogue` as for `gemm_reduce_scatter`.

    Returns:
        `[S, ..., N_local]`, or a list of such tensors. N_local is this rank's share of N as `torch.chunk`
        cuts it, with `heads` its heads as `torch.chunk` divides them.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    if heads is None:
        return _gemm_all_to_all(x, weight, **options)
    is_list = isinstance(weight, (list, tuple))
    weights = listed(weight)
    if not _are_matrices(x, weights):
        return _gemm_all_to_all(x, weight, **options)  # which raises
    name, group = GEMM_ALL_TO_ALL.name, group_name(options.get("group"))
    numbers = heads_of_each(name, heads, weights)
    shards = [
        HeadShards(name, len(one), number, group_size(group))
        for one, number in zip(weights, numbers, strict=True)
    ]
    if all(of.is_chunked for of in shards):
        return _gemm_all_to_all(x, weight, **options)
    how: dict[str, Any] = {**options}
    for of in shards:
        refuse(of, how, ("block", "epilogue"))
    for option in ("bias", "scale_w"):
        values = [] if how.get(option) is None else listed(how[option])
        if len(values) == len(shards):
            pairs = list(zip(shards, values, strict=True))
            if not all(_fits(one, of.columns, option) for of, one in pairs):
                return _gemm_all_to_all(x, weight, **options)  # which raises, with the shapes passed
            how[option] = [
                one if _is_for_all(one, option) else of.expanded(one, list(one.shape).index(of.columns))
                for of, one in pairs
            ]
    outs = _gemm_all_to_all(x, [of.expanded(one, 0) for of, one in zip(shards, weights, strict=True)], **how)
    rank = group_rank(group)
    outs = [out[..., : of.shards.size(rank)] for of, out in zip(shards, outs, strict=True)]
    return outs if is_list else outs[0]


def all_to_all_gemm(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    heads: int | None = None,
    **options: "Unpack[AllToAllOptions]",
) -> Any:
    """Exchanges this rank's columns for its rows, of every rank's columns, and multiplies these.

    It is the projection after attention, and its exchange is the inverse of that of `gemm_all_to_all`.

    8-bit operands need `block=`, because each rank's part of K has its own scales. `scale_x` is of this
    rank's columns, and is sent with them; `scale_w` is the same on every rank. With blocks of 128 or 32 they
    are `[S, ..., ceil(K_local / block)]` and `[ceil(N / block), ceil(K / block)]`, with `"mx"` vectors.
    ceil(K / P) is a multiple of the block (of MX types: 32); the fused kernel needs K / P to be a multiple
    of 128. No gradient.

    Args:
        x: This rank's columns of all rows, `[S, ..., K_local]`; K_local is its share of K as `torch.chunk`
            cuts it.
        weight: `[N, K]` or a list, as for `gemm_all_to_all`.
        heads: Heads, of K / heads columns of x each, that are not cut; P or more. With scales a multiple of
            P.
        **options: Options of `gemm_all_to_all` except `rows`, which x has.

    Returns:
        `[S_local, ..., N]`, or a list of such tensors; S_local is this rank's share of S.

    Raises:
        TypeError: Operands have scales that are not of blocks, or scales and `heads` that P does not divide.
        ValueError: `heads` is less than P, or x has not this rank's share of the columns. Or P > 1, and
            `block` does not divide ceil(K / P).
        ValueError, TypeError, RuntimeError: The conditions of `all_gather_gemm`.
    """
    if heads is None:
        return _all_to_all_gemm(x, weight, **options)
    is_list = isinstance(weight, (list, tuple))
    weights = listed(weight)
    if not _are_matrices(x, weights):
        return _all_to_all_gemm(x, weight, **options)  # which raises
    name, group = ALL_TO_ALL_GEMM.name, group_name(options.get("group"))
    of = HeadShards(name, weights[0].shape[1], heads, group_size(group))
    if of.replicas > 1:
        raise ValueError(f"{name}: heads={heads} must be the number of ranks, {of.world}, or more")
    size = of.shards.size(group_rank(group))
    if x.shape[-1] != size:
        raise ValueError(
            f"{name}: x must have this rank's heads as its columns, {size} of {of.columns} in {heads} heads "
            f"on {of.world} ranks, got {list(x.shape)}"
        )
    if not of.is_chunked:
        refuse(of, options, ("scale_x", "scale_w"))
        x = F.pad(x, (0, of.shards.chunk - size))
        weights = [of.expanded(one, 1) for one in weights]
    return _all_to_all_gemm(x, weights if is_list else weights[0], **options)


def _are_matrices(x: Any, weights: Sequence[Any]) -> bool:
    """Returns whether x has columns, and there are weights, all of them matrices."""
    kinds = [isinstance(one, Tensor) and one.ndim == 2 for one in weights]
    return isinstance(x, Tensor) and x.ndim > 0 and len(kinds) > 0 and all(kinds)


def _is_for_all(one: Tensor, option: str) -> bool:
    """Returns whether the value of an option is one scale for all columns of a weight."""
    return option == "scale_w" and one.numel() == 1


def _fits(one: Any, columns: int, option: str) -> bool:
    """Returns whether the value of `bias` or `scale_w` has a shape that the op allows for `columns`."""
    if not isinstance(one, Tensor):
        return False
    shapes = ([columns],) if option == "bias" else ([columns, 1], [1, columns])
    return list(one.shape) in shapes or _is_for_all(one, option)
