"""Lowering of calls: checks arguments, makes x two-dimensional, and computes extents over all ranks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.op_call import LENGTHS, CallOperands, Length, OpCall
from ..backends.scales.scaling import OUT_DTYPES
from ..backends.select import check_name
from ..config.scale_blocks import MX
from ..runtime import agree
from ..runtime.group import group_rank, group_size, resolve
from ..runtime.order import is_capturing
from ..spec import OpSpec
from ..spec.promises import Promises, check_promises
from ..spec.sharding import Shards
from ..tuning.settings import check_reserve_sms
from .operands import check_operands, check_scaled, shape_of


class Lowered(NamedTuple):
    """A call in the form that its op takes, with functions that convert operands and results.

    Attributes:
        call: Options, and extents over all ranks: the op's arguments after its tensors.
        flat: Shape (rows, K) of the two-dimensional x.
        dim: Dimension of the caller's x that becomes the first one; None: x is two-dimensional already.
        finish: Function from one result of the op to the caller's shape; None: they are the same.
        facts: (name, value) that ranks compare when they exchange a sharded extent.
    """

    call: OpCall
    flat: tuple[int, int]
    dim: int | None
    finish: Callable[[Tensor], Tensor] | None
    facts: agree.Facts

    def flatten(self, x: Tensor) -> Tensor:
        """Returns the caller's x as a matrix `flat`, with the rows of `dim` first."""
        if self.dim is None:
            return x
        return (x.movedim(self.dim, 0) if self.dim else x).reshape(self.flat)

    def tensors(self, operands: CallOperands, *inputs: Any) -> tuple[Any, ...]:
        """Returns all tensors in the form that the op takes: x, weight, bias, inputs, then scales if any.

        Args:
            operands: Operands of the caller; weight and bias are unchanged.
            *inputs: List of the epilogue's inputs, if there is an epilogue.
        """
        x, weight, bias, scale_x, scale_w, _ = operands
        vectors = () if scale_x is None else self.vectors(scale_x, scale_w)
        return x if self.dim is None else self.flatten(x), weight, bias, *inputs, *vectors

    def result(self, result: Any) -> Any:
        """Returns the op's result, or each tensor of its list, in the caller's shape."""
        if self.finish is None:
            return result
        if not isinstance(result, list):
            return self.finish(result)
        moved, *outs = result
        return [self.finish(moved) if self.call.keep else moved, *map(self.finish, outs)]

    def vectors(self, scale_x: Tensor, scale_w: Any) -> tuple[Any, ...]:
        """Returns (scales of x, scales of the weight or a list of them) in the form that the op takes.

        Scales of rows become float32 vectors, those of blocks float32 matrices with a row for each row of the
        flattened x. Scales of MX types are unchanged.

        Args:
            scale_x: Scales of the caller's x.
            scale_w: Scales of the weight, or a list.
        """
        if self.call.blocks == MX:
            return scale_x, scale_w
        if self.dim is not None and scale_x.numel() != 1:
            scale_x = scale_x.movedim(self.dim, 0)
        if self.call.blocks:
            of_x, of_weight = _float32(scale_x).reshape(self.flat[0], scale_x.shape[-1]), _float32
        else:
            of_x, of_weight = _vector(scale_x), _vector
        return of_x, of_weight(scale_w) if isinstance(scale_w, Tensor) else [*map(of_weight, scale_w)]


def _float32(scale: Tensor) -> Tensor:
    return scale if scale.dtype is torch.float32 else scale.float()


def _vector(scale: Tensor) -> Tensor:
    scale = _float32(scale)
    return scale if scale.ndim == 1 else scale.reshape(-1)


def lower(spec: OpSpec, group: str, operands: CallOperands, call: OpCall) -> Lowered:
    """Returns the lowered call. Collective if ranks must compare or exchange a sharded extent.

    With scales, `out_dtype` gets its default.

    Args:
        spec: Definition of the op.
        group: Name of the process group.
        operands: Operands of the caller.
        call: Options and extents of the caller.

    `dim` is the dimension of x or of the result whose rows are sharded. So gemm_reduce_scatter of x `[B, S,
    K]` with `dim=1` returns `[B, S_r, N]`, a view that is not contiguous. If no rows are sharded, as in
    gemm_all_reduce, all dimensions of x but K are rows, and `dim` does not change the result.

    Raises:
        TypeError: A type, dtype, layout or device is not supported, see `operands.check_operands`.
        ValueError: Shapes, extents or options do not fit together, or a backend's name is unknown. Or `dim`
            is K's dimension, out of range, or no integer.
        InvarianceError: The promises of the call contradict each other.
    """
    if operands.scales and call.out_dtype is None:
        call = call._replace(out_dtype=OUT_DTYPES[0])
    x, (weights, biases) = operands.x, operands.lists(spec)
    dim = _check(spec, group, operands, call)
    size, width, columns = group_size(group), x.shape[-1], sum(one.shape[0] for one in weights)
    inner: Sequence[int] = ()
    if "m" in (spec.x, spec.out):
        length, *inner = x.movedim(dim, 0).shape[:-1]
    else:  # every rank has all rows and gets all: all leading dimensions of x are rows
        length = math.prod(x.shape[:-1])
    unit = math.prod(inner)
    facts: agree.Facts = ()
    if spec.unresolved_axis is not None:
        facts = _facts(spec, x, weights, biases, tuple(inner), dim, call)
        if spec.unresolved_axis == "n":
            facts += (("rows", length),)
    total, all_columns, depth = length, columns, weights[0].shape[1]
    if spec.x == "m":
        total = total_extent(spec.name, "rows", call.rows, length, x, group, facts, unit)
    if spec.gathers_output:
        all_columns = total_extent(spec.name, "columns", call.columns, columns, x, group, facts)
    elif spec.weight == "n":
        all_columns = _known(spec.name, "columns", call.columns, columns, group)
    if spec.weight == "k":
        depth = _known(spec.name, "k", call.k, width, group)
    shards = Shards.even(total * unit, size, max(unit, 1))
    chunk = Shards.even(all_columns, size).chunk if spec.gathers_output else shards.chunk
    batch, front = x.shape[:-1], "m" in (spec.x, spec.out)
    rows = Shards.even(total, size).size(group_rank(group)) if spec.out == "m" else total

    def finish(out: Tensor) -> Tensor:
        if front:
            full = out.view(rows, *inner, out.shape[-1])
            return full.movedim(0, dim) if dim else full
        return out.view(*batch, out.shape[-1])

    is_flat = x.ndim == 2
    if not torch.compiler.is_compiling():  # a graph's ops resolve promises when they run
        call = call.promising()
    extents = {"rows": shards.total, "columns": all_columns, "k": depth, "chunk": chunk}
    block = None if call.block is None else str(call.block)
    return Lowered(
        call._replace(group=group, dim=dim, block=block, **extents),  # type: ignore[arg-type]
        (length * unit, width),
        None if is_flat else dim,
        None if is_flat else finish,
        facts,
    )


def _facts(
    spec: OpSpec,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    inner: tuple[int, ...],
    dim: int,
    call: OpCall,
) -> agree.Facts:
    """Returns (name, value) of all that the ranks' calls must have in common, except lengths."""
    if call.deterministic is None:
        call = call._replace(deterministic=torch.are_deterministic_algorithms_enabled())
    return (
        ("op", spec.name), ("dtype", x.dtype), ("k", x.shape[-1]), ("bias", len(biases) > 0),
        ("weights", len(weights)), ("inner", inner),
        *((name, value) for name, value in call._replace(dim=dim).agreed() if name not in LENGTHS),
    )  # fmt: skip


def _check(spec: OpSpec, group: str, operands: CallOperands, call: OpCall) -> int:
    """Checks the arguments; in debug mode an error of one rank is raised on the other ranks, too.

    Returns:
        `dim` as a non-negative number.
    """
    op, x, dim = spec.name, operands.x, call.dim
    try:
        check_operands(spec, operands)
        if operands.scales:
            check_scaled(spec, operands, call)
        elif call.out_dtype is not None or call.block is not None:
            options = ("out_dtype", call.out_dtype), ("block", call.block)
            name, value = next(pair for pair in options if pair[1] is not None)
            raise ValueError(
                f"{op}: {name}={value} is for operands with scales; pass scale_x and scale_w, or omit {name}"
            )
        is_number = isinstance(dim, int) and not isinstance(dim, bool)
        if not is_number or not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
            raise ValueError(
                f"{op}: dim must name one of the {x.ndim - 1} row dimensions of x {shape_of(x)}, got {dim}"
            )
        if spec.reshards_k:
            _check_parts_of_k(spec, x, operands.lists(spec)[0][0], group, call)
        if not torch.compiler.is_compiling():
            ranks = resolve(group)
            if x.device.type not in ranks.device_types:
                raise ValueError(
                    f"{op}: x is on {x.device}, for which group {group!r} (P={ranks.size}) has no backend; "
                    f"the group has backends for {sorted(ranks.device_types)}"
                )
        call.check_lengths(spec)
        if call.deterministic is not None and not isinstance(call.deterministic, bool):
            raise ValueError(f"{op}: deterministic must be True, False or None, got {call.deterministic!r}")
        promises = Promises(call.partials, call.invariant)
        check_promises(promises)
        check_name(call.backend, bool(call.deterministic), promises)
        check_reserve_sms(call.reserve_sms)
    except (ValueError, TypeError) as error:
        if not torch.compiler.is_compiling():
            agree.report(op, resolve(group), error)
        raise
    return dim % x.ndim


def _check_parts_of_k(spec: OpSpec, x: Tensor, weight: Tensor, group: str, call: OpCall) -> None:
    """Checks the width of x, and that the rank's part of K is of whole blocks; ValueError if not."""
    depth, size, rank = weight.shape[1], group_size(group), group_rank(group)
    parts = Shards.even(depth, size)
    if x.shape[-1] != parts.size(rank):
        raise ValueError(
            f"{spec.name}: of K={depth} of weight {shape_of(weight)} rank {rank} of {size} "
            f"owns {parts.size(rank)} (as torch.chunk cuts), but x has {x.shape[-1]} columns"
        )
    if call.blocks and size > 1 and parts.chunk % call.blocks[2]:
        raise ValueError(
            f"{spec.name}: K={depth} in {size} parts is {parts.chunk} a rank, which must be a multiple of "
            f"block={call.blocks[2]}, because a block of the weight has one scale; use a smaller block, or "
            "16-bit operands"
        )


def total_extent(
    op: str,
    what: str,
    passed: Length,
    length: int,
    x: Tensor,
    group: str,
    facts: agree.Facts,
    unit: int = 1,
) -> int:
    """Returns the sharded extent over all ranks.

    | passed | communication | checked |
    |---|---|---|
    | number | none | this rank's share, on this rank alone |
    | "equal" | none | nothing: P times this rank's share |
    | None | first call with these facts | shares are equal |
    | "exchange" | every call | shares are as `torch.chunk` cuts |

    In a graph (captured, or of torch.compile) None is taken as "equal", and "exchange" raises ValueError. So
    does None in a captured one if this rank's share is known from a call with uneven shares only.

    Args:
        op: Name of the op, for messages.
        what: Name of the extent, for messages.
        passed: Extent that the caller passed.
        length: This rank's share of it.
        x: Operand of the op.
        group: Name of the group, every rank of which calls.
        facts: Facts that the ranks compare, as in `agree.same`.
        unit: Rows for each element of the extent, as in `agree.equal_length`.

    Raises:
        ValueError: This rank's share does not fit the number; only here. Or on every rank: the ranks' shares
            are not equal, or not as `torch.chunk` cuts.
    """
    if passed in (None, "exchange") and not (torch.compiler.is_compiling() or is_capturing(x.device)):
        ranks = resolve(group)
        if passed is None:
            return agree.equal_length(op, what, length, x.device, ranks, facts, unit)
        total = agree.total_length(op, what, length, x.device, ranks, facts)
        _note_uneven(group, total, length, facts)
        return total
    if passed == "exchange" and group_size(group) > 1:
        raise ValueError(
            f"{op}: {what}='exchange' communicates with the other ranks in every call, which a graph (of "
            f"torch.compile, or a captured one) cannot; pass {what} as a number, or omit it if shards are "
            f"equal"
        )
    if passed is None or isinstance(passed, str):
        if passed is None and not torch.compiler.is_compiling():
            ranks = resolve(group)
            if (_UNEVEN, length, facts) in ranks.agreed and not agree.is_equal(ranks, what, length, facts):
                raise ValueError(
                    f"{op}: in a captured graph no {what}= means equal shards, but this rank's {length} "
                    f"{what} are known from uneven ones; pass {what}= as the total"
                )
        return length * group_size(group)
    local = Shards.even(passed, group_size(group)).size(group_rank(group))
    if local != length:
        raise ValueError(
            f"{op}: of {what}={passed} rank {group_rank(group)} of {group_size(group)} owns {local} (as "
            f"torch.chunk cuts), but its operand has {length}"
        )
    if not torch.compiler.is_compiling():
        _note_uneven(group, passed, length, facts)
    return passed


_UNEVEN = "uneven shards"


def _note_uneven(group: str, total: int, length: int, facts: agree.Facts) -> None:
    """Notes that this rank's share belongs to shares of unequal lengths."""
    if total != length * group_size(group):
        resolve(group).agreed.add((_UNEVEN, length, facts))


def _known(op: str, what: str, passed: Length, local: int, group: str) -> int | None:
    """Returns an extent over all ranks that only the choice of a backend reads; None if it is unknown.

    Args:
        op: Name of the op, for messages.
        what: Name of the extent, for messages.
        passed: Extent that the caller passed.
        local: This rank's share of it.
        group: Name of the group.
    """
    if isinstance(passed, str):
        return local * group_size(group)
    if passed is not None and passed < local:
        raise ValueError(
            f"{op}: {what}={passed} over all ranks is less than this rank's {local}; pass the sum over ranks"
        )
    return passed
