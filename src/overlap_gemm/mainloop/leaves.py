"""Sums over K by a binary tree: K is cut into equal *leaves*, whose sums are added pairwise in fp32.

The order of additions depends only on the number of leaves, not on the tile or on the CTA. So the bits are
the same for every tile shape, and for every number of ranks that share the leaves.

- A thread accumulates one leaf after the other, each from zero.
- A *node* is the sum of a complete subtree whose sibling is not complete yet. There is at most one per level.
  Of 8 leaves: after leaf 0 level 0, after 1 level 1, after 2 levels 0 and 1, after 3 level 2.
- After leaf ``i``, nodes of as many levels are merged as ``i`` has trailing ones in binary (`park`). After
  the last leaf all remaining levels are added (`finish`).

On the host, `cut` adds the leaf as the third mode of A and B. ``K / leaves`` is an integer, a multiple of 16
bytes (`ALIGNED`). TMA fills a leaf's last k tile with zeros after the leaf's end. A leaf of 8-bit operands is
a multiple of k tiles, so that k tile ``i`` of all leaves has the ``i``-th scales of K.

A node is as large as the accumulator. If the nodes do not fit in registers (`GemmConfig.parks_in_memory`),
they are in the thread's local memory. Shared memory has no space for them next to the stages.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from overlap_gemm.config.gemm_config import DTYPE_BYTES, GemmConfig
from overlap_gemm.device.registers import rematerialize

ALIGNED = 16
"""Divisor of a leaf's K extent in bytes: of TMA strides."""

RUN = 4
"""Number of fp32 values added or moved at a time: 16 bytes."""


def cut(config: GemmConfig, operand: cute.Tensor) -> cute.Tensor:
    """Returns the view ``(rows, K / leaves, leaves)`` of an operand ``(rows, K)``; on the host.

    Without leaves it returns the operand unchanged.
    """
    leaves = config.accumulations
    if leaves == 1:
        return operand
    rows, depth = operand.shape
    leaf = cute.assume(depth // leaves, divby=ALIGNED // DTYPE_BYTES[config.in_dtype])
    step, pitch = operand.stride[1], operand.stride[0]
    return cute.make_tensor(
        operand.iterator, cute.make_layout((rows, leaf, leaves), stride=(pitch, step, leaf * step))
    )


def nodes_of(config: GemmConfig, *shape: int) -> Any:
    """Allocates nodes of a thread's sums, fp32 ``(*shape, levels)``; returns None without a tree."""
    if not config.levels:
        return None
    # With one level its index would be a constant, and the compiler would keep all nodes in registers.
    return cute.make_rmem_tensor((*shape, max(config.levels, 1 + config.parks_in_memory)), Float32)


@cute.jit
def park(config: cutlass.Constexpr, sums: cute.Tensor, nodes: cute.Tensor, leaf: Int32) -> None:
    """Adds the nodes of complete siblings to a leaf's sums, and stores the result as a node.

    Each thread calls it after every leaf but the last.

    Args:
        config: The kernel's configuration.
        sums: The thread's fp32 sums of the leaf; overwritten.
        nodes: ``(values, levels)``. If `GemmConfig.parks_in_memory`, the level is a run-time index, which
            keeps the nodes out of registers.
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
    """Adds the nodes of all levels to the sums of the last leaf, in place; arguments as in `park`.

    The loop over levels is not unrolled: all nodes at once would need as many registers as the sums.
    """
    for level in cutlass.range(config.levels, unroll=1):
        _add(sums, nodes, level)


def _add(sums: cute.Tensor, nodes: cute.Tensor, level: Any) -> None:
    """Adds the node of ``level`` to ``sums``, the node first: the order of the tree."""
    node = nodes[(None, level)]
    for first in range(0, cute.size(sums), RUN):
        total, kept = _run(sums, first), _run(node, first)
        total.store(kept.load() + total.load())


def _run(values: cute.Tensor, first: int) -> Any:
    """Returns a view of `RUN` values; a view of all would need as many registers as the sums."""
    return cute.make_tensor(values.iterator + first, cute.make_layout(RUN))
