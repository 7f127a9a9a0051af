"""`OpSpec`: which axes of the product `x [M, K] @ weight [N, K].T -> out [M, N]` an op shards."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Literal

Axis = Literal["m", "n", "k"]

ARGUMENTS: dict[Axis, str] = {"m": "rows", "n": "columns", "k": "k"}
"""The argument by which callers say an axis' extent over all ranks."""


@dataclass(frozen=True)
class OpSpec:
    """One op: what follows from the axis along which each of its tensors is sharded.

    Attributes:
        name: Its public name.
        code: Its number in failure records; no other op's, and not 0.
        label: Its short name, for tables.
        x: The sharded axis of x; None: every rank has all of it.
        weight: That of the weight; a rank's product is a part along it. None: x is not gathered either, and
            a rank's product has its rows of x alone.
        out: That of the result; None: every rank gets all of it.
        dual: Name of the op whose communication its gradient needs, where that moves as much.
        whole: Name of the op that gives all ranks all of what this one gives them shards of.
    """

    name: str
    code: int
    label: str
    x: Axis | None
    weight: Axis | None
    out: Axis | None
    dual: str | None = None
    whole: str | None = None

    @property
    def sums(self) -> bool:
        """Whether a rank's product is a partial sum."""
        return self.weight == "k"

    @property
    def gathers_operand(self) -> bool:
        """Whether x travels, before the product; else the product does."""
        return self.x == "m" and self.weight is not None

    @property
    def takes_lists(self) -> bool:
        """Whether x, which is sharded, may be multiplied with several weights; partial sums are of one."""
        return self.x is not None and self.weight != "k"

    @property
    def gathers_output(self) -> bool:
        """Whether a rank's product is columns of a result of which all get all."""
        return self.weight == "n" and self.out is None

    @property
    def deals_columns(self) -> bool:
        """Whether a rank makes, or gets, columns of a product that travels."""
        return not self.gathers_operand and "n" in (self.weight, self.out)

    @property
    def width(self) -> Axis:
        """The columns of what travels; its rows are M."""
        return "k" if self.gathers_operand else "n"

    @property
    def asked(self) -> Axis | None:
        """The sharded axis that is whole in the result: ranks ask each other for it if callers do not say."""
        return next((axis for axis in (self.x, self.weight) if axis not in (None, "k", self.out)), None)

    def arguments(self, m: int, n: int, k: int, least: bool = False) -> dict[str, int]:
        """What callers may say of the extents over all ranks; with `least` only the one that is asked for."""
        extents: dict[Axis, int] = {"m": m, "n": n, "k": k}
        said = (self.asked,) if least else (self.x, self.weight)
        return {ARGUMENTS[axis]: extents[axis] for axis in said if axis is not None}

    def known(self, m: int, n: int, k: int, said: Container[str]) -> tuple[int, int | None, int | None]:
        """(M, N, K); None for one that is sharded and does not travel, unless it is among what is `said`."""

        def hides(axis: Axis) -> bool:
            return axis != self.width and axis in (self.x, self.weight) and ARGUMENTS[axis] not in said

        return m, None if hides("n") else n, None if hides("k") else k

    def shapes(
        self, m: int, n: int, k: int, own: Callable[[int], int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Those of a rank's x and weight; `own`: a sharded extent -> what the rank has of it."""
        x = own(m) if self.x == "m" else m, own(k) if self.x == "k" else k
        return x, (own(n) if self.weight == "n" else n, own(k) if self.weight == "k" else k)

    def product(self, m: int, n: int, k: int, world: int) -> tuple[int, int, int]:
        """(M, N, K) of the product that a rank with a full shard multiplies."""
        x, weight = self.shapes(m, n, k, lambda extent: -(-extent // world))
        return (m if self.gathers_operand else x[0]), *weight

    def elements_out(self, m: int, n: int, k: int, world: int) -> float:
        """Elements that each rank sends at least (in two trips where all get all sums)."""
        trips = 2 if self.sums and self.out is None else 1
        rows = m if self.weight is not None else m / world
        return trips * rows * (k if self.width == "k" else n) * (world - 1) / world

    def collectives(self, in_rank_order: bool) -> tuple[str, ...]:
        """What moves `elements_out`, in equal parts; ``"sum"`` is an all-to-all and a sum in rank order."""
        if not self.sums:
            return ("all_gather",)
        if not in_rank_order:
            return ("all_reduce",) if self.out is None else ("reduce_scatter",)
        return ("sum", "all_gather") if self.out is None else ("sum",)

    @property
    def dims(self) -> tuple[int | None, int | None, int | None, int | None]:
        """The sharded dimension of x, weight, bias and out, None for one that every rank has all of."""
        places: dict[Axis | None, int] = {"m": 0, "k": 1}
        return (
            places.get(self.x),
            {"n": 0, "k": 1}.get(self.weight or ""),
            0 if self.weight == "n" else None,
            {"m": 0, "n": 1}.get(self.out or ""),
        )
