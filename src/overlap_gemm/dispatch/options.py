"""What a call may be told in addition to its tensors: one list for users, schema, cache and peers."""

from collections.abc import Sequence
from functools import cache
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_type_hints

import torch
from torch import Tensor

from ..backends.base import BackendName
from ..backends.scales.scaling import NAMED_BLOCKS, Block
from ..backends.select import with_fallback
from ..config.scale_blocks import Blocks
from ..runtime import environment
from ..runtime.group import GroupLike
from ..spec import ARGUMENTS, OPS
from ..spec.promises import LEAVES, Invariant, Partials, Promises
from ..tuning.settings import settings

Length: TypeAlias = int | Literal["equal", "exchange"] | None
"""A sharded extent over all ranks; "equal": every rank has as much as this one; None: likewise, which they
compare at the first call of a kind (of extents that an op does not need: nothing is known); "exchange": they
ask each other in every call."""

ASKED = {name: ARGUMENTS[spec.asked] for name, spec in OPS.items() if spec.asked}
"""By ops: the option that says the extent which they need, and a rank's shard does not say."""


INVARIANT_VARIABLE = "OVERLAP_GEMM_INVARIANT"


@cache
def _of_environment() -> Promises:
    """What the environment said at the first call."""
    found = environment.choice(INVARIANT_VARIABLE, ("none", *LEAVES))
    return Promises(invariant=None if found == "none" else found)  # type: ignore[arg-type]


def promises_of(partials: Any = None, invariant: Any = None) -> Promises:
    """What a call with these arguments promises: what they do not say the block says, or the environment."""
    return Promises(partials, invariant).over(settings().promises).over(_of_environment())


class Passed(NamedTuple):
    """What of it every op of ``torch.ops.overlap_gemm`` takes, after its tensors and lengths.

    Attributes:
        group: Name of the process group.
        backend: "auto", a backend's name, or that with `base.FALLBACK`.
        deterministic: Whether sums must come out bitwise the same; None asks torch's switch.
        reserve_sms: SMs to leave to others on this rank.
        dim: The dimension of the caller's x along which rows are sharded, for comparison alone.
        copied_weight: Whether the weight may be a copy that the call itself makes, which no kernel may read
            before the kernel in front has ended.
        partials: See `spec.promises.Promises`.
        invariant: See there.
    """

    group: str
    backend: str
    deterministic: bool | None
    reserve_sms: int | None
    dim: int
    copied_weight: bool
    partials: str | None
    invariant: str | None

    def backward(self) -> "Passed":
        """The same for the gradient's ops, whose weight may be several weights joined."""
        return self._replace(backend=with_fallback(self.backend), copied_weight=True)

    @property
    def promises(self) -> Promises:
        """What is promised: by the arguments, else by the caller's block, else by the environment."""
        return promises_of(self.partials, self.invariant)

    def agreed(self) -> tuple[tuple[str, Any], ...]:
        """What must be the same on all ranks, as far as `backends.base.Problem` does not hold it."""
        return ("backend", self.backend), ("dim", self.dim)


KINDS: dict[Any, str] = {str: "str", int: "int", bool: "bool", bool | None: "bool?", int | None: "int?",
                         str | None: "str?"}  # fmt: skip

SCHEMA = ", ".join(f"{KINDS[kind]} {name}" for name, kind in get_type_hints(Passed).items())
"""`Passed` as torch's schemas write it."""


class CallOptions(NamedTuple):
    """The options of all ops; each uses those that it has. With the tensors' layouts, the cache's key.

    A `NamedTuple`, since one is made in every call: a frozen dataclass takes the host 3 us more.

    Attributes:
        backend: See `Passed`.
        deterministic: See `Passed`.
        reserve_sms: See `Passed`.
        dim: The dimension of x along which rows are sharded.
        rows: M over all ranks.
        columns: N over all ranks.
        k: K over all ranks.
        return_gathered: Return the gathered operand as well.
        keep: Keep it, for the caller or for backward.
        single: Whether there is one weight, not a list.
        out_dtype: Of the result, where operands have scales; else None.
        copied_weight: See `Passed`.
        block: What shares a scale, where operands have some; see `backends.scales.scaling.Block`.
        partials: See `spec.promises.Promises`.
        invariant: See there.
    """

    backend: str = "auto"
    deterministic: bool | None = None
    reserve_sms: int | None = None
    dim: int = 0
    rows: Length = None
    columns: Length = None
    k: Length = None
    return_gathered: bool = False
    keep: bool = False
    single: bool = True
    out_dtype: torch.dtype | None = None
    copied_weight: bool = False
    block: Block = None
    partials: Partials | None = None
    invariant: Invariant | None = None

    def passed(self, group: str) -> tuple[Any, ...]:
        """What an op takes of it: `Passed`, and where operands have scales what `scaled` adds."""
        told = self.backend, self.deterministic, self.reserve_sms, self.dim, self.copied_weight
        promises = Promises(self.partials, self.invariant)
        if not torch.compiler.is_compiling():  # a graph's ops ask when they run
            promises = promises_of(*promises)
        passed = Passed(group, *told, *promises)
        if self.out_dtype is None:
            return passed
        return *passed, self.out_dtype, None if self.block is None else str(self.block)

    @property
    def blocks(self) -> Blocks | None:
        """Which blocks scales are of; None: of rows, or there are none."""
        return None if self.block is None else NAMED_BLOCKS[self.block]

    def told(self, argument: str, length: Length) -> "CallOptions":
        """The same with an extent over all ranks."""
        return self._replace(**{argument: length})  # type: ignore[arg-type]

    def unasked(self, op: str) -> "CallOptions":
        """Those of a call of `op` that asks nobody: shards are equal, where nothing else is known."""
        asked = ASKED.get(op)
        return self.told(asked, "equal") if asked and getattr(self, asked) in (None, "exchange") else self

    def check_lengths(self, op: str) -> None:
        """Raises a ValueError for extents that are none."""
        for argument in ARGUMENTS.values():
            given = getattr(self, argument)
            words = ("equal", "exchange") if argument == ASKED.get(op) else ("equal",)
            is_number = isinstance(given, (int, torch.SymInt, Integral))
            if given is not None and not is_number and given not in words:
                known = " or ".join(map(repr, words))
                raise ValueError(f"{op}: {argument} must be a number, {known}, or None; got {given!r}")


class GatherOptions(TypedDict, total=False):
    """The keywords of `functional.all_gather_gemm` that its overloads share."""

    group: GroupLike
    backend: BackendName
    rows: Length
    dim: int
    save_gathered: bool
    columns: Length
    deterministic: bool | None
    reserve_sms: int | None
    scale_x: Tensor | None
    scale_w: Tensor | Sequence[Tensor] | None
    out_dtype: torch.dtype | None
    block: Block
    partials: Partials | None
    invariant: Invariant | None
