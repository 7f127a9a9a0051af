"""The four ops as users call them: any leading dimensions, any shard lengths, checked arguments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..backends.op_call import BackendName, Length, OpCall
from ..backends.scales.scaling import Block
from ..dispatch import ops
from ..dispatch.bound import call_op
from ..dispatch.with_epilogue import call_with_epilogue
from ..epilogues import Applied
from ..runtime.group import GroupLike
from ..spec.promises import Invariant, Partials

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import GatherOptions, OutputOptions, ReduceOptions, ScatterOptions

__all__ = [
    "Length",
    "all_gather_gemm",
    "column_parallel_gemm",
    "gemm_all_gather",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
]


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    return_gathered: Literal[False] = False,
    **options: "Unpack[GatherOptions]",
) -> Tensor: ...


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    return_gathered: Literal[True],
    **options: "Unpack[GatherOptions]",
) -> tuple[Tensor, Tensor]: ...


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    return_gathered: Literal[False] = False,
    **options: "Unpack[GatherOptions]",
) -> list[Tensor]: ...


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    return_gathered: Literal[True],
    **options: "Unpack[GatherOptions]",
) -> tuple[list[Tensor], Tensor]: ...


@overload
def all_gather_gemm(
    x_shard: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    bias: Tensor | Sequence[Tensor] | None = None,
    return_gathered: bool = False,
    epilogue: Applied | None = None,
    **options: "Unpack[GatherOptions]",
) -> Any: ...


def all_gather_gemm(
    x_shard: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    return_gathered: bool = False,
    backend: BackendName = "auto",
    rows: Length = None,
    dim: int = 0,
    save_gathered: bool = False,
    columns: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    block: Block = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
    epilogue: Applied | None = None,
) -> Any:
    """Gathers the rows of x from all ranks and multiplies them with this rank's weight.

    The column-parallel half of a tensor-parallel layer with sequence parallelism. The rows are sharded
    equally, or, with `rows`, as `torch.chunk` cuts them; a shard may be short or empty then.

    Args:
        x_shard: This rank's rows `[M_local, ..., K]`; float32, bfloat16, float16 (or float64).
        weight: `[N_local, K]` as in `nn.Linear`, or a list of such weights that share one gather (q/k/v,
            gate/up).
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        bias: `[N_local]`, or one per weight if `weight` is a list.
        return_gathered: Return the gathered x as well.
        backend: "auto" or a backend's name; see `explain`.
        rows: None if every rank has as many rows as this one: the first eager call of a kind compares, and
            raises on all if they have not, later ones ask nobody. Else M, the sum of the ranks' `M_local`, of
            which each must have what `torch.chunk` gives it. Or "equal", which is None without a comparison;
            or "exchange": the ranks ask each other in every call, one small all-gather between the hosts,
            which a graph (torch.compile's, a captured one) cannot.
        dim: The sharded dimension of `x_shard`, 0 for Megatron's `[s, b, h]`, 1 for `[b, s, h]` (which costs
            a copy unless b = 1).
        save_gathered: Keep the gathered x for the weight gradient, P times the shard's memory, instead of
            gathering it again in backward (by copy engines alongside the gradient of x, where that is fused
            and shards are not small). Always so where `return_gathered` keeps it alive anyway.
        columns: N of all weights over all ranks; or "equal" if every rank has as many columns as this one; or
            None: what `auto` chooses then does not depend on it.
        deterministic: Whether the sums of the gradient must come out bitwise the same from call to call, as
            for `gemm_reduce_scatter`.
        reserve_sms: SMs that fused kernels leave to others on this rank, for the gradient's, too; None: what
            `configured` or ``OVERLAP_GEMM_RESERVE_SMS`` says. Other backends take what their libraries take.
        scale_x: As for `gemm_reduce_scatter`, of this rank's shard.
        scale_w: As for `gemm_reduce_scatter`, or one per weight if `weight` is a list.
        out_dtype: As for `gemm_reduce_scatter`.
        block: As for `gemm_reduce_scatter`.
        partials: As for `gemm_reduce_scatter`.
        invariant: As for `gemm_reduce_scatter`.
        epilogue: As for `gemm_reduce_scatter`; of one weight, or of pairs of the columns of two.

    Returns:
        `[M, ..., N_local]`, or a list with one such tensor per weight. With `return_gathered` a pair of that
        and the gathered `[M, ..., K]`. Of an epilogue with outputs, in place of the product a tuple of that
        and each output.

    Raises:
        ValueError, TypeError: Arguments that do not fit together; the message holds the values and the rule.
        RuntimeError: A peer is gone, did not answer within the group's timeout, or (`OVERLAP_GEMM_CHECK=1`)
            disagrees about the call.
    """
    several = isinstance(weight, (list, tuple))
    weights = list(weight) if isinstance(weight, (list, tuple)) else [weight]
    biases = list(bias) if isinstance(bias, (list, tuple)) else [] if bias is None else [bias]
    scales_w = scale_w if scale_w is None or isinstance(scale_w, (list, tuple)) else [scale_w]
    saved = save_gathered and scale_x is None  # with scales there is no gradient to save it for
    call = OpCall(
        "", rows, columns, None, 0, dim, return_gathered or saved,
        backend, deterministic, reserve_sms, False, out_dtype, block, partials, invariant,
    )  # fmt: skip
    if epilogue is not None:
        scales = scale_x, scale_w
        moved, *outs = call_with_epilogue(
            ops.all_gather_gemm, x_shard, weights, biases, group, call, epilogue, *scales
        )
        return (_one(outs), moved) if return_gathered else _one(outs)
    found = call_op(ops.all_gather_gemm, x_shard, weights, biases, group, call, scale_x, scales_w)
    products = found[1:] if several else found[1]
    return (products, found[0]) if return_gathered else products


@overload
def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, *, epilogue: None = None, **options: "Unpack[ScatterOptions]"
) -> Tensor: ...


@overload
def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, *, epilogue: Applied, **options: "Unpack[ScatterOptions]"
) -> Any: ...


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    backend: BackendName = "auto",
    dim: int = 0,
    k: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block: Block = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
    epilogue: Applied | None = None,
) -> Any:
    """Multiplies with this rank's slice of the weight and keeps this rank's rows of the sum over the ranks.

    The row-parallel half of a tensor-parallel layer with sequence parallelism. Every backend but `torch`
    accumulates the sum in float32 (or wider) in rank order: bitwise the same from call to call.

    Args:
        x: `[M, ..., K_local]`; float32, bfloat16, float16 (or float64). K_local may differ between ranks.
        weight: `[N, K_local]`.
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        bias: `[N]`, the same on every rank; added once, after the sum. Every rank gets its whole gradient.
        backend: "auto" or a backend's name; see `explain`.
        dim: The dimension of x along which the result is sharded, as in `all_gather_gemm`.
        k: K, the sum of the ranks' `K_local`; or "equal" if every rank has as much as this one; or None: what
            `auto` chooses then does not depend on it.
        deterministic: True keeps `auto` to backends that sum in rank order; None asks
            `torch.are_deterministic_algorithms_enabled()`. The same on every rank.
        reserve_sms: As for `all_gather_gemm`.
        scale_x: Where x and weight are float8_e4m3fn or float8_e5m2: float32, `[M, ..., 1]`, an element per
            row of x, or one element. This rank's own rows' scales, whatever other ranks have.
        scale_w: Likewise `[N, 1]` or `[1, N]`, or one element. Of float32, as scale_x, or float8_e8m0fnu.
        out_dtype: Of result and bias where operands have scales: bfloat16 (which None means), float16 or
            float32.
        block: Rows of the weight, and elements of K, that share a scale, 128 or 32: scale_x is
            `[M, ..., ceil(K / block)]`, scale_w `[ceil(N / block), ceil(K / block)]` then; or ``"mx"``: they
            are those of MX types. The same on every rank. None: of rows. See docs/fp8.md.
        partials: "float32": what the ranks' partial sums are sent as; None: rounded once to the type of x (of
            `out_dtype`).
        invariant: "batch": a row's bits do not depend on the other rows, nor on how many there are; "ranks"
            ("ranks:4", "ranks:2"): nor on the number of ranks up to 8 (4, 2), which sum K in as many equal
            parts, in float32. The gradients' bits, too. See docs/invariance.md. The same on every rank.
        epilogue: What the complete (or partial) sums go through before they are rounded and stored: an
            `overlap_gemm.epilogue` with its inputs, of the shape of this rank's result: docs/epilogues.md.

    Returns:
        `[M_local, ..., N]`; M_local is this rank's share of M as `torch.chunk` cuts it. Of an epilogue with
        outputs a tuple of that and each output.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    call = OpCall(
        k=k, dim=dim, backend=backend, deterministic=deterministic, reserve_sms=reserve_sms,
        out_dtype=out_dtype, block=block, partials=partials, invariant=invariant,
    )  # fmt: skip
    given = ops.gemm_reduce_scatter, x, weight, bias, group, call
    if epilogue is not None:
        return _one(call_with_epilogue(*given, epilogue, scale_x, scale_w))
    return call_op(*given, scale_x, scale_w)


@overload
def gemm_all_reduce(
    x: Tensor, weight: Tensor, *, epilogue: None = None, **options: "Unpack[ReduceOptions]"
) -> Tensor: ...


@overload
def gemm_all_reduce(
    x: Tensor, weight: Tensor, *, epilogue: Applied, **options: "Unpack[ReduceOptions]"
) -> Any: ...


def gemm_all_reduce(
    x: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    backend: BackendName = "auto",
    k: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block: Block = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
    epilogue: Applied | None = None,
) -> Any:
    """Multiplies with this rank's slice of the weight and sums over the ranks.

    The row-parallel half of a tensor-parallel layer without sequence parallelism. Summed as in
    `gemm_reduce_scatter`; all ranks get bitwise the same.

    Args:
        x: `[..., K_local]`; float32, bfloat16, float16 (or float64).
        weight: `[N, K_local]`.
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        bias: `[N]`, the same on every rank; added once, after the sum.
        backend: "auto" or a backend's name; see `explain`.
        k: As for `gemm_reduce_scatter`.
        deterministic: As for `gemm_reduce_scatter`.
        reserve_sms: As for `all_gather_gemm`.
        scale_x: As for `gemm_reduce_scatter`.
        scale_w: As for `gemm_reduce_scatter`.
        out_dtype: As for `gemm_reduce_scatter`.
        block: As for `gemm_reduce_scatter`.
        partials: As for `gemm_reduce_scatter`.
        invariant: As for `gemm_reduce_scatter`.
        epilogue: As for `gemm_reduce_scatter`.

    Returns:
        `[..., N]`, replicated; its gradient must be the same on every rank.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    call = OpCall(
        k=k, backend=backend, deterministic=deterministic, reserve_sms=reserve_sms, out_dtype=out_dtype,
        block=block, partials=partials, invariant=invariant,
    )  # fmt: skip
    given = ops.gemm_all_reduce, x, weight, bias, group, call
    if epilogue is not None:
        return _one(call_with_epilogue(*given, epilogue, scale_x, scale_w))
    return call_op(*given, scale_x, scale_w)


@overload
def gemm_all_gather(
    x: Tensor, weight: Tensor, *, epilogue: None = None, **options: "Unpack[OutputOptions]"
) -> Tensor: ...


@overload
def gemm_all_gather(
    x: Tensor, weight: Tensor, *, epilogue: Applied, **options: "Unpack[OutputOptions]"
) -> Any: ...


def gemm_all_gather(
    x: Tensor,
    weight: Tensor,
    *,
    group: GroupLike = None,
    bias: Tensor | None = None,
    backend: BackendName = "auto",
    columns: Length = None,
    deterministic: bool | None = None,
    reserve_sms: int | None = None,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block: Block = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
    epilogue: Applied | None = None,
) -> Any:
    """Multiplies with this rank's rows of the weight and gathers the columns of the result.

    Args:
        x: `[..., K]`, the same on every rank; float32, bfloat16, float16 (or float64). Its gradient is
            complete on every rank.
        weight: `[N_local, K]`.
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        bias: `[N_local]`.
        backend: "auto" or a backend's name; see `explain`.
        columns: N, where ranks have not as many columns as each other; as `rows` of `all_gather_gemm`.
        deterministic: Of the gradient's sums, as for `gemm_reduce_scatter`.
        reserve_sms: As for `all_gather_gemm`.
        scale_x: As for `gemm_reduce_scatter`.
        scale_w: As for `gemm_reduce_scatter`.
        out_dtype: As for `gemm_reduce_scatter`.
        block: As for `gemm_reduce_scatter`.
        partials: As for `gemm_reduce_scatter`.
        invariant: As for `gemm_reduce_scatter`.
        epilogue: As for `gemm_reduce_scatter`.

    Returns:
        `[..., N]`, replicated; its gradient must be the same on every rank.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    call = OpCall(
        columns=columns, backend=backend, deterministic=deterministic, reserve_sms=reserve_sms,
        out_dtype=out_dtype, block=block, partials=partials, invariant=invariant,
    )  # fmt: skip
    given = ops.gemm_all_gather, x, weight, bias, group, call
    if epilogue is not None:
        return _one(call_with_epilogue(*given, epilogue, scale_x, scale_w))
    return call_op(*given, scale_x, scale_w)


def column_parallel_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: GroupLike,
    backend: BackendName = "auto",
    reserve_sms: int | None = None,
    *,
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block: Block = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
) -> Tensor:
    """`x @ weight.T + bias` for replicated x; backward sums the gradient of x over the ranks.

    Args:
        x: `[..., K]`, the same on every rank.
        weight: This rank's `[N_local, K]`.
        bias: `[N_local]` or None.
        group: A ProcessGroup, a 1-D DeviceMesh, or None for the world.
        backend: For the gemm_all_reduce of backward.
        reserve_sms: The same.
        scale_x: As for `gemm_reduce_scatter`.
        scale_w: As for `gemm_reduce_scatter`.
        out_dtype: As for `gemm_reduce_scatter`.
        block: As for `gemm_reduce_scatter`.
        partials: As for `gemm_reduce_scatter`.
        invariant: As for `gemm_reduce_scatter`.

    Returns:
        `[..., N_local]`.

    Raises:
        ValueError, TypeError: As `overlap_gemm.all_gather_gemm`.
    """
    call = OpCall(
        backend=backend,
        reserve_sms=reserve_sms,
        out_dtype=out_dtype,
        block=block,
        partials=partials,
        invariant=invariant,
    )
    return call_op(ops.column_parallel_gemm, x, weight, bias, group, call, scale_x, scale_w)


def _one(results: list[Tensor]) -> Any:
    """The result of an epilogue, with its outputs where it has some."""
    return results[0] if len(results) == 1 else tuple(results)
