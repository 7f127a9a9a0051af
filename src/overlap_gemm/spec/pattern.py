"""`PatternSpec`: a communication pattern, by which a fused kernel implements an op.

`gemm_all_reduce` has two. ``one_shot``: each rank sends its partial sums to every rank, and sums all tiles.
``two_shot``: each rank owns columns, gets their partial sums, and sends the sums to every rank. Any other op
has one or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .op import OpSpec
from .ops import OPS


@dataclass(frozen=True)
class PatternSpec:
    """Communication pattern: which tiles or shards are sent, and to which ranks.

    Attributes:
        name: Name of the pattern.
        op: Name of the op that it implements.
        cut: Dimension of the product that shards of owners divide, "rows" or "columns"; None: each rank
            sums all tiles, and no tile has an owner.
        to_all: Whether each tile or shard is sent to every rank; else to its owner.
        returns: Whether owners send sums to every rank.
        kernel: ``module:class`` of the op's part of the kernel (`kernel.protocols.KernelOp`).
        has_epilogue: Whether the kernel of an op with a replicated weight applies epilogues of complete sums
            to this rank's result; not read for other ops.
        takes_lists: Whether a kernel multiplies a list of weights (`GemmConfig.weights`).
    """

    name: str
    op: str
    cut: Literal["rows", "columns"] | None
    to_all: bool
    returns: bool
    kernel: str
    has_epilogue: bool = False
    takes_lists: bool = False

    @property
    def spec(self) -> OpSpec:
        """Returns the op."""
        return OPS[self.op]

    @property
    def label(self) -> str:
        """Returns the op's label, with the pattern's name if the op has several patterns."""
        several = len(patterns_of(self.op)) > 1
        return f"{self.spec.label} {self.name.replace('_', '-')}" if several else self.spec.label


PATTERNS = {
    pattern.name: pattern
    for pattern in (
        PatternSpec(
            "reduce_scatter", "gemm_reduce_scatter", cut="rows", to_all=False, returns=False,
            kernel="overlap_gemm.exchange.reduce_scatter:ReduceScatter",
        ),
        PatternSpec(
            "one_shot", "gemm_all_reduce", cut=None, to_all=True, returns=False,
            kernel="overlap_gemm.exchange.all_reduce:OneShot"
        ),
        PatternSpec(
            "two_shot", "gemm_all_reduce", cut="columns", to_all=False, returns=True,
            kernel="overlap_gemm.exchange.all_reduce:TwoShot",
        ),
        PatternSpec(
            "output_gather", "gemm_all_gather", cut="columns", to_all=True, returns=False,
            kernel="overlap_gemm.exchange.output_gather:OutputGather",
        ),
        PatternSpec(
            "input_gather", "all_gather_gemm", cut="rows", to_all=True, returns=False,
            kernel="overlap_gemm.gather.all_gather:AllGather", takes_lists=True,
        ),
    )
}  # fmt: skip
"""Patterns by name. If the model predicts equal times for two of an op, the first is used: ``one_shot``
before ``two_shot``."""


def check_patterns(op: OpSpec, patterns: Sequence[PatternSpec]) -> None:
    """Checks the patterns of an op that is to be registered.

    Raises:
        TypeError: A pattern is of another type.
        ValueError: A pattern is of another op, or has the name of another pattern.
    """
    for pattern in patterns:
        if not isinstance(pattern, PatternSpec):
            raise TypeError(f"register takes patterns of type PatternSpec, got {type(pattern).__name__}")
    names = [pattern.name for pattern in patterns]
    if wrong := [pattern.name for pattern in patterns if pattern.op != op.name]:
        raise ValueError(f"register: patterns {wrong} are of another op than {op.name}")
    for name in names:
        if name in PATTERNS or names.count(name) > 1:
            raise ValueError(f"pattern {name!r} is there already; there are {', '.join(PATTERNS)}")


def patterns_of(op: str) -> tuple[str, ...]:
    """Returns the names of the patterns that implement an op; none if it has no fused kernel."""
    return tuple(name for name, pattern in PATTERNS.items() if pattern.op == op)
