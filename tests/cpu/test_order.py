"""The one order of a device's launches: what the host asks of streams, eagerly and in captures."""

import threading
from types import SimpleNamespace

import pytest
import torch

from overlap_gemm.runtime import executor, order
from overlap_gemm.runtime.executor import CudaExecutor
from overlap_gemm.runtime.order import CALLS, CaptureError, LaunchOrder, forbid_capture


class FakeStream:
    """Notes what it was made to wait for."""

    def __init__(self, name, handle, log):
        self.name, self.cuda_stream, self.log = name, handle, log
        self.capture = 0

    def wait_stream(self, other):
        assert (self.capture == 0) == (other.capture == 0), "a capture waits for nothing outside of it"
        assert self.capture == other.capture, "nor for another capture"
        self.log.append((self.name, other.name))


class FakeStreams:
    """Streams a, b, c of a device; `on` makes one current."""

    def __init__(self):
        self.log = []
        self.every = {name: FakeStream(name, handle, self.log) for handle, name in enumerate("abc")}
        self.now = self.every["a"]

    def current(self):
        return self.now

    def is_capturing(self):
        return self.now.capture != 0

    def capture_of(self, stream):
        return stream.capture

    def on(self, name, capture=None):
        self.now = self.every[name]
        if capture is not None:
            self.now.capture = capture
        return self.now.cuda_stream


@pytest.fixture
def streams():
    return FakeStreams()


@pytest.fixture
def launches(streams):
    return LaunchOrder(streams, torch.zeros(1, dtype=torch.int32))


# --- eager ---


def test_calls_on_one_stream_ask_nothing_of_it(launches, streams, monkeypatch):
    launches.follow(streams.on("a"))
    monkeypatch.setattr(streams, "current", lambda: pytest.fail("costs a microsecond"))
    assert not any(launches.follow(streams.on("a")) for _ in range(3))
    assert streams.log == []


def test_a_call_on_another_stream_waits_for_the_one_before_it(launches, streams):
    for name in "abbcab":
        launches.follow(streams.on(name))
    assert streams.log == [("b", "a"), ("c", "b"), ("a", "c"), ("b", "a")]


def test_a_launch_of_another_thread_is_behind_this_one(launches, streams):
    """Ordering and launching are one step: the other thread waits for the lock, not only for the event."""
    launched = []

    def call(name):
        with launches.lock:
            launches.follow(streams.on(name))
            launched.append(name)

    with launches.lock:
        launches.follow(streams.on("a"))
        other = threading.Thread(target=call, args=("b",), daemon=True)
        other.start()
        other.join(0.05)
        assert other.is_alive() and launched == []
        launched.append("a")
    other.join(60)
    assert launched == ["a", "b"] and streams.log == [("b", "a")]


def test_calls_are_numbered_from_one_and_never_zero(launches):
    assert [launches.next_call(), launches.next_call()] == [1, 2]
    launches._call = CALLS - 1
    assert [launches.next_call(), launches.next_call()] == [CALLS, 1]
    assert CALLS < 2**31


# --- captured ---


def test_branches_of_one_capture_are_ordered(launches, streams):
    for name in "abba":
        assert launches.follow(streams.on(name, capture=7))
    assert streams.log == [("b", "a"), ("a", "b")]


def test_the_first_captured_call_depends_on_nothing_outside(launches, streams):
    launches.follow(streams.on("a"))
    launches.follow(streams.on("b", capture=7))
    assert streams.log == []


def test_captures_at_the_same_time_know_nothing_of_each_other(launches, streams):
    for name, capture in (("a", 1), ("b", 2), ("a", 1), ("c", 2), ("b", 2)):
        launches.follow(streams.on(name, capture))
    assert streams.log == [("c", "b"), ("b", "c")]


def test_a_capture_is_forgotten_when_it_has_ended(launches, streams):
    for capture in range(1, 20):
        launches.follow(streams.on("a", capture))
    assert set(launches._captures) == {19}
    assert streams.log == []


def test_eager_calls_go_on_where_they_were_before_a_capture(launches, streams):
    launches.follow(streams.on("a"))
    launches.follow(streams.on("b", capture=7))
    launches.follow(streams.on("b", capture=0))
    assert streams.log == [("b", "a")]


def test_an_eager_call_is_not_drawn_into_a_capture_that_began_on_the_last_stream(launches, streams):
    launches.follow(streams.on("a"))
    streams.every["a"].capture = 7
    launches.follow(streams.on("b"))
    assert streams.log == []


def test_what_cannot_be_captured_says_what_to_call_before(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forbid_capture(device, "nothing")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    forbid_capture(torch.device("cpu"), "nothing")
    with pytest.raises(CaptureError, match=r"a kernel .* overlap_gemm\.warmup"):
        forbid_capture(device, "a kernel cannot be compiled")


# --- the streams of a device ---


@pytest.mark.parametrize(("status", "number", "found"), [("Active", 12, 12), ("None", 12, 0)])
def test_a_capture_is_known_by_what_cuda_says_of_the_stream(monkeypatch, status, number, found):
    from cuda.bindings import runtime

    statuses = runtime.cudaStreamCaptureStatus
    answer = (0, getattr(statuses, f"cudaStreamCaptureStatus{status}"), number, None, None, 0)
    monkeypatch.setattr(runtime, "cudaStreamGetCaptureInfo", lambda handle: answer)
    assert order.CudaStreams(torch.device("cuda", 0)).capture_of(SimpleNamespace(cuda_stream=5)) == found


def test_a_fork_begins_behind_the_current_stream_and_is_joined_whatever_happens(monkeypatch):
    log, events = [], []

    class Event:
        def __init__(self):
            events.append(self)

        def record(self, stream):
            self.recorded = stream

        def wait(self, stream):
            stream.wait_stream(self.recorded)

    streams = {handle: FakeStream(name, handle, log) for handle, name in ((1, "current"), (3, "other"))}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("second", 2, log))
    caches = executor._current_stream, executor._second_stream
    for cache in caches:
        cache.cache_clear()
    run_by = CudaExecutor("sm_90a", torch.device("cpu"), 132, None, None)
    for handle, name in ((1, "current"), (3, "other"), (1, "current")):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, handle=handle: streams[handle])
        with pytest.raises(RuntimeError, match="launch"), run_by.fork(handle) as second:
            log.append(second)
            raise RuntimeError("launch")
        assert log == [("second", name), 2, (name, "second")]
        log.clear()
    assert len(events) == 3, "one for each stream, not for each call"
    for cache in caches:  # of streams that are none
        cache.cache_clear()


def test_copies_raise_the_error_of_the_runtime(monkeypatch):
    from cuda.bindings import runtime

    calls, answers = [], iter([(0,), (1,)])
    monkeypatch.setattr(
        runtime, "cudaMemcpyAsync", lambda *arguments: calls.append(arguments) or next(answers)
    )
    executor._copy_of_runtime.cache_clear()
    run_by = CudaExecutor("sm_90a", torch.device("cpu"), 132, None, None)
    run_by.copy(7, 0x2000, 0x1000, 48)
    assert calls == [(0x2000, 0x1000, 48, runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, 7)]
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync of 48 bytes"):
        run_by.copy(7, 0x2000, 0x1000, 48)
    executor._copy_of_runtime.cache_clear()
