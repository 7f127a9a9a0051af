"""`OpCall`: all that is said of a call but its op and its tensors, in one record.

It is made at the public function, with extents as callers say them. `dispatch.lowering` replaces these by the
extents over all ranks, and the record goes on as it is:

- with the tensors' layouts it is the key of what is kept for calls that are alike;
- its fields are the arguments, after the tensors, of the ops of ``torch.ops.overlap_gemm`` (`SCHEMA`);
- `OpCall.agreed` is what the ranks compare;
- backends, the time model and `explain` read it in a `Problem`, with the facts of tensors and ranks.

A new option is a field here: key, schema, comparison and `explain` have it.
"""

from functools import cache
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_type_hints

import torch

from ..config.scale_blocks import Blocks
from ..runtime import environment
from ..spec import ARGUMENTS, OpSpec
from ..spec.promises import LEAVES, InvarianceError, Invariant, Partials, Promises
from ..tuning.settings import settings
from .scales.scaling import NAMED_BLOCKS, Block

BackendName = Literal["auto", "torch", "sequential", "decomposed", "fused"]
"""What callers may ask for; `select.BACKENDS` has them."""

FALLBACK = " or auto"
"""After a backend's name: where that backend has no such op, it falls back to what `auto` chooses."""

Length: TypeAlias = int | Literal["equal", "exchange"] | None
"""A sharded extent over all ranks; "equal": every rank has as much as this one; None: likewise, which they
compare at the first call of a kind (of extents that an op does not need: nothing is known); "exchange": they
ask each other in every call."""


class OpCall(NamedTuple):
    """What is said of one call of any op; each op uses the fields that it has.

    A `NamedTuple`, since one is made in every call: a frozen dataclass takes the host 3 us more.

    Attributes:
        group: Name of the process group; empty until the call is lowered.
        rows: M over all ranks; lowered: of the flattened x.
        columns: N over all ranks.
        k: K over all ranks.
        chunk: Rows (columns, where the output is gathered) of a full shard; set when the call is lowered.
        dim: The dimension of x along which rows are sharded.
        keep: Keep the operand that is communicated, for the caller or for backward.
        backend: "auto", a backend's name, or that with `FALLBACK`.
        deterministic: Whether sums must come out bitwise the same; None asks torch's switch.
        reserve_sms: SMs to leave to others on this rank.
        copied_weight: Whether the weight may be a copy that the call itself makes, which no kernel may read
            before the kernel in front has ended.
        out_dtype: Of the result, where operands have scales; else None.
        block: What shares a scale, where operands have some, by its name in `scales.scaling.NAMED_BLOCKS`.
        partials: See `spec.promises.Promises`.
        invariant: See there.
        epilogue: Key of the epilogue that sums go through (`epilogues.epilogue_of`), or None.
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
        """Which blocks scales are of; None: of rows, or there are none."""
        return None if self.block is None else _BLOCKS[str(self.block)]

    @property
    def promises(self) -> Promises:
        """What is promised: by the call, else by the caller's block, else by the environment."""
        return promises_of(self.partials, self.invariant)

    def promising(self) -> "OpCall":
        """The same that says itself what is promised, also where the block around it has ended."""
        partials, invariant = self.promises
        return self._replace(partials=partials, invariant=invariant)

    def summed(self, op: OpSpec, local: int, ranks: int) -> "OpCall":
        """The same with K over all ranks: where it is cut into leaves, ranks have as much as each other.

        Raises:
            InvarianceError: It is cut, and ranks have not as much as each other.
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
        """(name, value) of all that must be the same on every rank."""
        return tuple(
            (name, value)
            for name, value in zip(self._fields, self, strict=True)
            if name not in ("group", *RANKS_OWN)
        )

    def backward(self, **changes: Any) -> "OpCall":
        """The same for an op of the gradient, whose weight may be several weights joined."""
        changes = {"backend": with_fallback(self.backend), "copied_weight": True, **changes}
        return self._replace(**changes)

    def unasked(self, op: OpSpec) -> "OpCall":
        """The same of a call that asks no rank: shards are equal, where nothing else is known."""
        if op.asked is None or getattr(self, ARGUMENTS[op.asked]) not in (None, "exchange"):
            return self
        return self._replace(**{ARGUMENTS[op.asked]: "equal"})  # type: ignore[arg-type]

    def check_lengths(self, op: OpSpec) -> None:
        """Raises a ValueError for extents that are none."""
        for axis, argument in ARGUMENTS.items():
            given = getattr(self, argument)
            words = ("equal", "exchange") if axis == op.asked else ("equal",)
            is_number = isinstance(given, (int, torch.SymInt, Integral))
            if given is not None and not is_number and given not in words:
                known = " or ".join(map(repr, words))
                raise ValueError(f"{op.name}: {argument} must be a number, {known}, or None; got {given!r}")

    def __str__(self) -> str:
        """The options that are not the defaults, as a caller writes them."""
        left_out = ("group", "backend", "chunk", *ARGUMENTS.values())
        fields = zip(self._fields, self, _DEFAULTS, strict=True)
        said = [(n, v) for n, v, usual in fields if n not in left_out and v != usual and v is not False]
        return ", ".join(f"{name}={value}" for name, value in said)


RANKS_OWN = ("reserve_sms", "copied_weight")
"""Fields in which ranks may differ."""

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
    """What the environment said at the first call."""
    found = environment.choice(INVARIANT_VARIABLE, ("none", *LEAVES))
    return Promises(invariant=None if found == "none" else found)  # type: ignore[arg-type]


def promises_of(partials: Any = None, invariant: Any = None) -> Promises:
    """What a call with these arguments promises: what they do not say the block says, or the environment.

    While Dynamo traces what surrounds an op, which asks again when it runs, the arguments count alone.
    """
    if torch.compiler.is_dynamo_compiling():
        return Promises(partials, invariant)
    return Promises(partials, invariant).over(settings().promises).over(_of_environment())


def _kind(hint: Any) -> str:
    return _KINDS[hint] if hint in _KINDS else hint.__metadata__[0]


SCHEMA = ", ".join(
    f"{_kind(hint)} {name}" for name, hint in get_type_hints(OpCall, include_extras=True).items()
)
"""The fields of `OpCall` as torch's schemas write them."""


def extents_of(extents: tuple[int, int | None, int | None]) -> dict[str, Any]:
    """(M, N, K) by the names of the fields."""
    return dict(zip(ARGUMENTS.values(), extents, strict=True))


def with_fallback(requested: str) -> str:
    """What a backward pass asks for: the forward's backend if it has the dual op, else `auto`'s choice."""
    return requested if requested == "auto" or requested.endswith(FALLBACK) else requested + FALLBACK
