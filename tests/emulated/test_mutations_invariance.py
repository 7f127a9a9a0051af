"""Changes each order of summation once: bits that `invariant=` promises to be the same differ then.

Compared are results and what a bias that takes them away leaves, so bits below those of bfloat16. A minute
or two per order on one core: `bash launch/test.sh -m slow tests/emulated/test_mutations_invariance.py`.
"""

from typing import Any, NamedTuple

import cutlass
import pytest
import torch
from cutlass import Int32, cute

from overlap_gemm.exchange.sums import Sums
from overlap_gemm.mainloop import leaves
from overlap_gemm.mainloop.sm90 import MainloopSm90
from overlap_gemm.mainloop.sm100 import MainloopSm100
from overlap_gemm.spec.promises import Promises
from overlap_gemm.testing.cases import Case
from tests.support.emulated.op_runs import SMALL, world_of
from tests.support.invariance import rows_and_what_is_below, same_bits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OTHER = {
    "sm_90a": {"mma": "pingpong", "tile": (128, 128), "cluster": (1, 1)},
    "sm_100a": {"mma": "1cta", "tile": (128, 128), "cluster": (1, 1)},
}


class RotatedLoads(NamedTuple):
    """An operand's loads that begin with another k tile.

    Attributes:
        loads: The loads in their order.
        step: K tiles by which the order is turned.
        number: K tiles.
    """

    loads: Any
    step: Any
    number: Any

    def load(self, ab, state, k):
        """Loads the k tile that is `step` further on."""
        self.loads.load(ab, state, (k + self.step) % self.number)


def rotate(patch, tile, steps):
    """Lets kernels of one tile begin with k tile number `steps(k tiles, leaves)`."""
    for mainloop in (MainloopSm90, MainloopSm100):

        def loads(self, *arguments, original=mainloop.loads):
            a, b, first, number = original(self, *arguments)
            if self.config.tile != tile:
                return a, b, first, number
            step = steps(number, self.config.accumulations)
            return RotatedLoads(a, step, number), RotatedLoads(b, step, number), first, number

        patch.setattr(mainloop, "loads", loads)


@cute.jit
def park_in_order(config: cutlass.Constexpr, sums: cute.Tensor, nodes: cute.Tensor, leaf: Int32) -> None:
    """Sums leaves one after the other: what `leaves.park` and `finish` see is one node."""
    if leaf > 0:
        leaves._add(sums, nodes, Int32(0))
    nodes[(None, Int32(0))].store(sums.load())


@cute.jit
def finish_in_order(config: cutlass.Constexpr, sums: cute.Tensor, nodes: cute.Tensor) -> None:
    """Adds the one node."""
    leaves._add(sums, nodes, Int32(0))


@cute.jit
def finish_from_the_top(config: cutlass.Constexpr, sums: cute.Tensor, nodes: cute.Tensor) -> None:
    """Adds the largest subtree first."""
    for level in cutlass.range(config.levels, unroll=1):
        leaves._add(sums, nodes, config.levels - 1 - level)


@cute.jit
def add_in_rank_order(
    self: cutlass.Constexpr, total: Any, lane: Any, chunk: Any, first: cutlass.Constexpr, loaded: Any
) -> None:
    """Sums ranks as if K had no leaves."""
    total.fill(0.0)
    self._add(total, lane, chunk, first, loaded)


def sum_in_another_shape(patch):
    """Sums leaves of a rank in their order."""
    patch.setattr(leaves, "park", park_in_order)
    patch.setattr(leaves, "finish", finish_in_order)


def give_ranks_larger_leaves(patch):
    """Cuts K of two ranks into half the leaves."""
    patch.setattr(Promises, "local_leaves", lambda self, world: self.leaves // world // (1 + (world == 2)))


ORDERS = {
    "tree of a rank's leaves": sum_in_another_shape,
    "last nodes of a rank's leaves": lambda patch: patch.setattr(leaves, "finish", finish_from_the_top),
    "tree of ranks": lambda patch: patch.setattr(Sums, "_add_in_tree", add_in_rank_order),
    "leaves of a rank": give_ranks_larger_leaves,
    "order of leaves, by tile": lambda patch: rotate(patch, (128, 128), lambda n, leaves: n // leaves),
    "order of k tiles, by tile": lambda patch: rotate(patch, (128, 128), lambda n, leaves: 1),
}


def differ(case, worlds, arch, invariant="ranks"):
    """Returns whether results on so many ranks, each with its kernel, differ in a bit."""
    results = []
    for ranks, fields in worlds:
        with world_of(arch, ranks, fields, num_sms=4, sums="bitwise") as world:
            results.append(rows_and_what_is_below(case, world, invariant=invariant))
    return not all(
        same_bits(one, other) for later in results[1:] for one, other in zip(results[0], later, strict=True)
    )


@pytest.mark.parametrize("arch", SMALL)
@pytest.mark.parametrize("order", [None, *ORDERS])
def test_a_changed_order_of_the_tree_shows(order, arch, changed_kernels, monkeypatch):
    case = Case("gemm_reduce_scatter", 20, 72, 8 * 72, torch.bfloat16, bias=False)
    if order is not None:
        ORDERS[order](monkeypatch)
    worlds = [(1, SMALL[arch]), (2, OTHER[arch]), (4, SMALL[arch])]
    assert differ(case, worlds, arch) == (order is not None)
