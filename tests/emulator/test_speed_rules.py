"""What the emulator may not change for the sake of speed."""

import gc

import pytest

from overlap_gemm.emulator.machine.asyncq import AsyncEngine, Event

from .handwritten import aligned, run


def event(log, name):
    return Event(lambda: log.append(name), None, None, name, "tensor")


@pytest.mark.parametrize("follow", ["submit", "enqueue", "hold", "settle", "step"])
def test_a_held_event_happens_before_whatever_follows_it(follow):
    log = []
    engine = AsyncEngine("immediate", 0)
    engine.hold("queue", event(log, "product"))
    assert log == []
    if follow in ("settle", "step"):
        getattr(engine, follow)()
        assert log == ["product"]
        return
    args = () if follow == "submit" else ("queue",)
    getattr(engine, follow)(*args, event(log, "next"))
    engine.settle()
    assert log == ["product", "next"]


def test_events_are_held_in_no_other_mode():
    for mode in ("random", "lazy"):
        log = []
        engine = AsyncEngine(mode, 0)
        engine.hold("queue", event(log, "product"))
        assert engine.held is None and log == [] and len(engine.queues["queue"]) == 1


def test_a_run_leaves_the_garbage_collector_as_it_was():
    out = aligned(32)
    run("st.global.u32 [%d0], 7;\n", [out])
    assert out[0] == 7 and gc.isenabled() and gc.get_freeze_count() == 0
