"""Ranks as threads that take turns."""

import gc
import random
import subprocess
import sys
import threading
import types

import pytest
import torch

from cute_emulator import clients
from cute_emulator.errors import EmulatorError, KernelTrap
from cute_emulator.host.torch.turns import Turns, current_frames


def run(ranks, body, device=lambda: None):
    turns = Turns(ranks, device)
    turns.run([lambda r=r: body(turns, r) for r in range(ranks)])


def test_a_turn_ends_only_where_a_rank_blocks():
    log, open_gate = [], []

    def body(turns, rank):
        log.append(("start", rank))
        if rank == 0:
            turns.block(lambda: bool(open_gate))
        log.append(("middle", rank))
        open_gate.append(rank)
        log.append(("end", rank))

    run(3, body)
    assert log == [
        ("start", 0), ("start", 1), ("middle", 1), ("end", 1), ("start", 2), ("middle", 2), ("end", 2),
        ("middle", 0), ("end", 0),
    ]  # fmt: skip


def test_the_device_runs_when_every_rank_is_blocked():
    launched, runs = [], []

    def device():
        runs.append(sorted(launched))
        launched.clear()

    def body(turns, rank):
        for step in range(2):
            launched.append((rank, step))
            turns.wait_for_device(lambda item=(rank, step): item not in launched)

    run(3, body, device)
    assert runs == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]]


def test_waiting_for_nothing_does_not_end_a_turn():
    log = []

    def body(turns, rank):
        turns.wait_for_device(lambda: True)
        log.append(rank)
        turns.wait_for_device(lambda: True)
        log.append(rank)

    run(2, body)
    assert log == [0, 0, 1, 1]


def test_an_error_of_a_rank_ends_the_others():
    reached = []

    def body(turns, rank):
        if rank == 1:
            raise KeyError("rank 1 failed")
        turns.block(lambda: False)
        reached.append(rank)

    with pytest.raises(KeyError, match="rank 1 failed"):
        run(3, body)
    assert reached == []


def test_an_error_of_the_device_reaches_the_caller():
    def device():
        raise EmulatorError("deadlock")

    with pytest.raises(EmulatorError, match="deadlock"):
        run(2, lambda turns, rank: turns.wait_for_device(lambda: False), device)


def test_a_trap_is_told_to_all_who_wait_and_no_launch_runs_any_more():
    runs, told = [], []

    def device():
        runs.append(1)
        raise KernelTrap("rank 0 trapped", line=7)

    def body(turns, rank):
        for _ in range(2):
            with pytest.raises(KernelTrap, match="rank 0 trapped") as caught:
                turns.wait_for_device(lambda: False)
            told.append((rank, caught.value.line))

    with pytest.raises(KernelTrap, match="rank 0 trapped"):
        run(2, body, device)
    assert sorted(told) == [(0, 7), (0, 7), (1, 7), (1, 7)] and len(runs) == 1


def test_what_a_script_raises_after_a_trap_is_its_error():
    def device():
        raise KernelTrap("rank 0 trapped")

    def body(turns, rank):
        try:
            turns.wait_for_device(lambda: False)
        except RuntimeError:
            raise KeyError("what the kernel left") from None

    with pytest.raises(KeyError, match="what the kernel left"):
        run(2, body, device)


def test_a_collective_that_not_all_reach_is_named():
    with pytest.raises(EmulatorError, match=r"ranks \[0, 2\] wait at a collective"):
        run(3, lambda turns, rank: None if rank == 1 else turns.block(lambda: False))


def test_each_rank_keeps_its_own_random_numbers():
    drawn = {0: [], 1: []}

    def body(turns, rank):
        torch.manual_seed(7)
        random.seed(7)
        for _ in range(3):
            drawn[rank].append((torch.rand(()).item(), random.random()))
            turns.wait_for_device(lambda: len(drawn[1 - rank]) >= len(drawn[rank]))

    run(2, body)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3


def test_globals_that_a_module_declares_are_each_ranks_own(monkeypatch):
    module = types.ModuleType("library")
    module.joined, module.known, module.shared = False, {"before": 0}, []
    monkeypatch.setitem(sys.modules, "library", module)
    monkeypatch.setattr(clients, "owned", {})
    clients.per_process("library", joined=bool, known=dict)
    seen = []

    def body(turns, rank):
        seen.append((rank, module.joined, dict(module.known)))
        module.joined = True
        module.known[rank] = module.shared
        module.shared.append(rank)
        turns.block(lambda: len(module.shared) == 2)
        seen.append((rank, module.joined, list(module.known), list(module.shared)))

    run(2, body)
    assert seen == [(0, False, {}), (1, False, {}), (0, True, [0], [0, 1]), (1, True, [1], [0, 1])]


def test_a_rank_that_waits_for_another_behind_the_turns_back_is_named():
    lock = threading.Lock()

    def body(turns, rank):
        if rank == 0:
            lock.acquire()
            turns.block(lambda: False)
        with lock:
            pass

    turns = Turns(2, lambda: None, idle_seconds=1.0)
    with pytest.raises(EmulatorError, match="rank 1 has the turn") as caught:
        turns.run([lambda r=r: body(turns, r) for r in range(2)])
    lock.release()
    assert "with lock:" in str(caught.value) and "turns.block(lambda: False)" in str(caught.value)


COLLECTS_THREAD_LOCALS = """
import faulthandler, gc, threading, time
from cute_emulator.host.torch.turns import current_frames

def step(depth):
    step(depth - 1) if depth else time.sleep(0)

def make_new_frames():
    while True:
        step(3)

for _ in range(3):
    threading.Thread(target=make_new_frames, daemon=True).start()
faulthandler.dump_traceback_later(20, exit=True)
gc.set_threshold(1)
end = time.monotonic() + 2
while time.monotonic() < end:
    local = threading.local()
    local.itself = local
    del local
    assert threading.get_ident() in current_frames() and gc.isenabled()
"""


def test_frames_are_read_while_the_collector_frees_thread_locals():
    done = subprocess.run(
        [sys.executable, "-c", COLLECTS_THREAD_LOCALS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_reading_frames_leaves_a_disabled_collector_disabled():
    gc.disable()
    try:
        current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()
