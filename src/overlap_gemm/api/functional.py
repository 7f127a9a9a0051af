"""The four ops for users: any leading dimensions, any shard lengths, checked arguments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..backends.op_call import BackendName, CallOperands, Length, OpCall, operands_of_lists
from ..backends.scales.scaling import Block
from ..dispatch import ops
from ..dispatch.bound import call_op
from ..dispatch.with_epilogue import call_with_epilogue, one_or_all
from ..epilogues import Applied
from ..runtime.group import GroupLike
from ..spec.promises import Invariant, Partials

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import GatherOptions, OutputOptions, ProductOptions, ReduceOptions, ScatterOptions

__all__ = [
    "Length", "all_gather_gemm", "column_parallel_gemm", "gemm_all_gather", "gemm_all_reduce",
    "gemm_reduce_scatter",
]  # fmt: skip


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
    """Gathers the rows of x from all ranks and multiplies them by this rank's weight.

    It is the column-parallel half of a tensor-parallel layer with sequence parallelism. The rows are sharded
    equally, or, with `rows`, as by `torch.chunk`; a shard may then be short or empty. All ranks of the group
    make the same calls in the same order; on a GPU a call is ordered by the current stream.

    Args:
        x_shard: This rank's rows `[M_local, ..., K]`; float32, bfloat16, float16 (or float64).
        weight: `[N_local, K]` of x's dtype, as in `nn.Linear`; or a list of such weights that share one
            gather (q/k/v, gate/up).
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        bias: `[N_local]`, or one per weight if `weight` is a list.
        return_gathered: Return the gathered x as well.
        backend: "auto" or the name of a backend; see `explain`.
        rows: Total number of rows M, the sum of the ranks' `M_local`, which must be those of `torch.chunk`.
            None: all ranks have equally many rows. The first eager call with a number of rows compares it
            (ValueError on all ranks if they differ); later calls do not. If one rank alone changes its number
            later, the backend raises, or the group's timeout expires; ``OVERLAP_GEMM_CHECK=1`` compares at
            every call. "equal": like None, without a comparison. "exchange": the ranks exchange their numbers
            in every call, by a small all-gather between the hosts; ValueError in a graph (torch.compile's, or
            captured). In a graph None is "equal"; ValueError in a captured one if earlier calls with as many
            rows on this rank had uneven shards only.
        dim: Sharded dimension of `x_shard`: 0 for Megatron's `[s, b, h]`, 1 for `[b, s, h]` (which costs a
            copy unless b = 1).
        save_gathered: Save the gathered x for the weight gradient, P times the memory of the shard, instead
            of gathering it again in backward. (If the gradient of x is fused and shards are not small, copy
            engines gather it at the same time.) `return_gathered` implies it.
        columns: N, summed over weights and ranks; "equal": every rank has as many columns as this one; None:
            the choice of `auto` does not depend on N.
        deterministic: Require bitwise repeatable sums of the gradient, as in `gemm_reduce_scatter`.
        reserve_sms: SMs that fused kernels, also the gradient's, leave free on this rank; None: the value of
            `configured`, or ``OVERLAP_GEMM_RESERVE_SMS``. Other backends ignore it.
        scale_x: Scales of this rank's shard, as in `gemm_reduce_scatter`.
        scale_w: Scales of the weight, as in `gemm_reduce_scatter`, or one per weight if `weight` is a list.
        out_dtype: Type of the result, as in `gemm_reduce_scatter`.
        block: Block of the scales, as in `gemm_reduce_scatter`.
        partials: Type of the gradient's partial sums, as in `gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `gemm_reduce_scatter`.
        epilogue: Epilogue, as in `gemm_reduce_scatter`; of one weight, or of pairs of columns of two weights.

    Returns:
        `[M, ..., N_local]` (M in dimension `dim`), or a list with one such tensor per weight. With
        `return_gathered` a pair of that and the gathered `[M, ..., K]`. With an epilogue that has outputs, a
        tuple of the product and each output in place of the product.

    Raises:
        ValueError, TypeError: Arguments are incompatible; the message contains the values and the rule.
        RuntimeError: A peer has exited, did not respond within the group's timeout, or makes a different
            call. Fused kernels detect it on the GPU: a later call raises (`CommTimeoutError`).
        CaptureError: A graph is being captured, and the call needs a preparation (see `warmup`).
    """
    several = isinstance(weight, (list, tuple))
    operands = operands_of_lists((x_shard, weight, bias, scale_x, scale_w))
    saved = save_gathered and scale_x is None  # with scales there is no gradient to save it for
    call = OpCall(
        "", rows, columns, None, 0, dim, return_gathered or saved,
        backend, deterministic, reserve_sms, False, out_dtype, block, partials, invariant,
    )  # fmt: skip
    if epilogue is not None:
        gathered, *outs = call_with_epilogue(ops.all_gather_gemm, operands, group, call, epilogue)
        return (one_or_all(outs), gathered) if return_gathered else one_or_all(outs)
    results = call_op(ops.all_gather_gemm, operands, group, call)
    products = results[1:] if several else results[1]
    return (products, results[0]) if return_gathered else products


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
    """Multiplies by this rank's slice of the weight and keeps this rank's rows of the sum over the ranks.

    It is the row-parallel half of a tensor-parallel layer with sequence parallelism. Every backend but
    `torch` accumulates the sum in float32 (or wider) in rank order, bitwise equal from call to call.

    Args:
        x: `[M, ..., K_local]`; float32, bfloat16, float16 (or float64). K_local may differ between ranks.
        weight: `[N, K_local]`.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        bias: `[N]`, the same on every rank; added once, after the sum. Every rank gets its full gradient.
        backend: "auto" or the name of a backend; see `explain`.
        dim: Dimension of x along which the result is sharded, as in `all_gather_gemm`.
        k: K, the sum of the ranks' `K_local`; "equal": every rank has as much as this one; None: the choice
            of `auto` does not depend on K.
        deterministic: True restricts `auto` to backends that sum in rank order; None: the value of
            `torch.are_deterministic_algorithms_enabled()`. The same on every rank.
        reserve_sms: SMs that fused kernels leave free, as in `all_gather_gemm`.
        scale_x: Scales of x, if x and weight are float8_e4m3fn or float8_e5m2: float32 `[M, ..., 1]`, one per
            row of x, or one element. Ranks may have different scales.
        scale_w: Scales of the weight: `[N, 1]` or `[1, N]`, or one element. float32 like scale_x, or
            float8_e8m0fnu.
        out_dtype: Type of result and bias if operands have scales: bfloat16 (the default), float16 or
            float32.
        block: Rows of the weight, and elements of K, that share a scale: 128 or 32. scale_x is then `[M, ...,
            ceil(K_local / block)]`, scale_w `[ceil(N / block), ceil(K_local / block)]`. ``"mx"``: swizzled
            scales of MX types. None: per row. The same on every rank. See docs/fp8.md.
        partials: Type in which the ranks' partial sums are sent: "float32", or None: rounded once to the type
            of x (of `out_dtype`).
        invariant: "batch": the bits of a row depend neither on other rows nor on their number. "ranks"
            ("ranks:4", "ranks:2"): nor on the number of ranks up to 8 (4, 2), since K is summed in that many
            equal parts, in float32. It includes the gradients. The same on every rank. See
            docs/invariance.md.
        epilogue: `overlap_gemm.epilogue` with its inputs, applied to the complete (or partial) sums before
            they are rounded and stored. Inputs fit the shape of this rank's result. See docs/epilogues.md.

    Returns:
        `[M_local, ..., N]`; M_local is this rank's share of M as by `torch.chunk`. With an epilogue that has
        outputs, a tuple of that and each output.

    Raises:
        ValueError, TypeError, RuntimeError: The conditions of `all_gather_gemm`.
    """
    call = OpCall(
        k=k, dim=dim, backend=backend, deterministic=deterministic, reserve_sms=reserve_sms,
        out_dtype=out_dtype, block=block, partials=partials, invariant=invariant,
    )  # fmt: skip
    arguments = ops.gemm_reduce_scatter, CallOperands(x, weight, bias, scale_x, scale_w), group, call
    if epilogue is not None:
        return one_or_all(call_with_epilogue(*arguments, epilogue))
    return call_op(*arguments)


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
    """Multiplies by this rank's slice of the weight and sums over the ranks.

    It is the row-parallel half of a tensor-parallel layer without sequence parallelism. The sum is that of
    `gemm_reduce_scatter`; the results of all ranks are bitwise equal.

    Args:
        x: `[..., K_local]`; float32, bfloat16, float16 (or float64).
        weight: `[N, K_local]`.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        bias: `[N]`, the same on every rank; added once, after the sum.
        backend: "auto" or the name of a backend; see `explain`.
        k: K over all ranks, as in `gemm_reduce_scatter`.
        deterministic: Require bitwise repeatable sums, as in `gemm_reduce_scatter`.
        reserve_sms: SMs that fused kernels leave free, as in `all_gather_gemm`.
        scale_x: Scales of x, as in `gemm_reduce_scatter`.
        scale_w: Scales of the weight, as in `gemm_reduce_scatter`.
        out_dtype: Type of the result, as in `gemm_reduce_scatter`.
        block: Block of the scales, as in `gemm_reduce_scatter`.
        partials: Type of partial sums, as in `gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `gemm_reduce_scatter`.
        epilogue: Epilogue, as in `gemm_reduce_scatter`.

    Returns:
        `[..., N]`, replicated; its gradient must be the same on every rank.

    Raises:
        ValueError, TypeError, RuntimeError: The conditions of `all_gather_gemm`.
    """
    call = OpCall(
        k=k, backend=backend, deterministic=deterministic, reserve_sms=reserve_sms, out_dtype=out_dtype,
        block=block, partials=partials, invariant=invariant,
    )  # fmt: skip
    arguments = ops.gemm_all_reduce, CallOperands(x, weight, bias, scale_x, scale_w), group, call
    if epilogue is not None:
        return one_or_all(call_with_epilogue(*arguments, epilogue))
    return call_op(*arguments)


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
    """Multiplies by this rank's rows of the weight and gathers the columns of the result.

    Args:
        x: `[..., K]`, the same on every rank; float32, bfloat16, float16 (or float64). Its gradient is
            complete on every rank.
        weight: `[N_local, K]`.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        bias: `[N_local]`.
        backend: "auto" or the name of a backend; see `explain`.
        columns: N, if ranks have different numbers of columns; its values are those of `rows` in
            `all_gather_gemm`.
        deterministic: Require bitwise repeatable sums of the gradient, as in `gemm_reduce_scatter`.
        reserve_sms: SMs that fused kernels leave free, as in `all_gather_gemm`.
        scale_x: Scales of x, as in `gemm_reduce_scatter`.
        scale_w: Scales of the weight, as in `gemm_reduce_scatter`.
        out_dtype: Type of the result, as in `gemm_reduce_scatter`.
        block: Block of the scales, as in `gemm_reduce_scatter`.
        partials: Type of the gradient's partial sums, as in `gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `gemm_reduce_scatter`.
        epilogue: Epilogue, as in `gemm_reduce_scatter`.

    Returns:
        `[..., N]`, replicated; its gradient must be the same on every rank.

    Raises:
        ValueError, TypeError, RuntimeError: The conditions of `all_gather_gemm`.
    """
    call = OpCall(
        columns=columns, backend=backend, deterministic=deterministic, reserve_sms=reserve_sms,
        out_dtype=out_dtype, block=block, partials=partials, invariant=invariant,
    )  # fmt: skip
    arguments = ops.gemm_all_gather, CallOperands(x, weight, bias, scale_x, scale_w), group, call
    if epilogue is not None:
        return one_or_all(call_with_epilogue(*arguments, epilogue))
    return call_op(*arguments)


@overload
def column_parallel_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: GroupLike, backend: BackendName = "auto",
    reserve_sms: int | None = None, *, scale_w: Tensor | None = None, **options: "Unpack[ProductOptions]",
) -> Tensor: ...  # fmt: skip


@overload
def column_parallel_gemm(
    x: Tensor, weight: Sequence[Tensor], bias: Sequence[Tensor] | None, group: GroupLike,
    backend: BackendName = "auto", reserve_sms: int | None = None, *, scale_w: Sequence[Tensor] | None = None,
    **options: "Unpack[ProductOptions]",
) -> list[Tensor]: ...  # fmt: skip


def column_parallel_gemm(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None,
    group: GroupLike,
    backend: BackendName = "auto",
    reserve_sms: int | None = None,
    *,
    scale_x: Tensor | None = None,
    scale_w: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    block: Block = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
) -> Any:
    """Returns `x @ weight.T + bias` for replicated x; backward sums the gradient of x over the ranks.

    Args:
        x: `[..., K]`, the same on every rank.
        weight: This rank's `[N_local, K]`; or a list of such weights, for which backward has one
            gemm_all_reduce (with `invariant="ranks"` one each).
        bias: `[N_local]` or None; one per weight if `weight` is a list.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        backend: Backend of the gemm_all_reduce in backward.
        reserve_sms: SMs that the gemm_all_reduce in backward leaves free.
        scale_x: Scales of x, as in `gemm_reduce_scatter`.
        scale_w: Scales of the weight, as in `gemm_reduce_scatter`.
        out_dtype: Type of the result, as in `gemm_reduce_scatter`.
        block: Block of the scales, as in `gemm_reduce_scatter`.
        partials: Type of the gradient's partial sums, as in `gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `gemm_reduce_scatter`.

    Returns:
        `[..., N_local]`; a list if `weight` is one.

    Raises:
        ValueError, TypeError: The conditions of `overlap_gemm.all_gather_gemm`.
    """
    call = OpCall(
        backend=backend, reserve_sms=reserve_sms, out_dtype=out_dtype, block=block, partials=partials,
        invariant=invariant,
    )  # fmt: skip
    operands = operands_of_lists((x, weight, bias, scale_x, scale_w))
    _, *outs = call_op(ops.column_parallel_gemm, operands, group, call)
    return outs if isinstance(weight, (list, tuple)) else outs[0]
