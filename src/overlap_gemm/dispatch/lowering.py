"""From what a user passes to what an op takes: checked arguments, two dimensions, known lengths."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import mx
from ..backends.scaling import (
    DEPTH,
    FLOAT8,
    OUT_DTYPES,
    SCALE_DTYPES,
    in_words,
    of_blocks,
)
from ..backends.select import check_name
from ..kernels.scale_blocks import MX, PROMOTED, Blocks
from ..runtime import agree
from ..runtime.group import group_rank, group_size, resolve
from ..spec import ALL_GATHER_GEMM, GEMM_ALL_GATHER, GEMM_ALL_REDUCE, GEMM_REDUCE_SCATTER
from ..spec.sharding import Shards
from ..tuning.settings import check_reserve_sms
from .options import CallOptions, Length

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""float64 is for gradient checks; the portable backends alone carry it."""

SCALES = (torch.float32, mx.SCALE)
"""Types of scales."""

Scales: TypeAlias = tuple[Any, ...]
"""Those of x and of the weight, or of each weight in a list; empty where operands have none."""


class Lowered(NamedTuple):
    """A call as its op takes it.

    Attributes:
        flat: The two-dimensional shape of x.
        dim: Which dimension of x comes first in it; None: x is two-dimensional and stays as it is.
        arguments: The op's, after its tensors.
        finish: Makes the user's result of the op's; None: it is that.
        facts: (name, value) of what ranks compare where they ask each other for a sharded extent.
        extents: (m, n, k) of `backends.base.Problem`.
    """

    flat: tuple[int, int]
    dim: int | None
    arguments: tuple[Any, ...]
    finish: Callable[[Any], Any] | None
    facts: agree.Facts
    extents: tuple[int, int | None, int | None]

    def flatten(self, x: Tensor) -> Tensor:
        """X as the op takes it."""
        return x if self.dim is None else x.movedim(self.dim, 0).reshape(self.flat)

    def vectors(self, scale_x: Tensor, scale_w: Any) -> tuple[Any, ...]:
        """The scales as the op takes them: float32, vectors or matrices; or those of MX types."""
        blocks = of_blocks(scale_x, self.flat[1])
        if blocks == MX:
            return scale_x, scale_w
        scale_x = scale_x.float()
        scale_w = scale_w.float() if isinstance(scale_w, Tensor) else [scale.float() for scale in scale_w]
        if self.dim is not None and scale_x.numel() != 1:
            scale_x = scale_x.movedim(self.dim, 0)
        if blocks:
            return scale_x.reshape(self.flat[0], scale_x.shape[-1]), scale_w
        if isinstance(scale_w, Tensor):
            return scale_x.reshape(-1), scale_w.reshape(-1)
        return scale_x.reshape(-1), [scale.reshape(-1) for scale in scale_w]


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
    facts = _facts(
        op, x, width, biases, options, dim=dim, weights=len(weights), inner=tuple(inner), keep=options.keep
    )
    total = total_extent(op, "rows", options.rows, length, x, group, facts)
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
    )


def lower_gemm_reduce_scatter(
    group: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: CallOptions, scales: Scales = ()
) -> Lowered:
    """`functional.gemm_reduce_scatter`."""
    op = GEMM_REDUCE_SCATTER.name
    biases = [] if bias is None else [bias]
    dim = _check(op, group, x, [weight], biases, options, scales)
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
    )


def lower_gemm_all_reduce(
    group: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: CallOptions, scales: Scales = ()
) -> Lowered:
    """`functional.gemm_all_reduce`."""
    op, biases = GEMM_ALL_REDUCE.name, [] if bias is None else [bias]
    _check(op, group, x, [weight], biases, options, scales)
    columns, k = weight.shape[0], _known(op, "k", options.k, x.shape[-1], group)
    return _lower_replicated(x, columns, k, (k, *options.passed(group)))


def lower_gemm_all_gather(
    group: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: CallOptions, scales: Scales = ()
) -> Lowered:
    """`functional.gemm_all_gather`."""
    op, biases = GEMM_ALL_GATHER.name, [] if bias is None else [bias]
    _check(op, group, x, [weight], biases, options, scales)
    rows = math.prod(x.shape[:-1])
    facts = _facts(op, x, x.shape[-1], biases, options, rows=rows)
    total = total_extent(op, "columns", options.columns, weight.shape[0], x, group, facts)
    return _lower_replicated(x, total, x.shape[-1], (total, *options.passed(group)), facts)


def lower_column_parallel_gemm(
    group: str, x: Tensor, weight: Tensor, bias: Tensor | None, options: CallOptions, scales: Scales = ()
) -> Lowered:
    """`functional.column_parallel_gemm`, whose forward is this rank's own affair."""
    _check("column_parallel_gemm", group, x, [weight], [] if bias is None else [bias], options, scales)
    return _lower_replicated(x, weight.shape[0], None, options.passed(group))


def _lower_replicated(
    x: Tensor, columns: int, k: int | None, arguments: tuple[Any, ...], facts: agree.Facts = ()
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
    )


def _facts(
    op: str, x: Tensor, width: int, biases: Sequence[Tensor], options: CallOptions, **others: Any
) -> agree.Facts:
    return (
        ("op", op), ("dtype", x.dtype), ("k", width), ("bias", len(biases) > 0),
        ("backend", options.backend), ("deterministic", options.deterministic),
        ("out_dtype", options.out_dtype), *others.items(),
    )  # fmt: skip


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
        _check_operands(op, x, weights, biases, scales)
        if scales:
            _check_scaled(op, x, weights, biases, options, *scales)
        elif options.out_dtype is not None:
            raise ValueError(f"{op}: out_dtype={options.out_dtype} is for operands with scales")
        if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
            raise ValueError(
                f"{op}: dim must name one of the {x.ndim - 1} row dimensions of x {_shape(x)}, got {dim}"
            )
        if not torch.compiler.is_compiling():
            ranks = resolve(group)
            if x.device.type not in ranks.device_types:
                raise ValueError(
                    f"{op}: x lies on {x.device}, for which group {group!r} (P={ranks.size}) has no backend; "
                    f"it serves {sorted(ranks.device_types)}"
                )
        check_name(options.backend, bool(options.deterministic))
        check_reserve_sms(options.reserve_sms)
    except (ValueError, TypeError) as error:
        agree.report(op, resolve(group), error)
        raise
    return dim % x.ndim


def _check_operands(op: str, x: Tensor, weights: list[Tensor], biases: list[Tensor], scales: Scales) -> None:
    if not weights:
        raise ValueError(f"{op}: weight is an empty list")
    if biases and len(biases) != len(weights):
        raise ValueError(f"{op}: {len(weights)} weights need as many biases or none, got {len(biases)}")
    named = [("x", x), *(("weight", weight) for weight in weights), *(("bias", bias) for bias in biases)]
    if scales:
        named += [("scale_x", scales[0]), *(("scale_w", scale) for scale in _each(scales[1]))]
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type(tensor).__name__}")
        if not torch.compiler.is_compiling() and tensor.layout != torch.strided:
            raise TypeError(f"{op}: {name} must be a strided tensor, got one of layout {tensor.layout}")
        if tensor.device != x.device or (tensor.dtype != x.dtype and not scales):
            raise TypeError(
                f"{op}: operands must share dtype and device, got x {x.dtype} on {x.device} and "
                f"{name} {tensor.dtype} on {tensor.device}"
            )
        if not torch.compiler.is_compiling() and _has_tangent(tensor):
            raise TypeError(f"{op}: {name} has a tangent, but there is no forward mode AD of it")
    if x.dtype not in (FLOAT8 if scales else DTYPES):
        hint = "; of 8 bits with scale_x and scale_w alone" if x.dtype in FLOAT8 else ""
        those = "with scales must be one of" if scales else "must be one of"
        known = ", ".join(map(str, FLOAT8 if scales else DTYPES))
        raise TypeError(f"{op}: dtype {those} {known}, got {x.dtype}{hint}")
    if x.ndim < 2:
        raise ValueError(f"{op}: x must be [M, ..., K], got {_shape(x)}")
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{op}: weight must be [N, K] as in nn.Linear with K={x.shape[-1]} of x {_shape(x)}, "
                f"got {_shape(weight)}"
            )
    for bias, weight in zip(biases, weights, strict=False):
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{op}: bias must be [{weight.shape[0]}] for weight {_shape(weight)}, got {_shape(bias)}"
            )


def _each(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _check_scaled(
    op: str,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    options: CallOptions,
    scale_x: Tensor,
    scale_w: Any,
) -> None:
    """What operands with scales must be in addition to all that `_check_operands` asks of any."""
    scales = _each(scale_w)
    if len(scales) != len(weights):
        raise ValueError(f"{op}: {len(weights)} weights need as many scale_w, got {len(scales)}")
    if options.out_dtype not in OUT_DTYPES:
        raise TypeError(
            f"{op}: out_dtype must be one of {', '.join(map(str, OUT_DTYPES))}, got {options.out_dtype}"
        )
    for name, given, dtypes in (
        ("weight", weights, tuple(FLOAT8)),
        ("bias", biases, (options.out_dtype,)),
        ("scale_x", [scale_x], SCALE_DTYPES),
        ("scale_w", scales, SCALE_DTYPES),
    ):
        for tensor in given:
            if tensor.dtype not in dtypes:
                raise TypeError(
                    f"{op}: {name} must be {' or '.join(map(str, dtypes))} where x is {x.dtype} and out_dtype"
                    f" {options.out_dtype}, got {tensor.dtype}"
                )
    if x.shape[-1] % DEPTH:
        raise ValueError(f"{op}: K of operands with scales must be a multiple of {DEPTH}, got {x.shape[-1]}")
    for name, matrix in (("x", x), *(("weight", weight) for weight in weights)):
        if matrix.numel() and matrix.stride(-1) != 1:
            raise ValueError(
                f"{op}: the columns of {name} must be contiguous where operands have scales, as Hopper's "
                f"tensor cores read 8-bit operands; got strides {matrix.stride()}"
            )
    if (blocks := of_blocks(scale_x, x.shape[-1])) == MX:
        _check_mx(op, x, weights, scale_x, scales)
        if x.ndim > 2 and options.dim not in (None, 0, -x.ndim):
            raise ValueError(
                f"{op}: scales of {mx.SCALE} lie in the order of x's rows, so dim must be its first; got "
                f"dim={options.dim} of x {_shape(x)}"
            )
        return
    if blocks:
        _check_blocks(op, x, weights, scale_x, scales, blocks)
        return
    rows = [*x.shape[:-1], 1]
    if scale_x.numel() != 1 and list(scale_x.shape) != rows:
        raise ValueError(
            f"{op}: scale_x must have one element, or be {rows}, one per row of x, or for "
            f"{' or '.join(str(kind[2]) for kind in PROMOTED)} of K; got {_shape(scale_x)}"
        )
    for scale, weight in zip(scales, weights, strict=True):
        columns = weight.shape[0]
        if scale.numel() != 1 and list(scale.shape) not in ([columns, 1], [1, columns]):
            raise ValueError(
                f"{op}: scale_w must have one element, or be [{columns}, 1] or [1, {columns}], one per row "
                f"of weight {_shape(weight)}; got {_shape(scale)}"
            )


def _check_mx(op: str, x: Tensor, weights: list[Tensor], scale_x: Tensor, scales: list[Tensor]) -> None:
    """Numbers of scales of MX types."""
    if x.shape[-1] % mx.WIDTH:
        raise ValueError(
            f"{op}: K of operands with scales of {mx.SCALE} must be a multiple of {mx.WIDTH}, got "
            f"{x.shape[-1]}"
        )
    for name, given, matrix in (
        ("scale_x", scale_x, x),
        *(("scale_w", scale, weight) for scale, weight in zip(scales, weights, strict=True)),
    ):
        wanted = mx.num_scales(matrix.shape[:-1].numel(), matrix.shape[-1])
        if given.numel() != wanted or given.ndim != 1 or given.dtype != mx.SCALE:
            raise ValueError(
                f"{op}: {name} must be [{wanted}] of {mx.SCALE}, in atoms of 128 rows and 128 of K "
                f"(SWIZZLE_32_4_4), for an operand {_shape(matrix)}; got {_shape(given)} of {given.dtype}"
            )


def _check_blocks(
    op: str, x: Tensor, weights: list[Tensor], scale_x: Tensor, scales: list[Tensor], blocks: Blocks
) -> None:
    """Shapes of scales of blocks."""
    along_k = scale_x.shape[-1]
    for name, given, matrix, wanted in (
        ("scale_x", scale_x, x, [*x.shape[:-1], along_k]),
        *(
            ("scale_w", scale, weight, [-(-weight.shape[0] // blocks[1]), along_k])
            for scale, weight in zip(scales, weights, strict=True)
        ),
    ):
        if list(given.shape) != wanted:
            raise ValueError(
                f"{op}: {name} of {in_words(blocks)} must be {wanted} for an operand {_shape(matrix)}, "
                f"as scale_x has an element for {blocks[2]} of K; got {_shape(given)}"
            )


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def total_extent(
    op: str, what: str, given: Length, length: int, x: Tensor, group: str, facts: agree.Facts
) -> int:
    """The sharded extent over all ranks: the caller's, or equal shards in a graph, or what the ranks say.

    Args:
        op: For messages.
        what: The name of the extent, for messages.
        given: By the caller.
        length: This rank's share.
        x: The op's operand.
        group: Every rank of which calls.
        facts: As for `agree.same`.

    Raises:
        ValueError: This rank's share is not that of `given`, or the ranks' are not as `torch.chunk` cuts.
    """
    if given is None and not torch.compiler.is_compiling() and not is_capturing(x):
        return agree.total_length(op, what, length, x.device, resolve(group), facts)
    if given is None or given == "equal":
        return length * group_size(group)
    own = Shards.even(given, group_size(group)).size(group_rank(group))
    if own != length:
        raise ValueError(
            f"{op}: of {what}={given} rank {group_rank(group)} of {group_size(group)} owns {own} "
            f"(as torch.chunk cuts), but its operand has {length}"
        )
    return given


def is_capturing(x: Tensor) -> bool:
    """Whether what is done with x is being captured in a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _known(op: str, what: str, given: Length, local: int, group: str) -> int | None:
    """The extent over all ranks that only the choice of a backend looks at; None if nobody knows."""
    if given == "equal":
        return local * group_size(group)
    if given is not None and given < local:
        raise ValueError(f"{op}: {what}={given} over all ranks is less than this rank's {local}")
    return given
