"""`OpSpec`: sharded axes of the product `x [M, K] @ weight [N, K].T -> out [M, N]`, and what they imply."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from typing import Literal, NamedTuple

Axis = Literal["m", "n", "k"]

Collective = Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice"]
""""slice": every rank has the matrix and keeps its part; no data is sent. The others are collectives of
torch.distributed."""

ARGUMENTS: dict[Axis, str] = {"m": "rows", "n": "columns", "k": "k"}
"""Name of the argument by which callers pass an axis' extent over all ranks: ``rows``, ``columns``, ``k``."""


class Move(NamedTuple):
    """Redistribution of a matrix over the ranks.

    Attributes:
        kind: Collective that redistributes the matrix.
        source: Axis along which it is sharded before; None: each rank has all of it, or a partial sum.
        target: Axis along which it is sharded after; None: each rank has all of it.
    """

    kind: Collective
    source: Axis | None
    target: Axis | None

    @staticmethod
    def between(source: Axis | None, target: Axis | None) -> "Move | None":
        """Returns the move from sharding along ``source`` to ``target``; None if they are equal."""
        if source == target:
            return None
        if source is None:
            return Move("slice", source, target)
        return Move("all_gather" if target is None else "all_to_all", source, target)


@dataclass(frozen=True)
class OpSpec:
    """Definition of an op by the sharded axis of each of its tensors.

    The weight's axis determines a rank's product: ``"n"``: the rank's columns; ``"k"``: a partial sum; None:
    the rank's rows. x is redistributed before the product, and the product after it, as the axes require.

    Attributes:
        name: Public name, an identifier of ASCII characters.
        code: Number in failure records; unique and positive, except for an op without communication (0).
        label: Short name, for tables.
        x: Sharded axis of x, "m" or "k"; None: every rank has all of it.
        weight: Sharded axis of the weight, "n" or "k"; None: every rank has all of it.
        out: Sharded axis of the result, "m" or "n"; None: every rank gets all of it.
        dual: Name of the op of the gradient of x, if it sends as much data as this op; else None. If it is
            not registered, a backward pass raises RuntimeError.
        unsharded: Name of the op with the same x and weight whose result every rank gets in full, or None.
    """

    name: str
    code: int
    label: str
    x: Axis | None
    weight: Axis | None
    out: Axis | None
    dual: str | None = None
    unsharded: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a name that is no identifier, a negative code, or an axis a tensor lacks."""
        name = self.name
        if not (isinstance(name, str) and name.isidentifier() and name.isascii()) or iskeyword(name):
            raise ValueError(f"name of an op must be an identifier of ASCII characters, got {name!r}")
        if not isinstance(self.code, int) or self.code < 0:
            raise ValueError(f"code of {self.name} must be a number, 1 or more, got {self.code!r}")
        for tensor, axes in (("x", ("m", "k")), ("weight", ("n", "k")), ("out", ("m", "n"))):
            axis = getattr(self, tensor)
            if axis not in (None, *axes):
                known = " or ".join(map(repr, (*axes, None)))
                raise ValueError(f"{self.name}: {tensor} must be sharded along {known}, got {axis!r}")
        # Dynamo cannot trace the first access of a cached property, which may be in a compiled call.
        assert self.sent is not None and self.operand_is_sent is not None

    @cached_property
    def operand_move(self) -> Move | None:
        """Returns the redistribution of x before the product; None if there is none."""
        needed: dict[Axis | None, Axis | None] = {"n": None, "k": "k", None: "m"}
        return Move.between(self.x, needed[self.weight])

    @cached_property
    def result_move(self) -> Move | None:
        """Returns the redistribution of the product; None if a rank's product is its result."""
        if self.sums:
            return Move("all_reduce" if self.out is None else "reduce_scatter", None, self.out)
        return Move.between("m" if self.weight is None else "n", self.out)

    @cached_property
    def operand_is_sent(self) -> bool:
        """Returns whether x is sent, before the product; else the product is sent, if anything."""
        return self.operand_move is not None and self.operand_move.kind != "slice"

    @cached_property
    def sent(self) -> tuple[Move, ...]:
        """Returns the redistributions that send data: all but "slice"."""
        both = (self.operand_move, self.result_move)
        return tuple(move for move in both if move is not None and move.kind != "slice")

    @property
    def dual_axes(self) -> tuple[Axis | None, Axis | None, Axis | None]:
        """Returns the sharded axes of x, weight and out of `grad @ weight`, the gradient's product.

        Its K is this op's N.
        """
        swapped: dict[Axis | None, Axis | None] = {None: None, "m": "m", "n": "k", "k": "n"}
        return swapped[self.out], swapped[self.weight], swapped[self.x]

    @property
    def sums(self) -> bool:
        """Returns whether a rank's product is a partial sum."""
        return self.weight == "k"

    @property
    def gathers_operand(self) -> bool:
        """Returns whether each rank gathers the rows of x before the product."""
        return self.operand_move == Move("all_gather", "m", None)

    @property
    def reshards_k(self) -> bool:
        """Returns whether x is sharded along K and the weight is not."""
        return self.x == "k" and self.weight != "k"

    @property
    def takes_lists(self) -> bool:
        """Returns whether x can be multiplied by several weights.

        No product is summed over ranks, and x or the results are sharded.
        """
        return not self.sums and (self.x is not None or self.out is not None)

    @property
    def gathers_output(self) -> bool:
        """Returns whether ranks compute columns of a result that each rank gets in full."""
        return self.weight == "n" and self.out is None

    @property
    def has_local_columns(self) -> bool:
        """Returns whether a rank computes or gets columns of a product that is sent."""
        return not self.gathers_operand and "n" in (self.weight, self.out)

    @property
    def width(self) -> Axis:
        """Returns the axis of the columns of the matrix that is sent; its rows are M."""
        return "k" if self.operand_is_sent else "n"

    @property
    def unresolved_axis(self) -> Axis | None:
        """Returns the sharded axis that the result has in full, or None.

        If callers do not pass its extent over all ranks, the ranks exchange it.
        """
        return next((axis for axis in (self.x, self.weight) if axis not in (None, "k", self.out)), None)

    @property
    def unknown(self) -> tuple[Axis | None, ...]:
        """Returns the axes whose extents over all ranks do not follow from one rank's x and weight."""
        return None if self.reshards_k else self.x, self.weight

    def arguments(self, m: int, n: int, k: int, least: bool = False) -> dict[str, int]:
        """Returns extents over all ranks by the argument name with which callers may pass them.

        Args:
            m: Rows over all ranks.
            n: Columns over all ranks.
            k: K over all ranks.
            least: Whether to return only the extent that ranks exchange if it is not passed.
        """
        extents: dict[Axis, int] = {"m": m, "n": n, "k": k}
        provided = (self.unresolved_axis,) if least else self.unknown
        return {ARGUMENTS[axis]: extents[axis] for axis in provided if axis is not None}

    def resolved(
        self, m: int, n: int, k: int, provided: Container[str]
    ) -> tuple[int, int | None, int | None]:
        """Returns (M, N, K); N or K is None if its extent over all ranks is unknown and not needed.

        An extent is unknown if its axis is sharded (`unknown`) and its argument is not in ``provided``. The
        extent of `width` is needed, so it is always returned.

        Args:
            m: Rows over all ranks.
            n: Columns over all ranks.
            k: K over all ranks.
            provided: Names of the arguments (`ARGUMENTS`) that the caller has passed.
        """

        def hides(axis: Axis) -> bool:
            return axis != self.width and axis in self.unknown and ARGUMENTS[axis] not in provided

        return m, None if hides("n") else n, None if hides("k") else k

    def shapes(
        self, m: int, n: int, k: int, local: Callable[[int], int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of a rank's x and weight.

        Args:
            m: Rows over all ranks.
            n: Columns over all ranks.
            k: K over all ranks.
            local: Function from a sharded extent to the rank's part of it.
        """
        x = local(m) if self.x == "m" else m, local(k) if self.x == "k" else k
        return x, (local(n) if self.weight == "n" else n, local(k) if self.weight == "k" else k)

    def result(self, m: int, n: int, local: Callable[[int], int]) -> tuple[int, int]:
        """Returns the shape of a rank's result.

        Args:
            m: Rows over all ranks.
            n: Columns over all ranks.
            local: Function from a sharded extent to the rank's part of it.
        """
        return local(m) if self.out == "m" else m, local(n) if self.out == "n" else n

    def product(self, m: int, n: int, k: int, world: int) -> tuple[int, int, int]:
        """Returns (M, N, K) of the product of a rank with a full shard."""
        _, weight = self.shapes(m, n, k, lambda extent: -(-extent // world))
        return (-(-m // world) if self.weight is None else m), *weight

    def elements_out(self, m: int, n: int, k: int, world: int) -> float:
        """Returns the least number of elements that each rank sends; m, n, k are extents over all ranks.

        It is ``trips * rows * columns * (P - 1) / P`` on P ranks. Columns are N, or K if x is sent. Rows are
        M, or M / P for an all-to-all. Trips are 2 if every rank gets all sums (partial sums, then sums); else
        1.
        """
        trips = 2 if self.sums and self.out is None else 1
        rows = m / world if "all_to_all" in self.collectives(in_rank_order=False) else m
        return trips * rows * (k if self.width == "k" else n) * (world - 1) / world

    def collectives(self, in_rank_order: bool) -> tuple[str, ...]:
        """Returns the collectives that together send `elements_out`, each the same number.

        A reduction is ``("all_reduce",)`` or ``("reduce_scatter",)``. If ``in_rank_order``, it is ``("sum",
        "all_gather")`` or ``("sum",)``, where "sum" is an all-to-all and a sum in rank order.
        """
        if not self.sums:
            return tuple(move.kind for move in self.sent)
        if not in_rank_order:
            return ("all_reduce",) if self.out is None else ("reduce_scatter",)
        return ("sum", "all_gather") if self.out is None else ("sum",)

    @property
    def dims(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Returns the sharded dimensions of x, weight, bias and out; None: not sharded."""
        places: dict[Axis | None, int] = {"m": 0, "k": 1}
        return (
            places.get(self.x),
            {"n": 0, "k": 1}.get(self.weight or ""),
            0 if self.weight == "n" else None,
            {"m": 0, "n": 1}.get(self.out or ""),
        )
