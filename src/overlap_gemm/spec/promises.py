"""`Promises`: what a call guarantees about the bits of its result and the dtype of its partial sums."""

from typing import Literal, NamedTuple, get_args

Partials = Literal["float32"]
"""Dtypes that callers may request for the partial sums that ranks exchange."""

Invariant = Literal["batch", "ranks", "ranks:4", "ranks:2"]
"""Facts on which the bits of a row do not depend. "batch": the number of rows in the batch. "ranks": also the
number of ranks, for 1, 2, 4 or 8 ranks. "ranks:4", "ranks:2": the same for at most 4 or 2 ranks."""

LEAVES: dict[str, int] = {"batch": 1, "ranks": 8, "ranks:4": 4, "ranks:2": 2}
"""Number of parts (leaves) of K over all ranks, whose fp32 sums a binary tree adds; 1: no tree. The
number does not depend on the number of ranks, which must divide it."""


class InvarianceError(ValueError):
    """Error for a requested invariance that cannot be guaranteed."""


class Promises(NamedTuple):
    """Guarantees that a caller requests, the same on every rank.

    Attributes:
        partials: Dtype of partial sums between ranks; None: that of the operands.
        invariant: Facts on which the bits of a row do not depend; None: no guarantee.
    """

    partials: Partials | None = None
    invariant: Invariant | None = None

    @property
    def leaves(self) -> int:
        """Returns the number of leaves of K over all ranks; 1: no tree; 0: no guarantee."""
        return 0 if self.invariant is None else LEAVES[self.invariant]

    @property
    def has_tree(self) -> bool:
        """Returns whether a binary tree sums K, so that bits are equal for different numbers of ranks."""
        return self.leaves > 1

    @property
    def has_wide_partials(self) -> bool:
        """Returns whether partial sums are sent as float32: if requested, or if there is a tree."""
        return self.partials is not None or self.has_tree

    def over(self, others: "Promises") -> "Promises":
        """Returns these promises, with fields that are None taken from ``others``."""
        return Promises(self.partials or others.partials, self.invariant or others.invariant)

    def local_leaves(self, world: int) -> int:
        """Returns the number of leaves of a rank; 1 without a tree.

        Raises:
            InvarianceError: ``world`` does not divide the number of leaves.
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
        """Returns the reason an extent cannot be cut into equal leaves, as text; None if it can.

        `leaves` times ``block`` must divide ``extent``. The text names a promise with fewer leaves that is
        possible. Only for promises with `has_tree`: without a guarantee it raises ZeroDivisionError.

        Args:
            extent: Extent over all ranks of the axis that is summed.
            block: Number of elements that stay in one leaf, such as those of a block of scales.
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
    """Raises ValueError if a field has an unknown value."""
    for name, value, kinds in (
        ("partials", promises.partials, Partials),
        ("invariant", promises.invariant, Invariant),
    ):
        known = (None, *get_args(kinds))
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")
