"""Leaves of K: equal parts of K whose separate sums are added by a binary tree.

- sums: a thread's fp32 values of a tile, of one leaf after the other.
- nodes of the tree: sums of finished subtrees that wait for their sibling, one for each level, in the
  thread's local memory. After leaf 0: level 0; after leaf 1: level 1; after leaf 2: levels 0 and 1; after
  leaf 3: level 2.

So the tree depends only on the leaves, not on the tile, nor on the CTA that computes it. After leaf ``i``
the number of subtrees that end with it is the number of trailing ones of ``i`` in binary.

The host cuts K: A and B have the leaf as their third dimension (`cut`). TMA loads zeros for the part of a
leaf's last k tile after the leaf's end.

Why local memory: a node is as large as the accumulator. Two do not fit in a Hopper thread's registers, nor
those of all threads in shared memory next to the stages.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.registers import rematerialize

ALIGNED = 8
"""Divisor of a leaf's 16-bit elements, because strides of TMA are multiples of 16 bytes."""


RUN = 4
"""Values that are added, or moved, at a time: 16 bytes."""


def cut(config: GemmConfig, operand: cute.Tensor) -> cute.Tensor:
    """Returns an operand ``(rows, K)`` as ``(rows, K of a leaf, leaves)``, on the host."""
    leaves = config.accumulations
    if leaves == 1:
        return operand
    rows, depth = operand.shape
    leaf = cute.assume(depth // leaves, divby=ALIGNED)
    step, pitch = operand.stride[1], operand.stride[0]
    return cute.make_tensor(
        operand.iterator, cute.make_layout((rows, leaf, leaves), stride=(pitch, step, leaf * step))
    )


def nodes_of(config: GemmConfig, *shape: int) -> Any:
    """Allocates the tree's nodes for a thread's sums of this shape; returns None if there is no tree."""
    if not config.levels:
        return None
    # With one level its index would be a constant, and the compiler would keep all nodes in registers.
    return cute.make_rmem_tensor((*shape, max(config.levels, 1 + config.parks_in_memory)), Float32)


@cute.jit
def park(config: cutlass.Constexpr, sums: cute.Tensor, nodes: cute.Tensor, leaf: Int32) -> None:
    """Adds the finished sibling subtrees to a leaf's sums, and stores the result as a node.

    It is called after each leaf but the last.

    Args:
        config: The kernel's configuration.
        sums: A thread's sums of the leaf; overwritten.
        nodes: ``(values, levels)``. A run-time index of the level keeps them out of registers.
        leaf: Number of the leaf.
    """
    level = Int32(0)
    if cutlass.const_expr(config.parks_in_memory):
        level = rematerialize(level)
    while ((leaf >> level) & 1) != 0:
        _add(sums, nodes, level)
        level += 1
    node = nodes[(None, level)]
    for first in cutlass.range_constexpr(0, cute.size(sums), RUN):
        _run(node, first).store(_run(sums, first).load())


@cute.jit
def finish(config: cutlass.Constexpr, sums: cute.Tensor, nodes: cute.Tensor) -> None:
    """Adds all other subtrees to the last leaf's sums; arguments as in `park`.

    It loads one level after the other: all at once would need as many registers as the sums.
    """
    for level in cutlass.range(config.levels, unroll=1):
        _add(sums, nodes, level)


def _add(sums: cute.Tensor, nodes: cute.Tensor, level: Any) -> None:
    node = nodes[(None, level)]
    for first in range(0, cute.size(sums), RUN):
        total, kept = _run(sums, first), _run(node, first)
        total.store(kept.load() + total.load())


def _run(values: cute.Tensor, first: int) -> Any:
    """Returns `RUN` values: all values of a node at once would need as many registers as the sums."""
    return cute.make_tensor(values.iterator + first, cute.make_layout(RUN))
