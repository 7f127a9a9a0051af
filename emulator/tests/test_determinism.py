"""A run is a function of its inputs and the seed: not of addresses, hash seeds, or what ran before it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_emulator.errors import Deadlock, MemoryFault
from cute_emulator.execution.scheduler import Schedule, Scheduler

from .handwritten import aligned, launch, machine, module, run

WARPS = 8
# Warps 1 to 7 poll one word each, 16 bytes apart; one store of warp 0 sets them all. Who comes first draws
# the first ticket.
RACE_TO_TICKETS = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; and.b32 %r2, %r0, 31; setp.ne.b32 %p0, %r1, 0;
@%p0 bra WAIT;
mov.u32 %r3, 0;
LATER: add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 400; @%p1 bra LATER;
shl.b32 %r4, %r2, 4; cvt.u64.u32 %d10, %r4; add.s64 %d11, %d1, %d10;
st.relaxed.gpu.global.b32 [%d11], 1;
bra.uni END;
WAIT:
shl.b32 %r4, %r1, 4; cvt.u64.u32 %d10, %r4; add.s64 %d11, %d1, %d10;
SPIN: ld.relaxed.gpu.global.b32 %r5, [%d11]; setp.eq.b32 %p2, %r5, 0; @%p2 bra SPIN;
setp.ne.b32 %p3, %r2, 0;
@%p3 bra END;
atom.relaxed.gpu.global.add.u32 %r6, [%d2], 1;
shl.b32 %r7, %r1, 2; cvt.u64.u32 %d12, %r7; add.s64 %d13, %d0, %d12;
st.global.b32 [%d13], %r6;
END:
"""


def tickets(offset, **options):
    """The order in which warps 1 to 7 came, with the flags `offset` granules into their memory."""
    out, flags, counter = aligned(32), aligned(4096 + 128), aligned(32)
    flags = flags[4 * offset : 4 * offset + 128]
    run(RACE_TO_TICKETS, [out, flags, counter], block=(32 * WARPS, 1, 1), **options)
    return out[1:WARPS].tolist()


@pytest.mark.parametrize("mode", ["immediate", "lazy", "random"])
def test_whom_a_store_wakes_first_does_not_depend_on_addresses(mode):
    orders = {tuple(tickets(offset, mode=mode)) for offset in range(0, 1024, 37)}
    assert len(orders) == 1
    assert sorted(orders.pop()) == list(range(WARPS - 1))


def turns(seed):
    """Every turn of a shuffled run: warp, and instructions executed so far."""
    log = []
    take_turn = Scheduler._turn

    def noted(self, warp, quantum):
        take_turn(self, warp, quantum)
        log.append((warp.index, self.executed, self.clock))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_turn", noted)
        log.append(tickets(0, mode="random", seed=seed, schedule=Schedule("random", lanes=True)))
    return repr(log)


def test_another_process_takes_the_same_turns():
    """With another hash seed and memory elsewhere."""
    root = Path(__file__).parents[2]
    code = (
        "import numpy; keep = numpy.ones(12345); from emulator.tests.test_determinism import turns;"
        "print(turns(5))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={
            **os.environ,
            "PYTHONHASHSEED": "4242",
            "PYTHONPATH": f"{root / 'src'}:{root / 'emulator' / 'src'}:{root}",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == turns(5)
    assert turns(5) != turns(6)


@pytest.mark.parametrize("form", ["uniform", "lanes"])
def test_memory_of_an_earlier_machine_is_not_remembered(form):
    """The host gives an address again: a translated kernel must not go by what lay there before."""
    words = aligned(128)
    body = "st.global.b32 [%d0+400], 7;\n" if form == "uniform" else (
        "mov.u32 %r0, %tid.x; mul.wide.u32 %d10, %r0, 4; add.s64 %d11, %d0, %d10;"
        "st.global.b32 [%d11+288], 7;\n"
    )  # fmt: skip
    ptx = module(body, 1)

    def go(registered):
        m = machine([registered])
        m.submit(launch(ptx, [words]))
        m.run()

    go(words)
    assert words[100] == 7
    with pytest.raises(MemoryFault, match="out of bounds"):
        go(words[:64])
    go(words)


PEEK_TWICE = """
mov.u32 %r0, %tid.x; setp.ne.b32 %p0, %r0, 0;
@!%p0 mbarrier.init.shared.b64 [bar], 1;
bar.sync 0;
setp.ge.u32 %p1, %r0, 32;
@%p1 bra WAITER;
mov.u32 %r1, 0;
AGAIN: mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0;
add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 3; @%p3 bra AGAIN;
st.relaxed.gpu.global.b32 [%d1], 1;
bra.uni END;
WAITER:
mov.u64 %d10, %globaltimer;
LOOK: ld.relaxed.gpu.global.b32 %r2, [%d1]; setp.ne.b32 %p4, %r2, 0; @%p4 bra END;
mov.u64 %d11, %globaltimer; sub.s64 %d12, %d11, %d10;
setp.lt.u64 %p5, %d12, 30000000000; @%p5 bra LOOK;
st.global.b32 [%d0], 1;
END:
"""


def test_time_does_not_pass_while_somebody_only_peeked():
    """A warp that looks at a barrier and would go on either way is parked there; nobody expires for that."""
    expired, flag = aligned(32), aligned(32)
    run(PEEK_TWICE, [expired, flag], smem=".shared .align 8 .b64 bar;", block=(64, 1, 1))
    assert (expired[0], flag[0]) == (0, 1)


EXPIRES = """
mov.u64 %d10, %globaltimer;
LOOK: ld.relaxed.gpu.global.b32 %r2, [%d1]; setp.ne.b32 %p4, %r2, 0; @%p4 bra END;
mov.u64 %d11, %globaltimer; sub.s64 %d12, %d11, %d10;
setp.lt.u64 %p5, %d12, {bound}; @%p5 bra LOOK;
ld.global.b32 %r1, [%d0]; add.u32 %r1, %r1, 1; st.global.b32 [%d0], %r1;
END:
"""


def test_many_waits_that_expire_are_no_deadlock():
    """Each makes time jump; how often it may is told anew where something happened, an exit say."""
    expired, flag = aligned(32), aligned(32)
    m, ptx = machine([expired, flag]), module(EXPIRES.format(bound=1_000_000), 2)
    for _ in range(100):
        m.submit(launch(ptx, [expired, flag]))
    m.run()
    assert expired[0] == 100


RETRIES = """
mov.b32 %r5, 0;
AGAIN: mov.u64 %d10, %globaltimer;
LOOK: {look} @%p4 bra END;
mov.u64 %d11, %globaltimer; sub.s64 %d12, %d11, %d10;
setp.lt.u64 %p5, %d12, {bound}; @%p5 bra LOOK;
add.u32 %r5, %r5, 1; setp.lt.u32 %p6, %r5, {times}; @%p6 bra AGAIN;
END: mov.u32 %r6, %tid.x; shr.u32 %r7, %r6, 5; mul.wide.u32 %d5, %r7, 4; add.s64 %d5, %d5, %d0;
st.global.b32 [%d5], %r5;
"""
LOOKS = {
    "flag": "ld.relaxed.gpu.global.b32 %r2, [%d1]; setp.ne.b32 %p4, %r2, 0;",
    "cas": "atom.relaxed.gpu.global.cas.b32 %r2, [%d1], 1, 2; setp.eq.b32 %p4, %r2, 1;",
    "mbarrier": "mbarrier.try_wait.parity.shared.b64 %p4, [bar], 0;",
}
WITH_BARRIER = (
    "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [bar], 1; bar.sync 0;"
)


@pytest.mark.parametrize("look", LOOKS)
def test_a_wait_may_expire_and_be_tried_again_hundreds_of_times(look):
    tries, flag = aligned(32), aligned(32)
    body = WITH_BARRIER + RETRIES.format(look=LOOKS[look], bound=1_000_000, times=200)
    warps = 1 if look == "cas" else 3
    m = run(body, [tries, flag], smem=".shared .align 8 .b64 bar;", block=(32 * warps, 1, 1))
    assert tries[:warps].tolist() == [200] * warps
    assert m.scheduler.clock < 3 * 200 * 1_000_000  # and time did not pass much faster than they ask


def test_who_waits_longer_than_others_retry_does_not_expire():
    """A warp that tries 100 times for a millisecond, and then tells one that waits for a second."""
    tries, flag = aligned(32), aligned(32)
    body = (
        "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 32; add.s64 %d2, %d1, 64; @%p1 bra WAITER;"
        + RETRIES.format(look=LOOKS["flag"], bound=1_000_000, times=100)
        + "st.release.gpu.global.b32 [%d2], 1; bra.uni OUT; WAITER: add.s64 %d1, %d1, 64;"
        + RETRIES.format(look=LOOKS["flag"], bound=1_000_000_000, times=1)
        .replace("AGAIN", "ANEW")
        .replace("LOOK", "PEEK")
        .replace("END", "DONE")
        + "OUT:"
    )
    run(body, [tries, flag], block=(64, 1, 1))
    assert tries[:2].tolist() == [100, 0]


@pytest.mark.parametrize("look", LOOKS)
def test_a_wait_that_is_tried_again_for_ever_is_a_deadlock(look):
    tries, flag = aligned(32), aligned(32)
    body = WITH_BARRIER + RETRIES.format(look=LOOKS[look], bound=1_000, times=1 << 31)
    with pytest.raises(Deadlock):
        run(body, [tries, flag], smem=".shared .align 8 .b64 bar;")


def test_a_deadlock_leaves_the_next_run_its_time():
    expired, flag = aligned(32), aligned(32)
    m = machine([expired, flag])
    for bound, ends in ((1 << 62, False), (1_000_000, True)):
        m.submit(launch(module(EXPIRES.format(bound=bound), 2), [expired, flag]))
        if ends:
            m.run()
        else:
            with pytest.raises(Deadlock, match="a change at"):
                m.run()
    assert expired[0] == 1 and m.scheduler.clock < 1 << 63


def test_an_order_of_turns_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="order='shuffled' must be one of round_robin, random"):
        Schedule("shuffled")
