"""What the emulator may not change for the sake of speed."""

import dataclasses
import gc
import time
from functools import partial

import pytest

from cute_emulator.execution.launch import Machine
from cute_emulator.machine.asyncq import AsyncEngine, Event

from .handwritten import aligned, launch, module, run


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


@pytest.mark.parametrize("mode", ["random", "lazy"])
def test_many_pending_events_do_not_slow_each_other_down(mode):
    """Going through all of them for each took minutes for some thousand `cp.async` in flight."""
    engine, happened = AsyncEngine(mode, 1), []
    count, kinds = 20_000, ("load", "read", "write")
    before = time.process_time()
    for n in range(count):
        first = engine.submit(Event(partial(happened.append, n), None, None, "first", kinds[n % 3]))
        if n % 4 == 0:
            engine.submit(Event(partial(happened.append, ~n), None, None, "second", after=(first,)))
    while engine.idle_step():
        pass
    assert time.process_time() - before < 10
    assert len(happened) == len(set(happened)) == count + count // 4
    place = {n: at for at, n in enumerate(happened)}
    assert all(place[n] < place[~n] for n in range(0, count, 4))
    if mode == "lazy":  # seed 1: loads first, writes last
        kinds_seen = [kinds[n % 3] for n in happened if n >= 0]
        assert kinds_seen == sorted(kinds_seen)


@pytest.mark.parametrize("mode", ["random", "lazy"])
def test_what_a_grid_leaves_is_carried_out_without_looking_for_it_each_time(mode):
    """And what others have pending stays: events that follow, unordered ones and a queue's."""
    engine, happened, grids = AsyncEngine(mode, 1), [], ("mine", "others")
    count = 16_000
    for n in range(count):
        grid = grids[n % 2]
        first = engine.submit(Event(partial(happened.append, (grid, n)), grid, None, "first", "read"))
        engine.submit(Event(partial(happened.append, (grid, ~n)), grid, None, "second", "write", (first,)))
        engine.enqueue(grid, Event(partial(happened.append, (grid, n, 0)), grid, None, "third", "tensor"))
    before = time.process_time()
    engine.drain("mine")
    assert time.process_time() - before < 6
    assert {grid for grid, *_ in happened} == {"mine"} and len(set(happened)) == len(
        happened
    ) == 3 * count // 2
    place = {what: at for at, what in enumerate(happened)}
    assert all(place["mine", n] < place["mine", ~n] for n in range(0, count, 2))
    while engine.idle_step():
        pass
    assert len(set(happened)) == len(happened) == 3 * count


def test_clocks_of_ended_launches_are_dropped():
    # The vector clocks of warps that exchange flags do not grow with the number of launches.
    sizes = []
    for launches in (4, 12):
        flags = [aligned(32), aligned(32)]
        m = Machine("sm_100a", ranks=2)
        m.ended = lambda m=m: sizes.append(max(len(agent.vector) for agent in m.checks.agents.values()))
        for rank, flag in enumerate(flags):
            m.memory.register(flag.ctypes.data, flag.nbytes, rank, "flag", "symmetric")
        ptx = module(
            """
            cvt.u32.u64 %r0, %d2; st.release.sys.global.u32 [%d1], %r0;
            W: ld.acquire.sys.global.u32 %r1, [%d0]; setp.lt.u32 %p0, %r1, %r0; @%p0 bra W;
            """,
            3,
        )
        for number in range(1, launches + 1):
            for rank in range(2):
                mine = launch(ptx, [flags[rank], flags[1 - rank], number])
                m.submit(dataclasses.replace(mine, rank=rank))
        m.run()
        assert not m.report.findings and flags[0][0] == launches
    assert sizes[0] == sizes[1]
