"""`OpSpec`: which axes of the product `x [M, K] @ weight [N, K].T -> out [M, N]` an op shards."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Axis = Literal["m", "n", "k"]

Collective = Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice"]
""""slice": a rank keeps its part of a matrix that every rank has; no data is sent."""

ARGUMENTS: dict[Axis, str] = {"m": "rows", "n": "columns", "k": "k"}
"""The argument by which callers say an axis' extent over all ranks."""


class Move(NamedTuple):
    """Redistribution of a matrix over the ranks.

    Attributes:
        kind: Collective that does it.
        source: Axis along which the matrix is sharded before; None: every rank has all, or a partial sum.
        target: Axis along which it is sharded after; None: every rank has all of it.
    """

    kind: Collective
    source: Axis | None
    target: Axis | None

    @staticmethod
    def between(source: Axis | None, target: Axis | None) -> "Move | None":
        """Returns the move from one sharding to another; None where they are the same."""
        if source == target:
            return None
        if source is None:
            return Move("slice", source, target)
        return Move("all_gather" if target is None else "all_to_all", source, target)


@dataclass(frozen=True)
class OpSpec:
    """One op: what follows from the axis along which each of its tensors is sharded.

    A rank multiplies its columns where the weight is sharded along ``"n"``, and a part of the sum where it is
    along ``"k"``. Where every rank has all of the weight, it multiplies its rows. x is redistributed before
    the product, and the product after it, where they are sharded otherwise.

    Attributes:
        name: Its public name.
        code: Its number in failure records; no other op's, and not 0.
        label: Its short name, for tables.
        x: The sharded axis of x; None: every rank has all of it.
        weight: That of the weight; a rank's product is a part along it. None: a rank's product has its rows.
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

    def __post_init__(self) -> None:
        """Raises ValueError for a name or a number that is none, and for an axis that a tensor has not."""
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise ValueError(f"name of an op must be an identifier, got {self.name!r}")
        if not isinstance(self.code, int) or self.code < 0:
            raise ValueError(f"code of {self.name} must be a number, 1 or more, got {self.code!r}")
        for tensor, axes in (("x", ("m", "k")), ("weight", ("n", "k")), ("out", ("m", "n"))):
            axis = getattr(self, tensor)
            if axis not in (None, *axes):
                known = " or ".join(map(repr, (*axes, None)))
                raise ValueError(f"{self.name}: {tensor} must be sharded along {known}, got {axis!r}")

    @cached_property
    def operand_move(self) -> Move | None:
        """Returns the redistribution of x before the product; None: x is multiplied as it is."""
        needed: dict[Axis | None, Axis | None] = {"n": None, "k": "k", None: "m"}
        return Move.between(self.x, needed[self.weight])

    @cached_property
    def result_move(self) -> Move | None:
        """Returns the redistribution of the product; None: a rank's product is its result."""
        if self.sums:
            return Move("all_reduce" if self.out is None else "reduce_scatter", None, self.out)
        return Move.between("m" if self.weight is None else "n", self.out)

    @cached_property
    def operand_is_sent(self) -> bool:
        """Returns whether x is sent, before the product; else the product is."""
        return self.operand_move is not None and self.operand_move.kind != "slice"

    @cached_property
    def sent(self) -> tuple[Move, ...]:
        """Returns the redistributions that send data."""
        both = (self.operand_move, self.result_move)
        return tuple(move for move in both if move is not None and move.kind != "slice")

    @property
    def dual_axes(self) -> tuple[Axis | None, Axis | None, Axis | None]:
        """Returns the sharded axes of x, weight and result of `grad @ weight`, whose K is this op's N."""
        swapped: dict[Axis | None, Axis | None] = {None: None, "m": "m", "n": "k", "k": "n"}
        return swapped[self.out], swapped[self.weight], swapped[self.x]

    @property
    def sums(self) -> bool:
        """Whether a rank's product is a partial sum."""
        return self.weight == "k"

    @property
    def gathers_operand(self) -> bool:
        """Whether rows of x are gathered before the product."""
        return self.operand_move == Move("all_gather", "m", None)

    @property
    def deals_depth(self) -> bool:
        """Returns whether a rank has columns of x, and all columns of the weight."""
        return self.x == "k" and self.weight != "k"

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
        """The columns of what is sent; its rows are M."""
        return "k" if self.operand_is_sent else "n"

    @property
    def asked(self) -> Axis | None:
        """The sharded axis that is whole in the result: ranks ask each other for it if callers do not say."""
        return next((axis for axis in (self.x, self.weight) if axis not in (None, "k", self.out)), None)

    @property
    def unknown(self) -> tuple[Axis | None, ...]:
        """Returns the axes whose extents over all ranks do not follow from a rank's operands."""
        return None if self.deals_depth else self.x, self.weight

    def arguments(self, m: int, n: int, k: int, least: bool = False) -> dict[str, int]:
        """What callers may say of the extents over all ranks; with `least` only the one that is asked for."""
        extents: dict[Axis, int] = {"m": m, "n": n, "k": k}
        said = (self.asked,) if least else self.unknown
        return {ARGUMENTS[axis]: extents[axis] for axis in said if axis is not None}

    def known(self, m: int, n: int, k: int, said: Container[str]) -> tuple[int, int | None, int | None]:
        """(M, N, K); None for one that is sharded and does not travel, unless it is among what is `said`."""

        def hides(axis: Axis) -> bool:
            return axis != self.width and axis in self.unknown and ARGUMENTS[axis] not in said

        return m, None if hides("n") else n, None if hides("k") else k

    def shapes(
        self, m: int, n: int, k: int, own: Callable[[int], int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Those of a rank's x and weight; `own`: a sharded extent -> what the rank has of it."""
        x = own(m) if self.x == "m" else m, own(k) if self.x == "k" else k
        return x, (own(n) if self.weight == "n" else n, own(k) if self.weight == "k" else k)

    def product(self, m: int, n: int, k: int, world: int) -> tuple[int, int, int]:
        """(M, N, K) of the product that a rank with a full shard multiplies."""
        _, weight = self.shapes(m, n, k, lambda extent: -(-extent // world))
        return (-(-m // world) if self.weight is None else m), *weight

    def elements_out(self, m: int, n: int, k: int, world: int) -> float:
        """Elements that each rank sends at least (in two trips where all get all sums)."""
        trips = 2 if self.sums and self.out is None else 1
        rows = m / world if "all_to_all" in self.collectives(in_rank_order=False) else m
        return trips * rows * (k if self.width == "k" else n) * (world - 1) / world

    def collectives(self, in_rank_order: bool) -> tuple[str, ...]:
        """What moves `elements_out`, in equal parts; ``"sum"`` is an all-to-all and a sum in rank order."""
        if not self.sums:
            return tuple(move.kind for move in self.sent)
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
