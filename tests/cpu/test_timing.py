import itertools
from collections import Counter
from functools import partial
from unittest import mock

import pytest

from overlap_gemm.tuning import timing
from overlap_gemm.tuning.timing import Replay, Timings, measure, order_of_round


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


def test_rounds_are_interleaved(monkeypatch):
    fake = FakeTime(monkeypatch)
    measure({name: fake.call(name, 1.0) for name in "abcd"}, rounds=3)
    assert "".join(fake.log) == "aabbccdd" + "abdc" + "bcad" + "cdba"


@pytest.mark.parametrize("count", range(2, 9))
def test_each_variant_follows_each_other_one_equally_often(count):
    names = [str(i) for i in range(count)]
    rounds = [order_of_round(names, i) for i in range(count * (1 + count % 2))]
    pairs = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    places = Counter((name, place) for order in rounds for place, name in enumerate(order))
    assert set(pairs.values()) == set(places.values()) == {1 + count % 2}
    assert len(pairs) == count * (count - 1) and len(places) == count**2


def test_what_a_variant_does_to_the_next_one_cancels(monkeypatch):
    # A call after b takes half a second more, as after one that has used up the power budget.
    fake, slow = FakeTime(monkeypatch), {"b": 0.5}
    fake.log.append("")

    def run(name):
        fake.now += 1.0 + slow.get(fake.log[-1], 0.0)
        fake.log.append(name)

    timings = measure({name: partial(run, name) for name in "abcd"}, rounds=4, burst_seconds=0.0)
    means = {name: sum(timings.seconds[name]) for name in "acd"}
    assert means == {"a": 4.5, "c": 4.5, "d": 4.5}


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


def test_a_replay_counts_as_its_calls(monkeypatch):
    fake = FakeTime(monkeypatch)
    graph = mock.Mock(replay=fake.call("g", 8.0))
    got = measure({"graph": Replay(graph, calls=4), "call": fake.call("c", 2.0)}, rounds=2)
    assert got.seconds == {"graph": (2.0, 2.0), "call": (2.0, 2.0)}


def test_the_bound_is_formed_within_a_round():
    timings = Timings({"product": (1.0, 4.0, 2.0)}).with_bound(2.5)
    assert timings.seconds["bound"] == (2.5, 4.0, 2.5)


def test_nothing_to_measure_is_an_error():
    with pytest.raises(ValueError, match="at least one variant"):
        measure({})
    with pytest.raises(ValueError, match="rounds=0"):
        measure({"a": lambda: None}, rounds=0)


def test_a_summary_has_microseconds_and_ratios_with_quartiles_of_every_variant():
    timings = Timings({"one": (1e-6, 2e-6, 3e-6), "two": (2e-6, 4e-6, 12e-6)})
    assert timings.summary("one") == {
        "us": {"one": 2.0, "two": 4.0},
        "ratio": {"one": 1.0, "two": 2.0},
        "quartiles": {"one": [1.0, 1.0], "two": [2.0, 3.0]},
    }


def test_after_each_round_the_caller_is_called_once():
    rounds = []
    measure({"one": lambda: None, "two": lambda: None}, rounds=3, after_round=lambda: rounds.append(1))
    assert len(rounds) == 3
