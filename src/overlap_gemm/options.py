"""What a call may be told in addition to its tensors: one list for users, schema, cache and peers."""

from typing import Any, Literal, NamedTuple, TypeAlias, get_type_hints

from .backends.select import preferring

Length: TypeAlias = int | Literal["equal"] | None
"""A sharded extent over all ranks; "equal": every rank has as much as this one; None: ask the others."""


class Passed(NamedTuple):
    """What of it every op of ``torch.ops.overlap_gemm`` takes, after its tensors and lengths.

    Attributes:
        group: Name of the process group.
        backend: "auto", a backend's name, or that with `select.OR_AUTO`.
        deterministic: Whether sums must come out bitwise the same; None asks torch's switch.
        reserve_sms: SMs to leave to others on this rank.
        dim: The dimension of the caller's x along which rows are sharded, for comparison alone.
    """

    group: str
    backend: str
    deterministic: bool | None
    reserve_sms: int | None
    dim: int

    def backward(self) -> "Passed":
        """The same for the gradient's ops."""
        return self._replace(backend=preferring(self.backend))

    def agreed(self) -> tuple[tuple[str, Any], ...]:
        """What must be the same on all ranks, as far as `backends.base.Problem` does not hold it."""
        return ("backend", self.backend), ("dim", self.dim)


KINDS: dict[Any, str] = {str: "str", int: "int", bool | None: "bool?", int | None: "int?"}

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

    def passed(self, group: str) -> Passed:
        """What an op takes of it."""
        return Passed(group, self.backend, self.deterministic, self.reserve_sms, self.dim)

    def told(self, argument: str, length: Length) -> "CallOptions":
        """The same with an extent over all ranks."""
        return self._replace(**{argument: length})  # type: ignore[arg-type]

    def equal(self, argument: str | None) -> "CallOptions":
        """Those of a call that asks nobody for this extent."""
        return self.told(argument, "equal") if argument else self
