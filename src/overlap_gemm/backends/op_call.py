"""`OpCall`: all options and extents of a call except its op and its tensors, in one record.

The public function makes it, with extents as callers pass them. `dispatch.lowering` replaces these by the
extents over all ranks, and the record is passed on unchanged:

- with the tensors' layouts it is the key of the cache of known calls;
- its fields are the arguments, after the tensors, of the ops of ``torch.ops.overlap_gemm`` (`SCHEMA`);
- ranks compare `OpCall.agreed`;
- backends, the time model and `explain` read it in a `Problem`, with the facts of tensors and ranks.

A new option is a field here: key, schema, comparison and `explain` include it.
"""

from functools import cache
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_type_hints

import torch

from ..config.scale_blocks import Blocks
from ..runtime import environment
from ..spec import ARGUMENTS, OpSpec
from ..spec.promises import LEAVES, NO_PROMISES, InvarianceError, Invariant, Partials, Promises
from ..tuning.settings import settings
from .scales.scaling import NAMED_BLOCKS, Block

BackendName = Literal["auto", "torch", "sequential", "decomposed", "fused"]
"""Names that callers may pass as `backend=`; `select.BACKENDS` has the backends."""

FALLBACK = " or auto"
"""Suffix of a backend's name: if that backend does not have the op, `auto` chooses another one."""

Length: TypeAlias = int | Literal["equal", "exchange"] | None
"""A sharded extent over all ranks.

- "equal": every rank has as much as this one.
- None: the same; the ranks compare it at the first call of a signature. An extent that an op does not need
  is unknown.
- "exchange": the ranks exchange their extents in every call."""


class OpCall(NamedTuple):
    """Options and extents of one call of any op; each op uses the fields that it has.

    A `NamedTuple`, since one is made in every call: a frozen dataclass takes the host 3 us more.

    Attributes:
        group: Name of the process group; empty until the call is lowered.
        rows: M over all ranks; lowered: of the flattened x.
        columns: N over all ranks.
        k: K over all ranks.
        chunk: Rows (columns if the output is gathered) of a full shard; set when the call is lowered.
        dim: Dimension of x along which rows are sharded.
        keep: Whether to keep the operand that is communicated, for the caller or for backward.
        backend: "auto", a backend's name, or that with `FALLBACK`.
        deterministic: Whether sums must be bitwise the same from call to call; None takes torch's switch.
        reserve_sms: Number of SMs to leave to other kernels on this rank.
        copied_weight: Whether the weight may be a copy that the call itself makes. No kernel may read it
            before the preceding kernel has ended.
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
        """Returns the promises of the call, else of the caller's block, else of the environment."""
        return promises_of(self.partials, self.invariant)

    def promising(self) -> "OpCall":
        """Returns the call with its promises as fields, so that they hold after the caller's block, too."""
        partials, invariant = self.promises
        return self._replace(partials=partials, invariant=invariant)

    def summed(self, op: OpSpec, local: int, ranks: int) -> "OpCall":
        """Returns the call with K over all ranks, if K is cut into leaves; these need equal parts of K.

        Args:
            op: Definition of the op.
            local: This rank's part of K.
            ranks: Number of ranks.

        Raises:
            InvarianceError: K is cut into leaves, and the ranks have different parts of K.
        """
        if not (op.sums and self.promises.has_tree):
            return self
        if self.k is not None and self.k != local * ranks:
            raise InvarianceError(
                f"invariant={self.promises.invariant!r} sums equal parts of {self.k} elements on {ranks} "
                f"ranks; this one has {local}"
            )
        return self._replace(k=local * ranks)

    def agreed(self) -> tuple[tuple[str, Any], ...]:
        """Returns (name, value) of the fields that must be the same on every rank."""
        return tuple(
            (name, value)
            for name, value in zip(self._fields, self, strict=True)
            if name not in ("group", *RANKS_OWN)
        )

    def backward(self, **changes: Any) -> "OpCall":
        """Returns the call for an op of the gradient, whose weight may be several weights joined."""
        changes = {"backend": with_fallback(self.backend), "copied_weight": True, **changes}
        return self._replace(**changes)

    def without_exchange(self, op: OpSpec) -> "OpCall":
        """Returns the call without an exchange of extents: unknown shards are taken as equal."""
        if op.unresolved_axis is None or getattr(self, ARGUMENTS[op.unresolved_axis]) not in (
            None,
            "exchange",
        ):
            return self
        return self._replace(**{ARGUMENTS[op.unresolved_axis]: "equal"})  # type: ignore[arg-type]

    def check_lengths(self, op: OpSpec) -> None:
        """Raises a ValueError for extents of a wrong type or name."""
        for axis, argument in ARGUMENTS.items():
            extent = getattr(self, argument)
            words = ("equal", "exchange") if axis == op.unresolved_axis else ("equal",)
            is_number = isinstance(extent, (int, torch.SymInt, Integral))
            if extent is not None and not is_number and extent not in words:
                known = " or ".join(map(repr, words))
                raise ValueError(f"{op.name}: {argument} must be a number, {known}, or None; got {extent!r}")

    def __str__(self) -> str:
        """Returns the options that differ from the defaults, as a caller writes them."""
        left_out = ("group", "backend", "chunk", *ARGUMENTS.values())
        fields = zip(self._fields, self, _DEFAULTS, strict=True)
        options = [(n, v) for n, v, usual in fields if n not in left_out and v != usual and v is not False]
        return ", ".join(f"{name}={value}" for name, value in options)


RANKS_OWN = ("reserve_sms", "copied_weight")
"""Fields that may differ between ranks."""

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
    """Returns the promises of the environment at the first call."""
    name = environment.choice(INVARIANT_VARIABLE, ("none", *LEAVES))
    return Promises(invariant=None if name == "none" else name)  # type: ignore[arg-type]


def promises_of(partials: Any = None, invariant: Any = None) -> Promises:
    """Returns the promises of a call: its arguments, else the caller's block, else the environment.

    While Dynamo traces the code around an op, the arguments count alone: the op resolves them again when it
    runs.
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
    """Returns (M, N, K) under the names of the fields."""
    return dict(zip(ARGUMENTS.values(), extents, strict=True))


def with_fallback(requested: str) -> str:
    """Returns the backend of a backward pass: the forward's if it has the dual op, else `auto`'s choice."""
    return requested if requested == "auto" or requested.endswith(FALLBACK) else requested + FALLBACK
