"""`Promises`: promises of a call about the bits of its result, and the dtype of its partial sums."""

from typing import Literal, NamedTuple, get_args

Partials = Literal["float32"]
"""Element types of partial sums between ranks that callers may request."""

Invariant = Literal["batch", "ranks", "ranks:4", "ranks:2"]
"""Facts that do not change the bits: the batch, or the batch and the number of ranks, up to 8, 4 or 2."""

LEAVES: dict[str, int] = {"batch": 1, "ranks": 8, "ranks:4": 4, "ranks:2": 2}
"""Parts of K that are summed by a binary tree, in float32."""


class InvarianceError(ValueError):
    """Bits that do not depend on batch or ranks are requested, and cannot be promised."""


class Promises(NamedTuple):
    """Promises that a caller requests; the same on every rank.

    Attributes:
        partials: Element type of partial sums between ranks; None: the operands'.
        invariant: Facts on which the bits of a row do not depend; None: nothing is promised.
    """

    partials: Partials | None = None
    invariant: Invariant | None = None

    @property
    def leaves(self) -> int:
        """Returns the number of parts of K, over all ranks, that a tree sums; 1: no tree; 0: no promise."""
        return 0 if self.invariant is None else LEAVES[self.invariant]

    @property
    def has_tree(self) -> bool:
        """Returns whether sums over K are the same for every number of ranks."""
        return self.leaves > 1

    @property
    def has_wide_partials(self) -> bool:
        """Returns whether partial sums are sent as float32."""
        return self.partials is not None or self.has_tree

    def over(self, others: "Promises") -> "Promises":
        """Returns these promises, completed by the others."""
        return Promises(self.partials or others.partials, self.invariant or others.invariant)

    def own_leaves(self, world: int) -> int:
        """Returns the number of a rank's leaves.

        Raises:
            InvarianceError: The number of ranks does not divide the number of leaves.
        """
        if not self.has_tree:
            return 1
        if self.leaves % world:
            raise InvarianceError(
                f"invariant={self.invariant!r} sums K in {self.leaves} leaves, which {world} ranks do not "
                "divide: bits are equal for 1, 2, 4 or 8 ranks up to the number of leaves"
            )
        return self.leaves // world

    def why_no_cut(self, extent: int, block: int = 1) -> str | None:
        """Returns the reason an extent that is summed over cannot be cut into leaves; None if it can.

        Args:
            extent: Extent over all ranks.
            block: Elements that a leaf must be a multiple of.
        """
        if extent % (self.leaves * block):
            fewer = [name for name, leaves in LEAVES.items() if leaves > 1 and not extent % (leaves * block)]
            advice = f"; invariant={fewer[0]!r} is possible" if fewer else ""
            of_blocks = f" of multiples of {block}" if block > 1 else ""
            return (
                f"invariant={self.invariant!r} cuts the {extent} elements that are summed over into "
                f"{self.leaves} equal leaves{of_blocks}, and {self.leaves * block} does not divide "
                f"{extent}{advice}"
            )
        return None


NO_PROMISES = Promises()


def check_promises(promises: Promises) -> None:
    """Raises a ValueError for unknown values."""
    for name, value, kinds in (
        ("partials", promises.partials, Partials),
        ("invariant", promises.invariant, Invariant),
    ):
        known = (None, *get_args(kinds))
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")
