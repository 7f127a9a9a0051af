"""Faults on purpose: lost, late and repeated stores to peers; ranks that die or stall."""

import dataclasses

import pytest

from overlap_gemm.emulator.machine.errors import Deadlock, KernelTrap
from overlap_gemm.emulator.machine.inject import StoreFault
from overlap_gemm.emulator.machine.launch import Machine

from .handwritten import aligned, launch, module

HANDOFF = """
mov.u64 %d5, %globaltimer; add.s64 %d5, %d5, 1000000000;
cvt.u32.u64 %r50, %d3; setp.ne.b32 %p9, %r50, 0; @%p9 bra CONSUMER;
mov.b32 %r1, 7; st.global.b32 [%d1], %r1;
mov.b32 %r2, 1; st.release.sys.global.b32 [%d2], %r2;
bra.uni END;
CONSUMER:
WAIT: ld.acquire.sys.global.b32 %r4, [%d2]; setp.ne.b32 %p1, %r4, 0; @%p1 bra READY;
{patience}
bra WAIT;
READY: ld.global.b32 %r3, [%d1]; st.global.b32 [%d0], %r3;
END:
"""
TIMEOUT = "mov.u64 %d6, %globaltimer; setp.lt.u64 %p2, %d6, %d5; @%p2 bra WAIT; trap;"
FLAG_LINE = len(module("", 4).split("ret;")[0].splitlines()) + 4


def handoff(prepare, patience: str = ""):
    out, data, flag = aligned(1), aligned(1), aligned(1)
    m = Machine("sm_100a", ranks=2)
    for array, name in ((out, "out"), (data, "data"), (flag, "flag")):
        m.memory.register(array.ctypes.data, array.nbytes, 1, name, "symmetric")
    prepare(m)
    ptx = module(HANDOFF.format(patience=patience), 4)
    assert "st.release.sys" in ptx.splitlines()[FLAG_LINE - 1]
    for rank in (0, 1):
        one = launch(ptx, [out, data, flag, rank], block=(1, 1, 1))
        m.submit(dataclasses.replace(one, rank=rank))
    m.run()
    return int(out[0])


def test_without_faults_it_works():
    assert handoff(lambda m: None) == 7


def test_a_dropped_flag_is_a_deadlock_or_a_timeout():
    def prepare(m):
        m.faults.add(StoreFault("drop", source=0, target=1, line=FLAG_LINE))

    with pytest.raises(Deadlock, match="rank 1"):
        handoff(prepare)
    with pytest.raises(KernelTrap, match="rank 1"):
        handoff(prepare, TIMEOUT)


def test_a_delayed_flag_arrives_and_delayed_data_does_not_in_time():
    assert handoff(lambda m: m.faults.add(StoreFault("delay", line=FLAG_LINE))) == 7
    assert handoff(lambda m: m.faults.add(StoreFault("delay", line=FLAG_LINE - 1))) == 0
    assert handoff(lambda m: m.faults.add(StoreFault("duplicate", source=0))) == 7


def test_faults_choose_by_number():
    assert handoff(lambda m: m.faults.add(StoreFault("drop", count=1))) == 0
    with pytest.raises(Deadlock):
        handoff(lambda m: m.faults.add(StoreFault("drop", skip=1)))


def test_a_killed_rank_leaves_the_other_to_its_timeout():
    with pytest.raises(KernelTrap, match="rank 1"):
        handoff(lambda m: m.faults.kill(0), TIMEOUT)
    assert handoff(lambda m: m.faults.kill(1)) == 0


def test_a_stalled_rank_goes_on():
    assert handoff(lambda m: m.faults.stall(0, 0, 1 << 40)) == 7


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="drop, delay, duplicate"):
        StoreFault("lose")
