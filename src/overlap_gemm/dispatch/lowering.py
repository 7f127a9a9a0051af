"""From what a user passes to what an op takes: checked arguments, two dimensions, known lengths."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.select import check_name
from ..config.scale_blocks import MX, Blocks
from ..runtime import agree
from ..runtime.group import group_rank, group_size, resolve
from ..runtime.order import is_capturing
from ..spec import ALL_GATHER_GEMM, GEMM_ALL_GATHER, GEMM_ALL_REDUCE, GEMM_REDUCE_SCATTER
from ..spec.promises import Promises, check_promises
from ..spec.sharding import Shards
from ..tuning.settings import check_reserve_sms
from .operands import Scales, check_operands, check_scaled, shape_of
from .options import CallOptions, Length


class Lowered(NamedTuple):
    """A call as its op takes it.

    Attributes:
        flat: The two-dimensional shape of x.
        dim: Which dimension of x comes first in it; None: x is two-dimensional and stays as it is.
        arguments: The op's, after its tensors.
        finish: Makes the user's result of the op's; None: it is that.
        facts: (name, value) of what ranks compare where they ask each other for a sharded extent.
        extents: (m, n, k) of `backends.base.Problem`.
        blocks: Which blocks scales are of; None: of rows, or there are none.
    """

    flat: tuple[int, int]
    dim: int | None
    arguments: tuple[Any, ...]
    finish: Callable[[Any], Any] | None
    facts: agree.Facts
    extents: tuple[int, int | None, int | None]
    blocks: Blocks | None

    def flatten(self, x: Tensor) -> Tensor:
        """X as the op takes it."""
        return x if self.dim is None else x.movedim(self.dim, 0).reshape(self.flat)

    def operands(self, x: Tensor, weight: Any, bias: Any, scales: Scales) -> tuple[Any, ...]:
        """All tensors as the op takes them."""
        return self.flatten(x), weight, bias, *(self.vectors(*scales) if scales else ())

    def vectors(self, scale_x: Tensor, scale_w: Any) -> tuple[Any, ...]:
        """The scales as the op takes them: float32, vectors or matrices; or those of MX types."""
        if self.blocks == MX:
            return scale_x, scale_w
        if scale_x.dtype is not torch.float32:
            scale_x = scale_x.float()
        if self.dim is not None and scale_x.numel() != 1:
            scale_x = scale_x.movedim(self.dim, 0)
        is_one = isinstance(scale_w, Tensor)
        of_weights = [
            w if w.dtype is torch.float32 else w.float() for w in ([scale_w] if is_one else scale_w)
        ]
        if self.blocks:
            of_x = scale_x.reshape(self.flat[0], scale_x.shape[-1])
        else:
            of_x, *of_weights = (one if one.ndim == 1 else one.reshape(-1) for one in (scale_x, *of_weights))
        return of_x, of_weights[0] if is_one else of_weights


def lower_all_gather_gemm(
    group: str,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    options: CallOptions,
    scales: Scales = (),
) -> Lowered:
    """`functional.all_gather_gemm`."""
    op = ALL_GATHER_GEMM.name
    dim = _check(op, group, x, weights, biases, options, scales)
    length, *inner = x.movedim(dim, 0).shape[:-1]
    width, unit = x.shape[-1], math.prod(inner)
    more = {"dim": dim, "weights": len(weights), "inner": tuple(inner), "keep": options.keep}
    facts = _facts(op, x, width, len(biases) > 0, options, **more)
    total = total_extent(op, "rows", options.rows, length, x, group, facts, unit)
    columns = _known(op, "columns", options.columns, sum(weight.shape[0] for weight in weights), group)
    shards = Shards.even(total * unit, group_size(group), max(unit, 1))

    def shaped(flat: Tensor) -> Tensor:
        return flat if x.ndim == 2 else flat.view(total, *inner, flat.shape[-1]).movedim(0, dim)

    def finish(result: list[Tensor]) -> Any:
        gathered, *outs = result
        products = shaped(outs[0]) if options.single else [shaped(out) for out in outs]
        return (products, shaped(gathered)) if options.return_gathered else products

    return Lowered(
        (length * unit, width),
        None if x.ndim == 2 else dim,
        (shards.total, shards.chunk, options.keep, columns, *options.passed(group)),
        finish,
        facts,
        (shards.total, columns, width),
        options.blocks,
    )


def lower_gemm_reduce_scatter(
    group: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: CallOptions, scales: Scales = ()
) -> Lowered:
    """`functional.gemm_reduce_scatter`."""
    op = GEMM_REDUCE_SCATTER.name
    dim = _check_single(op, group, x, weight, bias, options, scales)
    k = _known(op, "k", options.k, x.shape[-1], group)
    length, *inner = x.movedim(dim, 0).shape[:-1]
    unit, columns = math.prod(inner), weight.shape[0]
    shards = Shards.even(length * unit, group_size(group), max(unit, 1))
    own = Shards.even(length, group_size(group)).size(group_rank(group))
    return Lowered(
        (shards.total, x.shape[-1]),
        None if x.ndim == 2 else dim,
        (shards.chunk, k, *options.passed(group)),
        None if x.ndim == 2 else lambda out: out.view(own, *inner, columns).movedim(0, dim),
        (),
        (shards.total, columns, k),
        options.blocks,
    )


def lower_gemm_all_reduce(
    group: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: CallOptions, scales: Scales = ()
) -> Lowered:
    """`functional.gemm_all_reduce`."""
    op = GEMM_ALL_REDUCE.name
    _check_single(op, group, x, weight, bias, options, scales)
    columns, k = weight.shape[0], _known(op, "k", options.k, x.shape[-1], group)
    return _lower_replicated(x, columns, k, (k, *options.passed(group)), options)


def lower_gemm_all_gather(
    group: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: CallOptions, scales: Scales = ()
) -> Lowered:
    """`functional.gemm_all_gather`."""
    op = GEMM_ALL_GATHER.name
    _check_single(op, group, x, weight, bias, options, scales)
    rows = math.prod(x.shape[:-1])
    facts = _facts(op, x, x.shape[-1], bias is not None, options, rows=rows)
    total = total_extent(op, "columns", options.columns, weight.shape[0], x, group, facts)
    return _lower_replicated(x, total, x.shape[-1], (total, *options.passed(group)), options, facts)


def lower_column_parallel_gemm(
    group: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: CallOptions, scales: Scales = ()
) -> Lowered:
    """`functional.column_parallel_gemm`, whose forward is this rank's own affair."""
    _check_single("column_parallel_gemm", group, x, weight, bias, options, scales)
    return _lower_replicated(x, weight.shape[0], None, options.passed(group), options)


def _lower_replicated(
    x: Tensor,
    columns: int,
    k: int | None,
    arguments: tuple[Any, ...],
    options: CallOptions,
    facts: agree.Facts = (),
) -> Lowered:
    """Of an op whose rows every rank has, and gets: all leading dimensions of x are rows."""
    batch = x.shape[:-1]
    rows = math.prod(batch)
    return Lowered(
        (rows, x.shape[-1]),
        None if x.ndim == 2 else 0,
        arguments,
        None if x.ndim == 2 else lambda out: out.view(*batch, columns),
        facts,
        (rows, columns, k),
        options.blocks,
    )


LOWERINGS: dict[str, Callable[..., Lowered]] = {
    ALL_GATHER_GEMM.name: lower_all_gather_gemm,
    GEMM_REDUCE_SCATTER.name: lower_gemm_reduce_scatter,
    GEMM_ALL_REDUCE.name: lower_gemm_all_reduce,
    GEMM_ALL_GATHER.name: lower_gemm_all_gather,
    "local_gemm": lower_column_parallel_gemm,
}
"""By the ops of `ops`: (group, x, weight, bias, options, scales) -> a call of it."""


def _facts(op: str, x: Tensor, width: int, bias: bool, options: CallOptions, **others: Any) -> agree.Facts:
    deterministic = options.deterministic
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return (
        ("op", op), ("dtype", x.dtype), ("k", width), ("bias", bias),
        ("backend", options.backend), ("deterministic", deterministic),
        ("out_dtype", options.out_dtype), ("block", options.block), *others.items(),
    )  # fmt: skip


def _check_single(
    op: str, group: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: CallOptions, scales: Scales
) -> int:
    """`_check` of one weight and a bias or None."""
    return _check(op, group, x, [weight], [] if bias is None else [bias], options, scales)


def _check(
    op: str,
    group: str,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    options: CallOptions,
    scales: Scales = (),
) -> int:
    """Raises for arguments that do not fit together; in debug mode on the other ranks, too.

    Returns:
        `dim`, counted from the front.
    """
    dim = options.dim
    try:
        check_operands(op, x, weights, biases, scales)
        if scales:
            check_scaled(op, x, weights, biases, options, *scales)
        elif options.out_dtype is not None or options.block is not None:
            told = ("out_dtype", options.out_dtype), ("block", options.block)
            name, value = next(pair for pair in told if pair[1] is not None)
            raise ValueError(f"{op}: {name}={value} is for operands with scales")
        if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
            raise ValueError(
                f"{op}: dim must name one of the {x.ndim - 1} row dimensions of x {shape_of(x)}, got {dim}"
            )
        if not torch.compiler.is_compiling():
            ranks = resolve(group)
            if x.device.type not in ranks.device_types:
                raise ValueError(
                    f"{op}: x lies on {x.device}, for which group {group!r} (P={ranks.size}) has no backend; "
                    f"it serves {sorted(ranks.device_types)}"
                )
        options.check_lengths(op)
        promises = Promises(options.partials, options.invariant)
        check_promises(promises)
        check_name(options.backend, bool(options.deterministic), promises)
        check_reserve_sms(options.reserve_sms)
    except (ValueError, TypeError) as error:
        agree.report(op, resolve(group), error)
        raise
    return dim % x.ndim


def total_extent(
    op: str,
    what: str,
    given: Length,
    length: int,
    x: Tensor,
    group: str,
    facts: agree.Facts,
    unit: int = 1,
) -> int:
    """The sharded extent over all ranks: the caller's, or equal shards, or what the ranks say.

    Args:
        op: For messages.
        what: The name of the extent, for messages.
        given: By the caller.
        length: This rank's share.
        x: The op's operand.
        group: Every rank of which calls.
        facts: As for `agree.same`.
        unit: As for `agree.equal_length`.

    Raises:
        ValueError: This rank's share is not that of `given`, or the ranks' are not equal, or not as
            `torch.chunk` cuts.
    """
    if given in (None, "exchange") and not (torch.compiler.is_compiling() or is_capturing(x.device)):
        ranks = resolve(group)
        if given is None:
            return agree.equal_length(op, what, length, x.device, ranks, facts, unit)
        return agree.total_length(op, what, length, x.device, ranks, facts)
    if given == "exchange" and group_size(group) > 1:
        raise ValueError(
            f"{op}: {what}='exchange' asks the other ranks in every call, which a graph (torch.compile's, a "
            f"captured one) cannot; pass {what}, or nothing if shards are equal"
        )
    if given is None or isinstance(given, str):
        return length * group_size(group)
    own = Shards.even(given, group_size(group)).size(group_rank(group))
    if own != length:
        raise ValueError(
            f"{op}: of {what}={given} rank {group_rank(group)} of {group_size(group)} owns {own} "
            f"(as torch.chunk cuts), but its operand has {length}"
        )
    return given


def _known(op: str, what: str, given: Length, local: int, group: str) -> int | None:
    """The extent over all ranks that only the choice of a backend looks at; None if nobody knows."""
    if isinstance(given, str):
        return local * group_size(group)
    if given is not None and given < local:
        raise ValueError(f"{op}: {what}={given} over all ranks is less than this rank's {local}")
    return given
