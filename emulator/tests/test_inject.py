"""Faults on purpose: lost, late and repeated stores to peers; ranks that die or stall."""

import dataclasses

import numpy as np
import pytest

from cute_emulator.errors import Deadlock, KernelTrap
from cute_emulator.execution.launch import Machine
from cute_emulator.machine.inject import StoreFault
from cute_emulator.units.tma_encode import encode_tiled

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


def test_faults_choose_by_place():
    """Data and flag are allocations of four bytes each."""
    with pytest.raises(Deadlock):
        handoff(lambda m: m.faults.add(StoreFault("drop", begin=0, end=4)))
    with pytest.raises(Deadlock):
        handoff(lambda m: m.faults.by_words("drop:flag:begin=0,end=1"))
    assert handoff(lambda m: m.faults.add(StoreFault("drop", begin=1))) == 7
    assert handoff(lambda m: m.faults.add(StoreFault("drop", end=0))) == 7


def test_a_killed_rank_leaves_the_other_to_its_timeout():
    with pytest.raises(KernelTrap, match="rank 1"):
        handoff(lambda m: m.faults.kill(0), TIMEOUT)
    assert handoff(lambda m: m.faults.kill(1)) == 0


def test_a_stalled_rank_goes_on():
    assert handoff(lambda m: m.faults.stall(0, 0, 1 << 40)) == 7


@pytest.mark.parametrize(
    ("words", "hits"),
    [
        ("drop:store", 1),
        ("drop:flag:skip=5", 0),
        ("delay:store:source=0,target=1", 1),
        ("duplicate:copy", 0),
        ("drop:store:target=0", 0),
        (f"delay:line={FLAG_LINE - 1},instructions=100000", 1),
    ],
)
def test_faults_by_words_choose_by_kind_and_count_what_they_hit(words, hits):
    machines = []
    spoilt = hits and not words.startswith("duplicate")
    assert handoff(lambda m: (m.faults.by_words(words), machines.append(m))) == (0 if spoilt else 7)
    assert [n for _, n in machines[0].faults.hits()] == [hits]


def test_a_flag_is_chosen_by_kind_and_a_rank_by_name():
    with pytest.raises(Deadlock, match="rank 1"):
        handoff(lambda m: m.faults.by_words("drop:flag"))
    with pytest.raises(KernelTrap, match="rank 1"):
        handoff(lambda m: m.faults.by_words("kill:rank=0,after=0"), TIMEOUT)
    assert handoff(lambda m: m.faults.by_words("stall:rank=0,begin=0,end=1000000")) == 7


def test_a_ranks_own_memory_only_where_it_is_named():
    out = aligned(4)
    for words, stored in (("drop", 7), ("drop:target=0", 0), ("drop:flag:target=0", 7)):
        m = Machine("sm_100a")
        m.memory.register(out.ctypes.data, out.nbytes)
        m.faults.by_words(words)
        out[:] = 0
        m.submit(launch(module("st.global.b32 [%d0], 7;", 1), [out], block=(1, 1, 1)))
        m.run()
        assert out[0] == stored


def test_reductions_and_atomics_of_a_peer_are_flags_and_bulk_reductions_copies():
    smem = ".shared .align 128 .b8 buf[128];"
    body = """
    mov.b32 %r1, buf; mov.b32 %r2, 5; st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};
    fence.proxy.async.shared::cta;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [%r1], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    red.release.sys.global.add.u32 [%d1], 1;
    """
    for words, expected in (("drop:copy", (0, 1)), ("drop:flag", (5, 0)), ("duplicate:copy", (10, 1))):
        data, flag = aligned(4), aligned(4)
        m = Machine("sm_100a", ranks=2)
        for array in (data, flag):
            m.memory.register(array.ctypes.data, array.nbytes, 1)
        m.faults.by_words(words)
        m.submit(launch(module(body, 2, smem), [data, flag], block=(1, 1, 1)))
        m.run()
        assert (data[0], flag[0]) == expected, words


STORES = """
cvt.u32.u64 %r1, %d1; setp.ne.b32 %p1, %r1, 0; @%p1 trap;
st.global.b32 [%d0], 7;
mov.b32 %r2, 0; S: add.s32 %r2, %r2, 1; setp.lt.s32 %p2, %r2, 200; @%p2 bra S;
"""


@pytest.mark.parametrize("words", ["delay:store:count=1,instructions=400", "stall:rank=0,begin=0,end=400"])
def test_what_a_broken_off_run_left_is_not_the_next_ones(words):
    out, other = aligned(1), aligned(1)
    m = Machine("sm_100a", ranks=2)
    for array in (out, other):
        m.memory.register(array.ctypes.data, array.nbytes, 1)
    m.faults.by_words(words)
    for rank in (0, 1):
        m.submit(dataclasses.replace(launch(module(STORES, 2), [out, rank]), rank=rank))
    with pytest.raises(KernelTrap, match="rank 1"):
        m.run()
    m.submit(dataclasses.replace(launch(module(STORES, 2), [other, 0]), rank=1))
    m.run()
    assert m.scheduler.executed > 400 and (out[0], other[0]) == (0, 7)


LOADED = """
mov.b32 %r10, bar; mov.b32 %r11, buf; mbarrier.init.shared.b64 [%r10], 1;
fence.mbarrier_init.release.cluster; fence.proxy.async;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 16;
{copy}
W: mbarrier.try_wait.parity.shared.b64 %p1, [%r10], 0; @!%p1 bra W;
ld.shared.b32 %r1, [%r11]; st.global.b32 [%d1], %r1;
mov.b32 %r2, 9; st.shared.b32 [%r11], %r2;
mov.b32 %r20, 0; S: add.s32 %r20, %r20, 1; setp.lt.s32 %p5, %r20, 900; @%p5 bra S;
ld.volatile.shared.b32 %r1, [%r11]; st.global.b32 [%d1+4], %r1;
"""
COPIES = {
    "bulk": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r11], [%d0], 16, [%r10];",
    "tile": "mov.b32 %r5, 0; cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [%r11], [%d2, {%r5}], [%r10];",
}


@pytest.mark.parametrize("mode", ["immediate", "random", "lazy"])
@pytest.mark.parametrize("copy", COPIES)
def test_copies_into_shared_memory_are_lost_late_and_repeated(copy, mode):
    def loaded(words):
        source, out, tensor = aligned(4, fill=5), aligned(4), aligned(32)
        tensor.view("u1")[:] = np.frombuffer(
            encode_tiled(2, source.ctypes.data, [4], [], [4], [1]).encode(), "u1"
        )
        m = Machine("sm_100a", mode=mode, checks=())
        for array in (source, out, tensor):
            m.memory.register(array.ctypes.data, array.nbytes)
        for word in words:
            m.faults.by_words(word)
        smem = ".shared .align 128 .b8 buf[16]; .shared .align 8 .b64 bar;"
        m.submit(
            launch(module(LOADED.format(copy=COPIES[copy]), 3, smem), [source, out, tensor], block=(1, 1, 1))
        )
        m.run()
        return [*out[:2].tolist(), *(hits for _, hits in m.faults.hits())]

    assert loaded([]) == [5, 9]
    assert loaded(["drop"]) == [5, 9, 0], "no word but `load` means these"
    assert loaded(["delay:load"]) == [5, 9, 1]
    assert loaded(["duplicate:load:instructions=500"]) == [5, 5, 1]
    assert loaded(["drop:load:line=1"]) == [5, 9, 0]
    with pytest.raises(Deadlock, match="mbarrier"):
        loaded(["drop:load:source=0,target=0"])


@pytest.mark.parametrize(
    "words", ["lose", "drop:words", "drop:flag:source", "kill:rank=0:after=3", "kill:x=1", "drop:line=a"]
)
def test_faults_that_do_not_read_so_are_refused(words):
    with pytest.raises(ValueError, match="must read drop"):
        Machine("sm_100a").faults.by_words(words)


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="drop, delay, duplicate"):
        StoreFault("lose")
