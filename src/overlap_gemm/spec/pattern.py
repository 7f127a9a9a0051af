"""`PatternSpec`: who sends which tiles of an op to whom, inside the fused kernels."""

from dataclasses import dataclass
from typing import Literal

from .op import OpSpec
from .ops import OPS, op_named


@dataclass(frozen=True)
class PatternSpec:
    """One way to exchange the tiles of an op's product, or the shards of its operand.

    Attributes:
        name: Of the pattern.
        op: Name of the op that it carries out.
        cut: What the owners' shards are shards of; None: no tile has an owner, every rank makes all of it.
        to_all: Whether each tile goes to every rank; else to its owner.
        returns: Whether owners send their sums on to every rank.
        kernel: Module and class of its half of the kernel (`kernel.surface.KernelOp`).
    """

    name: str
    op: str
    cut: Literal["rows", "columns"] | None
    to_all: bool
    returns: bool
    kernel: str

    @property
    def spec(self) -> OpSpec:
        """The op."""
        return OPS[self.op]

    @property
    def label(self) -> str:
        """Short name, for tables: the op's, and the pattern's where the op has several."""
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
            kernel="overlap_gemm.gather.all_gather:AllGather",
        ),
    )
}  # fmt: skip
"""By name; of an op's several, the model takes the first of two that take equally long."""


def add_pattern(pattern: PatternSpec) -> None:
    """Adds a pattern to `PATTERNS`.

    Raises:
        ValueError: Another pattern has its name, or there is no such op.
    """
    if pattern.name in PATTERNS:
        raise ValueError(f"pattern {pattern.name!r} is there already; there are {', '.join(PATTERNS)}")
    op_named(pattern.op)
    PATTERNS[pattern.name] = pattern


def patterns_of(op: str) -> tuple[str, ...]:
    """Names of the patterns that carry out an op."""
    return tuple(name for name, pattern in PATTERNS.items() if pattern.op == op)
