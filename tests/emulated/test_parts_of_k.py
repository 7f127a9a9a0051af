"""The gradient of x of a list of weights: one kernel, whose K is a list."""

from dataclasses import replace

import pytest
import torch

from cute_emulator.machine.inject import StoreFault
from overlap_gemm.backends.fused import exchange_plans
from overlap_gemm.backends.fused.launch_plan import Plan
from overlap_gemm.backends.op_call import Joined
from overlap_gemm.exchange.geometry import CONTROL_BYTES, FLAG_BYTES
from overlap_gemm.kernel.operand_views import OperandViews
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.tuning.machine import machine_for
from tests.support.emulated.gather_world import SMALLEST, World
from tests.support.emulated.list_cases import GatheredLayer, Layer, ReplicatedLayer


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Makes chunks of 128 rows; returns a list of the launches whose K is a list: (pattern, kernels)."""
    monkeypatch.setattr(
        exchange_plans, "constants", lambda arch: replace(machine_for(arch), copy_bytes=1 << 14)
    )
    seen, launch = [], Plan.launch

    def noting(plan, a, *arguments):
        if isinstance(a, tuple):
            seen.append((plan.pattern, len(plan.products)))
        return launch(plan, a, *arguments)

    monkeypatch.setattr(Plan, "launch", noting)
    return seen


@pytest.mark.parametrize(
    ("arch", "transport", "ranks", "widths", "heads"),
    [
        ("sm_90a", "copy_engine", 2, (2 * 72, 2 * 8), None),
        ("sm_100a", "peer_bulk", 2, (4 * 72, 72, 72), (4, 1, 1)),
        pytest.param("sm_90a", "peer_bulk", 4, (4 * 136, 4 * 72, 4 * 8), None, marks=pytest.mark.slow),
        pytest.param("sm_100a", "copy_engine", 3, (3 * 136, 3 * 72, 3 * 8), None, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_a_list_is_one_launch(launched, arch, transport, ranks, widths, heads):
    """Parts of K end inside k tiles, rows are uneven; the weights' gradients read the exchanged parts.

    In the second case both ranks have the head of keys.
    """
    layer = Layer(135 * ranks - 1, widths, heads)
    with World(arch, ranks, transport=transport) as world:
        layer.backward(world.world.names, with_weights=heads is None)
        world.run()
    layer.check()
    assert launched == [("input_exchange", 1)] * ranks


def run_between_calls(op, layers, transport, starved):
    """Runs gradients of layers, each before a call of `op` on the same workspaces, and checks them."""
    with World("sm_90a", 3, transport=transport, mode="random", starved=starved, sms=2) as world:
        for layer in (*layers, layers[0]):
            layer.backward(world.world.names, with_weights=False)
            world.call(260, 72, 216, op)
        world.run()
    for layer in layers:
        layer.check()


@pytest.mark.parametrize(
    ("starved", "transport"), [(2, "peer_bulk"), pytest.param(1, "copy_engine", marks=pytest.mark.slow)]
)
def test_lists_and_single_weights_share_workspaces_with_a_rank_that_lags(starved, transport):
    layers = [Layer(390, (3 * 72, 3 * 8, 3 * 8), seed=1), Layer(3, (3 * 72, 3 * 8, 3 * 8), seed=2)]
    run_between_calls("all_to_all_gemm", layers, transport, starved)


def test_a_lost_flag_of_a_list_is_named():
    layer = Layer(512, (2 * 72, 2 * 8))
    with World("sm_90a", 2, transport="copy_engine") as world:
        layer.backward(world.world.names, with_weights=False)
        second = CONTROL_BYTES + FLAG_BYTES * 2  # of source 0
        world.emulator.faults.add(StoreFault("drop", 0, 1, begin=second, end=second + FLAG_BYTES))
        with pytest.raises(CommTimeoutError) as caught:
            world.run()
    assert (caught.value.failure.rank, caught.value.failure.source, caught.value.failure.tile) == (1, 0, 1)


@pytest.mark.parametrize(
    ("arch", "ranks", "widths", "layouts"),
    [
        ("sm_90a", 2, (2 * 72, 2 * 8), ("rows",)),
        pytest.param("sm_90a", 1, (72, 16), ("columns",), marks=pytest.mark.slow),
        ("sm_100a", 3, (3 * 136, 3 * 72, 3 * 8), ("slice", "rows")),
        pytest.param("sm_90a", 3, (3 * 72, 3 * 12, 2), ("columns", "rows"), marks=pytest.mark.slow),
        pytest.param("sm_100a", 2, (2 * 72, 1), ("columns",), marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_gathered_rows_is_one_launch(launched, monkeypatch, arch, ranks, widths, layouts):
    """Parts of K end inside k tiles, rows are uneven; nothing that TMA can load is copied.

    In the last two cases TMA cannot load some parts, and the first rank has no column of the last weight.
    """
    joined = []
    monkeypatch.setattr(Joined, "side_by_side", lambda one: joined.append(one))
    monkeypatch.setattr(GatheredLayer, "layouts", layouts)
    layer = GatheredLayer(135 * ranks - 1, widths)
    with World(arch, ranks, transport="copy_engine") as world:
        layer.backward(world.world.names, with_weights=ranks == 1)
        world.run()
    layer.check()
    assert launched == [("reduce_scatter", 1)] * ranks and not joined


@pytest.mark.parametrize(
    ("arch", "rows", "ranks", "algorithm"),
    [
        ("sm_90a", 269, 2, "two_shot"),
        ("sm_100a", 7, 3, "one_shot"),
        pytest.param("sm_90a", 7, 2, "one_shot", marks=pytest.mark.slow),
        pytest.param("sm_100a", 269, 4, "two_shot", marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_replicated_rows_is_one_launch(launched, arch, rows, ranks, algorithm):
    layer = ReplicatedLayer(rows, (ranks * 72, ranks * 8, ranks * 8))
    with World(
        arch, ranks, transport="copy_engine", fields={**SMALLEST[arch], "algorithm": algorithm}
    ) as world:
        layer.backward(world.world.names, with_weights=ranks == 2)
        world.run()
    layer.check()
    assert launched == [(algorithm, 1)] * ranks


@pytest.mark.parametrize("kind", [GatheredLayer, pytest.param(Layer, marks=pytest.mark.slow)])
def test_lists_of_more_matrices_than_a_kernel_takes_are_no_list(launched, kind):
    """Descriptors of nine matrices along K would not fit into the kernel's parameters."""
    layer = kind(128, (16,) * 9)
    with World("sm_90a", 2, transport="copy_engine") as world:
        layer.backward(world.world.names, with_weights=False)
        world.run()
    grad_x = torch.cat([of_rank[0] for of_rank in layer.grads]).double()
    torch.testing.assert_close(grad_x, layer.exact_x, rtol=0.02, atol=0.06)  # up to nine sums are rounded
    assert not launched


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("gemm_reduce_scatter", GatheredLayer),
        pytest.param("gemm_all_reduce", ReplicatedLayer, marks=pytest.mark.slow),
    ],
)
def test_sums_of_lists_and_of_one_weight_share_workspaces_with_a_rank_that_lags(op, kind):
    layers = [kind(390, (3 * 72, 3 * 8), seed=seed) for seed in (1, 2)]
    run_between_calls(op, layers, "copy_engine", starved=2)


@pytest.mark.usefixtures("changed_kernels")
def test_a_part_that_is_multiplied_with_the_weight_of_another_is_noticed(monkeypatch):
    parts_of = OperandViews.parts_of_k.fget

    def exchanged(views):
        first, second = parts_of(views)
        return first._replace(tma_a=second.tma_a, a=second.a), second._replace(tma_a=first.tma_a, a=first.a)

    monkeypatch.setattr(
        OperandViews, "parts_of_k", property(lambda one: exchanged(one) if one.later else parts_of(one))
    )
    layer = GatheredLayer(128, (2 * 72, 2 * 72))
    with World("sm_90a", 2, transport="copy_engine") as world:
        layer.backward(world.world.names, with_weights=False)
        world.run()
    with pytest.raises(AssertionError):
        layer.check()
