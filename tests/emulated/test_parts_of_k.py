"""The gradient of x of a list of weights of `gemm_all_to_all`: one kernel, whose K is a list."""

from dataclasses import replace

import pytest

from cute_emulator.machine.inject import StoreFault
from overlap_gemm.backends.fused import exchange_plans
from overlap_gemm.backends.fused.launch_plan import Plan
from overlap_gemm.exchange.geometry import CONTROL_BYTES, FLAG_BYTES
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.tuning.machine import machine_for
from tests.support.emulated.gather_world import World
from tests.support.emulated.list_cases import Layer


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Makes chunks of 128 rows; returns a list to which each launch appends its pattern and kernels."""
    monkeypatch.setattr(
        exchange_plans, "constants", lambda arch: replace(machine_for(arch), copy_bytes=1 << 14)
    )
    seen, launch = [], Plan.launch

    def noting(plan, *arguments):
        seen.append((plan.pattern, len(plan.products)))
        return launch(plan, *arguments)

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
    assert [one for one in launched if one[0] == "input_exchange"] == [("input_exchange", 1)] * ranks


@pytest.mark.parametrize(
    ("starved", "transport"), [(2, "peer_bulk"), pytest.param(1, "copy_engine", marks=pytest.mark.slow)]
)
def test_lists_and_single_weights_share_workspaces_with_a_rank_that_lags(starved, transport):
    layers = [Layer(390, (3 * 72, 3 * 8, 3 * 8), seed=1), Layer(3, (3 * 72, 3 * 8, 3 * 8), seed=2)]
    with World("sm_90a", 3, transport=transport, mode="random", starved=starved, sms=2) as world:
        for layer in (*layers, layers[0]):
            layer.backward(world.world.names, with_weights=False)
            world.call(260, 72, 216, "all_to_all_gemm")
        world.run()
    for layer in layers:
        layer.check()


def test_a_lost_flag_of_a_list_is_named():
    layer = Layer(512, (2 * 72, 2 * 8))
    with World("sm_90a", 2, transport="copy_engine") as world:
        layer.backward(world.world.names, with_weights=False)
        second = CONTROL_BYTES + FLAG_BYTES * 2  # of source 0
        world.emulator.faults.add(StoreFault("drop", 0, 1, begin=second, end=second + FLAG_BYTES))
        with pytest.raises(CommTimeoutError) as caught:
            world.run()
    assert (caught.value.failure.rank, caught.value.failure.source, caught.value.failure.tile) == (1, 0, 1)
