"""What the detectors remember of cells in a shorter way: the same as of each cell by itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from cute_emulator.machine.cells import PACK, SharedCells, TensorCells
from cute_emulator.machine.lane_plan import lane_plan
from cute_emulator.machine.shared_races import Party, SharedRaces, Unit

CHUNKS = 64


class Recorder(SharedRaces):
    """Judges nothing, but keeps what it would have judged."""

    def __init__(self):
        self.judged, self.emit, self.strict = [], None, False

    def _judge(self, agent, cta, entry, verb, was_write, *_, **__):
        self.judged.append((entry, verb, was_write))


class EachCell(SharedCells):
    def exactly(self, chunks):
        return None

    def keep_region(self, chunks, mine):
        self.raw[self.of_chunks(chunks)] = PACK.pack(mine, 0, 0)


class AtOnce(TensorCells):
    def rewrites(self, cells, mine):
        return False

    def write_late(self, cells, mine):
        self.raw[cells] = PACK.pack(mine, 0, 0)


def warp(number):
    cluster = SimpleNamespace(parties=[Party("anyone")] * 16)
    cta = SimpleNamespace(cluster=cluster)
    return SimpleNamespace(
        id=number, party=number, vector={number: 3}, nearby={}, touched=False, strong_party=0,
        warp=SimpleNamespace(index=number, cta=cta),
    )  # fmt: skip


def history(cells, seed):
    """Copies into and reads of stages, whole and in parts, and stores of lanes between."""
    rng, races, cta = np.random.default_rng(seed), Recorder(), SimpleNamespace(cells=cells)
    agents = [warp(1), warp(2)]
    for step in range(1, 60):
        agent = agents[rng.integers(2)]
        first = 8 * int(rng.integers(CHUNKS // 8))
        stages = slice(first, min(first + 8 * int(rng.integers(1, 4)), CHUNKS))
        kind = rng.integers(5)
        if kind < 2:
            races.async_write(agent, cta, stages, step, 5 + int(rng.integers(3)), step)
        elif kind < 4:
            races.async_read(agent, cta, stages, step, 9, step, int(rng.integers(2)))
        else:
            places = 16 * (first + np.arange(8, dtype=np.uint32))
            races.lanes(agent, cta, step, False, lane_plan(places.tobytes(), 0, 4), 16, bool(rng.integers(2)))
    cells.dissolve(0, 16 * CHUNKS)
    return races.judged, cells.entries.copy()


@pytest.mark.parametrize("seed", range(20))
def test_stages_are_told_of_as_their_cells_would_be(seed):
    (judged, left), (each, cells) = (
        history(SharedCells(16 * CHUNKS), seed),
        history(EachCell(16 * CHUNKS), seed),
    )
    np.testing.assert_array_equal(left, cells)
    assert set(judged) == set(each) and len(judged) > 20


def products(cells, seed):
    """K steps of two pipes into accumulators of which some overlap, and warps that look."""
    rng, races, cta = np.random.default_rng(seed), Recorder(), SimpleNamespace(tensor_cells=cells)
    agents, pipes = [warp(1), warp(2)], [Unit(6), Unit(7)]
    for step in range(1, 80):
        agent, pipe = agents[rng.integers(2)], pipes[int(rng.random() < 0.1)]
        first = 32 * int(rng.integers(2))
        place = slice(None), slice(0, 2), slice(first, first + 32 * int(rng.integers(1, 3)))
        if rng.random() < 0.2:
            pipe.advance()
        races.tensor(agent, cta, place, step, bool(rng.random() < 0.8), pipe if rng.random() < 0.8 else None)
    cells.settle()
    return races.judged, cells.entries.copy()


@pytest.fixture(autouse=True)
def no_fences(monkeypatch):
    """These agents have no kernel whose fences could be judged."""
    monkeypatch.setattr("cute_emulator.machine.tensor_fences.check", lambda *_: None)


@pytest.mark.parametrize("seed", range(20))
def test_a_write_that_is_put_down_late_is_told_of_as_one_at_once(seed):
    (judged, left), (each, cells) = products(TensorCells(4, 2, 128), seed), products(AtOnce(4, 2, 128), seed)
    np.testing.assert_array_equal(left, cells)
    assert judged == each and len(judged) > 5
