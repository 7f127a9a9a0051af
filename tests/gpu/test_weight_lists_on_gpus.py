"""Lists of weights of `gemm_all_to_all` on virtual ranks of one GPU: one kernel on each rank."""

import pytest

from overlap_gemm.runtime.virtual import VirtualWorld
from tests.support.emulated.list_cases import (
    GatheredLayer,
    Layer,
    Operands,
    ReplicatedLayer,
    counted_launches,
)


@pytest.mark.parametrize("scaled", [False, True], ids=["16-bit", "8-bit"])
@pytest.mark.parametrize("rows", [30, 1000, 4096])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_list_is_one_launch(device, monkeypatch, ranks, rows, scaled):
    launches = counted_launches(monkeypatch)
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(4):
            case = Operands(rows, [136 * ranks, 72 * ranks, 72 * ranks], 1024, scaled, seed, device)
            launches.clear()
            outs = case.call(world)
            world.synchronize()
            case.check(outs)
            assert launches == [1] * ranks


def run_gradients(kind, launches, ranks, rows, device):
    """Checks gradients of four layers; yields numbers of kernels: of forward calls, then of gradients."""
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(4):
            layer = kind(rows, [1024 * ranks, 136 * ranks, 72 * ranks], seed=seed, device=device)
            launches.clear()
            layer.backward(world.names, with_weights=False)
            world.synchronize()
            layer.check()
            yield launches


@pytest.mark.parametrize("rows", [30, 1000, 4096])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_gradient_of_a_list_is_one_launch(device, monkeypatch, ranks, rows):
    for launches in run_gradients(Layer, counted_launches(monkeypatch), ranks, rows, device):
        assert launches == [1, 1] * ranks


@pytest.mark.parametrize("rows", [30, 1000, 4096])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_gradient_of_gathered_rows_of_a_list_is_one_launch(device, monkeypatch, ranks, rows):
    monkeypatch.setattr(GatheredLayer, "layouts", ("rows", "columns", "slice"))
    for launches in run_gradients(GatheredLayer, counted_launches(monkeypatch), ranks, rows, device):
        assert launches == [1, 1] * ranks


@pytest.mark.parametrize("rows", [30, 1000, 4096])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_gradient_of_replicated_rows_of_a_list_is_one_launch(device, monkeypatch, ranks, rows):
    for launches in run_gradients(ReplicatedLayer, counted_launches(monkeypatch), ranks, rows, device):
        assert launches == [1] * ranks  # forward is torch's
