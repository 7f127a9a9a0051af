"""Arguments of one call: `CallOperands` are its tensors, `OpCall` its options and extents.

A public function makes both from the caller's arguments. `dispatch.lowering` replaces the extents by those
over all ranks. `OpCall` is then passed on unchanged, and has these uses:

- Together with the tensors' layouts, it is the key of the cache of prepared calls.
- Its fields are the arguments after the tensors of the ops of ``torch.ops.overlap_gemm`` (`SCHEMA`).
- Ranks compare `OpCall.agreed`.
- Backends, the time model and `explain` read it as `Problem.call`.

A new option of the ops is a new field here: all four uses then include it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_type_hints

import torch
from torch import Tensor

from ..config.scale_blocks import Blocks
from ..runtime import environment
from ..spec import ARGUMENTS, OpSpec
from ..spec.promises import LEAVES, NO_PROMISES, InvarianceError, Invariant, Partials, Promises
from ..tuning.settings import settings
from .scales.scaling import NAMED_BLOCKS, Block

BackendName = Literal["auto", "torch", "sequential", "decomposed", "fused"]
"""Names that callers may pass as `backend=`; `select.BACKENDS` has the backends."""

FALLBACK = " or auto"
"""Suffix of a backend's name, as in "fused or auto": if that backend cannot run the op, `auto` chooses
another one, with a warning. Users may pass it; backward passes append it to the forward pass' backend."""

Length: TypeAlias = int | Literal["equal", "exchange"] | None
"""A sharded extent over all ranks, as callers pass it.

- A number: the extent.
- "equal": every rank has as large a share as this one.
- None: like "equal", but the ranks compare their shares at the first call of a signature. If the op does not
  need the extent, it stays unknown.
- "exchange": the ranks exchange their shares in every call.
"""


class CallOperands(NamedTuple):
    """Tensors of one call of any op, as the caller passes them or two-dimensional.

    Attributes:
        x: `[M, ..., K]`; in `Backend.bind` of an op whose x has columns of K also `Joined`.
        weight: `[N, K]`; a list of weights if the op takes lists. If x is `Joined`, its weight is.
        bias: `[N]` or None; a list, which may be empty, if the op takes lists.
        scale_x: Scales of x; None without scales.
        scale_w: Scales of the weight, or a list of them; None without scales.
        inputs: Inputs of the epilogue.
    """

    x: Any
    weight: Any
    bias: Any = None
    scale_x: Any = None
    scale_w: Any = None
    inputs: Sequence[Tensor] = ()

    @property
    def scales(self) -> tuple[Any, ...]:
        """Returns (scale_x, scale_w); empty for operands without scales."""
        return () if self.scale_x is None and self.scale_w is None else self[3:5]

    def lists(self, op: OpSpec) -> tuple[list[Tensor], list[Tensor]]:
        """Returns (weights, biases) of a call of `op`."""
        if op.takes_lists:
            return self.weight, self.bias or []
        return [self.weight], [] if self.bias is None else [self.bias]


NO_OPERANDS = CallOperands(None, None)
"""Values of fields that are not passed."""

operands_of = partial(tuple.__new__, CallOperands)
"""Makes operands of a sequence of all fields; a call of the class enters a Python function, in every call."""


def operands_of_lists(passed: tuple[Any, Any, Any, Any, Any]) -> CallOperands:
    """Returns the operands of an op that takes lists; a single weight becomes a list of one.

    Args:
        passed: x, weight, bias and their scales, as callers pass them.
    """
    x, weight, bias, scale_x, scale_w = passed
    weights = list(weight) if isinstance(weight, (list, tuple)) else [weight]
    biases = list(bias) if isinstance(bias, (list, tuple)) else None if bias is None else [bias]
    scales_w = scale_w if scale_w is None or isinstance(scale_w, (list, tuple)) else [scale_w]
    return operands_of((x, weights, biases or None, scale_x, scales_w, ()))


@dataclass(frozen=True)
class Joined:
    """Matrices side by side along K, in place of x or of a weight: the products of the parts are added.

    Attributes:
        parts: `[rows, K_i]` of one dtype.
    """

    parts: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the parts."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        """Returns the device of the parts."""
        return self.parts[0].device

    @property
    def is_cuda(self) -> bool:
        """Returns whether the parts are on a GPU."""
        return self.parts[0].is_cuda

    @property
    def widths(self) -> tuple[int, ...]:
        """Returns K_i of each part."""
        return tuple([one.shape[1] for one in self.parts])

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (rows, K), the sum of all K_i."""
        return len(self), sum(self.widths)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, rows: slice) -> "Joined":
        return Joined(tuple([one[rows] for one in self.parts]))

    def new_empty(self, *shape: int) -> Tensor:
        """Returns a new uninitialised tensor of the parts' dtype."""
        return self.parts[0].new_empty(*shape)

    def is_contiguous(self) -> bool:
        """Returns whether all parts are contiguous."""
        return all(one.is_contiguous() for one in self.parts)

    def contiguous(self) -> "Joined":
        """Returns the operand with contiguous parts."""
        return Joined(tuple([one.contiguous() for one in self.parts]))

    def new_side_by_side(self) -> Tensor:
        """Returns a new uninitialized tensor for `side_by_side`, contiguous in the first part's dimension."""
        rows, depth = self.shape
        if self.parts[0].stride(1) == 1:
            return self.new_empty(rows, depth)
        return self.new_empty(depth, rows).t()

    def side_by_side(self) -> Tensor:
        """Returns a copy of the parts in one tensor."""
        if self.parts[0].stride(1) == 1:
            return torch.cat(self.parts, 1)
        return torch.cat([one.t() for one in self.parts]).t()  # contiguous copies

    def times(self, weight: "Joined", addend: Tensor | None, out: Tensor | None) -> Tensor:
        """Returns the sum of the parts' products with those of `weight`, plus addend, in `out` if passed."""
        first, *others = zip(self.parts, weight.parts, strict=True)
        total = torch.mm(first[0], first[1].t(), out=out)
        for part, of_part in others:
            total.addmm_(part, of_part.t())
        return total if addend is None else total.add_(addend)


def parts_of(spec: OpSpec, weights: Sequence[Any]) -> tuple[int, ...]:
    """Returns `Problem.parts` of a call: K over all ranks of each matrix, 0 if ranks have parts of it.

    Args:
        spec: Definition of the op.
        weights: Weights of the call, one of which is `Joined` if x is.
    """
    if not isinstance(weights[0], Joined):
        return ()
    return (0,) * len(weights[0].parts) if spec.sums else weights[0].widths


def bind_joined(
    bind: Callable[..., Callable[..., Any]], problem: Any, operands: CallOperands, *where: Any
) -> Callable[..., Any]:
    """Returns the bound function of a sum of `Joined` operands, which copies them side by side in each call.

    Args:
        bind: `Backend.bind` of the problem of one matrix.
        problem: Problem of the call.
        operands: Operands of the call.
        *where: Other arguments of `bind`.
    """
    x, weight, *_ = operands
    layouts = operands._replace(x=x.new_side_by_side(), weight=weight.new_side_by_side())
    run = bind(replace(problem, parts=()), layouts, *where)

    def run_side_by_side(operands: CallOperands) -> Any:
        x, weight, *_ = operands
        return run(operands._replace(x=x.side_by_side(), weight=weight.side_by_side()))

    return run_side_by_side


class OpCall(NamedTuple):
    """Options and extents of one call of any op; an op ignores fields that it does not support.

    It is a `NamedTuple`, because one is made in every call: a frozen dataclass takes 3 us more host time.

    Attributes:
        group: Name of the process group; empty until the call is lowered.
        rows: M over all ranks; after lowering, the rows of the flattened x.
        columns: N over all ranks.
        k: K over all ranks.
        chunk: Rows (columns if the output is gathered) of a full shard; set when the call is lowered.
        dim: Dimension of x along which rows are sharded.
        keep: Whether to keep the operand that is communicated, for the caller or for backward.
        backend: "auto", a backend's name, or that with `FALLBACK`.
        deterministic: Whether sums must be bitwise the same from call to call; None takes torch's switch.
        reserve_sms: Number of SMs to leave to other kernels on this rank.
        copied_weight: Whether the weight may be a copy that the preceding kernel writes, such as a cast. A
            kernel that starts early must then not read it before that kernel has ended.
        out_dtype: Dtype of the result if operands have scales; else None.
        block: Elements that share a scale, by their name in `scales.scaling.NAMED_BLOCKS`.
        partials: Dtype of partial sums, as in `spec.promises.Promises`.
        invariant: Invariance of the bits, as in `spec.promises.Promises`.
        epilogue: Key of the epilogue applied to the sums (`epilogues.epilogue_of`), or None.
    """

    group: str = ""
    rows: Length = None
    columns: Length = None
    k: Length = None
    chunk: Annotated[int, "SymInt"] = 0
    dim: int = 0
    keep: bool = False
    backend: str = "auto"
    deterministic: bool | None = None
    reserve_sms: int | None = None
    copied_weight: bool = False
    out_dtype: torch.dtype | None = None
    block: Block = None
    partials: Partials | None = None
    invariant: Invariant | None = None
    epilogue: str | None = None

    @property
    def blocks(self) -> Blocks | None:
        """Returns the blocks that share a scale; None if scales are of rows, or there are none."""
        return None if self.block is None else _BLOCKS[str(self.block)]

    @property
    def promises(self) -> Promises:
        """Returns the promises of the call; those it lacks come from `promising`, then the environment."""
        return promises_of(self.partials, self.invariant)

    def promising(self) -> "OpCall":
        """Returns the call with `promises` stored in its fields; later calls need no context for them."""
        partials, invariant = self.promises
        return self._replace(partials=partials, invariant=invariant)

    def summed(self, op: OpSpec, local: int, ranks: int) -> "OpCall":
        """Returns the call with `k` set, if the op must sum K in the order of a tree (`invariant=`).

        The tree needs equal shares of K.

        Args:
            op: Definition of the op.
            local: This rank's share of K.
            ranks: Number of ranks.

        Raises:
            InvarianceError: The op sums by a tree, and `k` is not `ranks` times this rank's share.
        """
        if not (op.sums and self.promises.has_tree):
            return self
        if self.k is not None and self.k != local * ranks:
            raise InvarianceError(
                f"invariant={self.promises.invariant!r} needs equal parts of K={self.k} on {ranks} ranks; "
                f"this rank has {local}"
            )
        return self._replace(k=local * ranks)

    def agreed(self) -> tuple[tuple[str, Any], ...]:
        """Returns (name, value) of the fields that must be the same on every rank."""
        return tuple(
            (name, value)
            for name, value in zip(self._fields, self, strict=True)
            if name not in ("group", *PER_RANK)
        )

    @property
    def signed(self) -> str:
        """Returns `agreed` without lengths and defaults, as text; fused kernels compare it in every call.

        Lengths are part of the layouts that kernels compare, as far as ranks must have the same.
        """
        usual, shared = _DEFAULTS._asdict(), self.agreed()
        return ", ".join(f"{n}={value}" for n, value in shared if value != usual[n] and n not in LENGTHS)

    def backward(self, **changes: Any) -> "OpCall":
        """Returns the call for an op of the backward pass, with these fields changed, without an epilogue.

        Its weight may be a copy, because several weights may be joined.
        """
        changes = {"backend": with_fallback(self.backend), "copied_weight": True, "epilogue": None, **changes}
        return self._replace(**changes)

    def without_exchange(self, op: OpSpec) -> "OpCall":
        """Returns the call with "equal" in place of an extent that ranks would compare or exchange."""
        if op.unresolved_axis is None or getattr(self, ARGUMENTS[op.unresolved_axis]) not in (
            None,
            "exchange",
        ):
            return self
        return self._replace(**{ARGUMENTS[op.unresolved_axis]: "equal"})  # type: ignore[arg-type]

    def check_lengths(self, op: OpSpec) -> None:
        """Checks the extents as callers pass them.

        Raises:
            ValueError: An extent is no number, None, or one of the strings that the op allows.
        """
        for axis, argument in ARGUMENTS.items():
            extent = getattr(self, argument)
            words = ("equal", "exchange") if axis == op.unresolved_axis else ("equal",)
            is_number = isinstance(extent, (int, torch.SymInt, Integral))
            if extent is not None and not is_number and extent not in words:
                known = " or ".join(map(repr, words))
                raise ValueError(f"{op.name}: {argument} must be a number, {known}, or None; got {extent!r}")

    def __str__(self) -> str:
        """Returns the options that differ from the defaults, as keyword arguments; for messages."""
        left_out = ("group", "backend", *LENGTHS)
        fields = zip(self._fields, self, _DEFAULTS, strict=True)
        options = [(n, v) for n, v, usual in fields if n not in left_out and v != usual and v is not False]
        return ", ".join(f"{name}={value}" for name, value in options)


def split(arguments: tuple[Any, ...]) -> tuple[CallOperands, OpCall]:
    """Returns the operands and the call of an op's arguments; trailing tensors may be omitted."""
    number = len(arguments) - len(OpCall._fields)
    return CallOperands(*arguments[:number]), OpCall(*arguments[number:])


PER_RANK = ("reserve_sms", "copied_weight")
"""Fields that may differ between ranks."""

LENGTHS = ("chunk", *ARGUMENTS.values())
"""Fields that are extents."""

_DEFAULTS = OpCall()
_BLOCKS = {str(name): blocks for name, blocks in NAMED_BLOCKS.items()}
_KINDS: dict[Any, str] = {
    str: "str", str | None: "str?", int: "int", bool: "bool", bool | None: "bool?", int | None: "int?",
    Length: "SymInt?", torch.dtype | None: "ScalarType?",
    Block: "str?", Partials | None: "str?", Invariant | None: "str?",
}  # fmt: skip


INVARIANT_VARIABLE = "OVERLAP_GEMM_INVARIANT"


@cache
def _of_environment() -> Promises:
    """Returns the promises of `OVERLAP_GEMM_INVARIANT`, which is read once in a process."""
    name = environment.choice(INVARIANT_VARIABLE, ("none", *LEAVES))
    return Promises(invariant=None if name == "none" else name)  # type: ignore[arg-type]


def promises_of(partials: Any = None, invariant: Any = None) -> Promises:
    """Returns the promises of a call: its arguments, else those of `promising`, else of the environment.

    While Dynamo traces code around an op, only the arguments are used: the op resolves the promises when it
    runs.

    Args:
        partials: Dtype of partial sums, or None.
        invariant: Invariance of the bits, or None.
    """
    if torch.compiler.is_dynamo_compiling():
        return Promises(partials, invariant)
    of_block, of_environment = settings().promises, _of_environment()
    others = of_block if of_environment == NO_PROMISES else of_block.over(of_environment)
    return others if partials is None and invariant is None else Promises(partials, invariant).over(others)


def _kind(hint: Any) -> str:
    return _KINDS[hint] if hint in _KINDS else hint.__metadata__[0]


SCHEMA = ", ".join(
    f"{_kind(hint)} {name}" for name, hint in get_type_hints(OpCall, include_extras=True).items()
)
"""Fields of `OpCall` in the syntax of torch's schemas."""


def extents_of(extents: tuple[int, int | None, int | None]) -> dict[str, Any]:
    """Returns the extents (M, N, K) as keyword arguments `rows`, `columns` and `k`."""
    return dict(zip(ARGUMENTS.values(), extents, strict=True))


def with_fallback(requested: str) -> str:
    """Returns `backend=` of a backward pass: the forward pass's backend, and `auto` if that cannot run it."""
    return requested if requested == "auto" or requested.endswith(FALLBACK) else requested + FALLBACK
