import itertools

import pytest

from overlap_gemm.tuning import timing
from overlap_gemm.tuning.timing import FourTimes, Timings, measure


class FakeTime:
    """A clock that only the measured callables move, so that every figure below is exact."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.log: list[str] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def call(self, name, seconds):
        def run():
            self.log.append(name)
            self.now += next(durations)

        durations = iter(seconds) if not isinstance(seconds, float) else itertools.repeat(seconds)
        return run


def test_rounds_are_interleaved_and_the_order_rotates(monkeypatch):
    fake = FakeTime(monkeypatch)
    measure({name: fake.call(name, 1.0) for name in "abc"}, rounds=3)
    assert "".join(fake.log) == "aabbcc" + "abc" + "bca" + "cab"


def test_a_burst_fills_the_asked_time_and_gives_the_time_of_one_call(monkeypatch):
    fake = FakeTime(monkeypatch)
    got = measure({"short": fake.call("s", 0.25), "long": fake.call("l", 8.0)}, rounds=2, burst_seconds=1.0)
    assert got.seconds == {"short": (0.25, 0.25), "long": (8.0, 8.0)}
    assert fake.log.count("s") == 2 + 2 * 4
    assert fake.log.count("l") == 2 + 2


def test_a_burst_is_bounded(monkeypatch):
    fake = FakeTime(monkeypatch)
    measure({"nothing": fake.call("n", 0.0)}, rounds=1)
    assert len(fake.log) == 2 + timing.MAX_BURST


def test_warm_up_calls_are_not_samples(monkeypatch):
    fake = FakeTime(monkeypatch)
    slow_start = [100.0, 100.0, 1.0, 1.0, 1.0]
    got = measure({"a": fake.call("a", slow_start)}, rounds=3, burst_seconds=1.0)
    assert got.seconds["a"] == (1.0, 1.0, 1.0)


def test_a_ratio_is_formed_within_a_round():
    # Load triples the second round; the two variants differ by a factor of 2 in every round all the same.
    loaded = Timings({"a": (2.0, 6.0, 2.2), "b": (1.0, 3.0, 1.1)})
    assert loaded.ratio("a", "b") == pytest.approx(2.0)
    assert loaded.ratio_range("a", "b") == pytest.approx((2.0, 2.0))
    assert loaded.median("a") == 2.2
    # The median of the ratios 2, 3 and 1.1, where the ratio of the medians would be 1.1.
    assert Timings({"a": (2.0, 6.0, 2.2), "b": (1.0, 2.0, 2.0)}).ratio("a", "b") == pytest.approx(2.0)


def test_four_times():
    timings = Timings({"gemm": (10.0,), "comm": (4.0,), "sequential": (14.0,), "fused": (11.0,)})
    times = FourTimes.of(timings, "fused")
    assert times.speedup == pytest.approx(14 / 11)
    assert times.hidden == pytest.approx(0.75)
    assert times.roof == pytest.approx(10 / 11)


def test_nothing_exposed_is_nothing_to_hide():
    assert FourTimes(gemm=10.0, comm=1.0, sequential=9.9, overlapped=9.0, speedup=1.1).hidden is None


def test_after_round_runs_once_a_round_and_is_not_timed(monkeypatch):
    fake = FakeTime(monkeypatch)
    progress = fake.call("progress", 50.0)
    got = measure({"a": fake.call("a", 1.0)}, rounds=4, after_round=progress)
    assert got.seconds["a"] == (1.0,) * 4
    assert fake.log.count("progress") == 4


def test_nothing_to_measure_is_an_error():
    with pytest.raises(ValueError, match="needs a variant"):
        measure({})
    with pytest.raises(ValueError, match="rounds=0"):
        measure({"a": lambda: None}, rounds=0)
