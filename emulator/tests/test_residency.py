"""What is resident together: SMs shared by all kernels of a rank, and streams that wait for each other."""

import itertools

import numpy as np
import pytest

from cute_emulator import Schedule
from cute_emulator.errors import Deadlock
from cute_emulator.machine.residency import Footprint
from cute_emulator.ptx.parse import parse

from .handwritten import aligned, launch, machine, module

WHOLE_SM = 220_000  # bytes of dynamic shared memory

# Counts itself in at every rank's counter d0, d1 (this kernel's), and waits until all of both ranks are in.
MEET = """
mov.b32 %r1, 1; mov.u32 %r0, %tid.x; setp.ne.b32 %p1, %r0, 0; @%p1 bra END;
atom.global.sys.acq_rel.add.u32 %r2, [%d0], %r1; atom.global.sys.acq_rel.add.u32 %r2, [%d1], %r1;
cvt.u32.u64 %r4, %d2;
WAIT: ld.acquire.sys.global.b32 %r3, [%d0]; setp.lt.u32 %p0, %r3, %r4; @%p0 bra WAIT;
END:
"""

# Waits for the word at d0, then counts at d1.
AWAIT = """
WAIT: ld.acquire.gpu.global.b32 %r3, [%d0]; setp.eq.u32 %p0, %r3, 0; @%p0 bra WAIT;
mov.b32 %r1, 1; red.global.gpu.add.u32 [%d1], %r1;
"""
SET = "mov.b32 %r1, 1; st.release.gpu.global.b32 [%d0], %r1;"


def submit(m, body, args, **shape):
    shape = {"block": (32, 1, 1), "dynamic_smem": WHOLE_SM, **shape}
    m.submit(launch(module(body, len(args)), args, **shape))


def two_calls(order_of_rank, num_sms=4, ctas=3, **options):
    """Two kernels whose CTAs of both ranks wait for each other, on two streams, each on most of the SMs."""
    counters = aligned(4 * 32)
    m = machine([counters], ranks=2, num_sms=num_sms, **options)
    for rank, order in enumerate(order_of_rank):
        for kernel in order:
            at = [counters.ctypes.data + 128 * (2 * kernel + r) for r in (rank, 1 - rank)]
            submit(m, MEET, [*at, 2 * ctas], rank=rank, stream=kernel, grid=(ctas, 1, 1))
    m.run()
    assert counters.reshape(4, 32)[:, 0].tolist() == [2 * ctas] * 4


def test_calls_that_every_rank_submits_in_one_order_run_in_turn():
    two_calls([(0, 1), (0, 1)])


def test_calls_in_different_orders_hold_each_a_part_of_the_sms_for_ever():
    with pytest.raises(Deadlock):
        two_calls([(0, 1), (1, 0)])


def test_calls_in_different_orders_that_fit_together_do_not():
    two_calls([(0, 1), (1, 0)], num_sms=6)


def test_no_device_promises_the_order_of_submission():
    with pytest.raises(Deadlock):
        for seed in range(20):
            two_calls([(0, 1), (0, 1)], seed=seed, schedule=Schedule(grids="random"))


@pytest.mark.parametrize(("ctas", "fits"), [(2, True), (3, False)])
def test_a_kernel_beside_one_that_waits_for_it_needs_an_sm_of_its_own(ctas, fits):
    flag, count = aligned(32), aligned(32)
    m = machine([flag, count], num_sms=3)
    submit(m, AWAIT, [flag, count], grid=(ctas, 1, 1), block=(1, 1, 1))
    submit(m, SET, [flag], stream=1, block=(1, 1, 1))
    if fits:
        m.run()
        assert count[0] == ctas
    else:
        with pytest.raises(Deadlock):
            m.run()


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ({"dynamic_smem": 0}, 32),  # CTAs
        ({"dynamic_smem": 0, "block": (1024, 1, 1)}, 2),  # threads
        ({"dynamic_smem": 0, "block": (65, 1, 1)}, 21),  # whole warps
        ({"dynamic_smem": 50_000}, 4),  # shared memory
    ],
    ids=str,
)
def test_an_sm_holds_what_its_resources_allow(shape, fits):
    def all_meet(ctas):
        counters = aligned(64)
        m = machine([counters], num_sms=1)
        submit(m, MEET, [counters, counters[32:], ctas], grid=(ctas, 1, 1), **shape)
        m.run()

    all_meet(fits)
    with pytest.raises(Deadlock):
        all_meet(fits + 1)


@pytest.mark.parametrize(
    ("head", "body", "per_sm"),
    [
        ("", "", 5),
        (".maxnreg 168", "", 1),
        ("", "setmaxnreg.inc.sync.aligned.u32 232;", 1),
        (".maxnreg 64", "", 2),
    ],
)
def test_registers_count_where_the_ptx_tells_them(head, body, per_sm):
    text = module(body, 0).replace("k()", f"k() {head}")
    assert Footprint.of(parse(text).functions["k"], 384, 0).per_sm() == per_sm


def test_sms_of_two_small_kernels_are_shared_and_named():
    seen = aligned(64)
    m = machine([seen], num_sms=2)
    body = "mov.u32 %r0, %smid; mul.wide.u32 %d5, %r0, 4; add.s64 %d5, %d5, %d0;"
    body += "mov.b32 %r1, 1; red.global.add.u32 [%d5], %r1;"
    for stream in (0, 1):
        submit(m, body, [seen], grid=(6, 1, 1), stream=stream, block=(1, 1, 1), dynamic_smem=0)
    m.run()
    np.testing.assert_array_equal(seen[:3], [6, 6, 0])


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_cooperative_launch_that_cannot_be_resident_is_refused(cluster):
    m = machine([], num_sms=3)
    shape = {"cluster": (cluster, 1, 1), "cooperative": True}
    submit(m, "", [], grid=(2, 1, 1), **shape)
    with pytest.raises(ValueError, match="cooperative launch of 4 CTAs"):
        submit(m, "", [], grid=(4, 1, 1), **shape)


def test_ranks_may_differ_in_their_sms():
    m = machine([], ranks=2, num_sms=[2, 4])
    submit(m, "", [], rank=1, cluster=(4, 1, 1), grid=(4, 1, 1))
    with pytest.raises(ValueError, match="clusters of 4 CTAs do not fit.*2 SMs"):
        submit(m, "", [], rank=0, cluster=(4, 1, 1), grid=(4, 1, 1))
    with pytest.raises(ValueError, match="num_sms"):
        machine([], ranks=2, num_sms=[2, 4, 8])


# --- streams ---

STORE = "mov.b32 %r1, 7; st.global.b32 [%d0], %r1;"
COPY = "ld.global.b32 %r1, [%d0]; st.global.b32 [%d1], %r1;"


def wait(m, stream, other):
    m.wait(0, stream, m.record(0, other))


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_waits_for_another_finds_what_it_wrote(waits):
    source, out = aligned(32), aligned(32)
    m = machine([source, out])
    submit(m, STORE, [source], stream=1, block=(1, 1, 1))
    if waits:
        wait(m, 2, 1)
    submit(m, COPY, [source, out], stream=2, block=(1, 1, 1))
    m.run()
    assert m.report.ok is waits, "without the wait the two race"
    assert not waits or out[0] == 7


def test_what_a_stream_is_given_before_and_after_does_not_count():
    source, flag, count = aligned(32), aligned(32), aligned(32)
    m = machine([source, flag, count], num_sms=2)
    event = m.record(0, 1)
    assert event.done, "an empty stream has nothing to wait for"
    submit(m, STORE, [source], stream=1, block=(1, 1, 1))
    event = m.record(0, 1)
    submit(m, AWAIT, [flag, count], stream=1, block=(1, 1, 1))  # after the event: not waited for
    m.wait(0, 2, event)
    submit(m, SET, [flag], stream=2, block=(1, 1, 1))
    m.run()
    assert event.done and count[0] == 1


def test_a_fork_and_join_is_in_order():
    a, b, c = (aligned(32) for _ in range(3))
    m = machine([a, b, c])
    for _ in itertools.repeat(None, 3):
        submit(m, STORE, [a], stream=1, block=(1, 1, 1))
        wait(m, 2, 1)
        submit(m, COPY, [a, b], stream=2, block=(1, 1, 1))
        wait(m, 1, 2)
        submit(m, COPY, [b, c], stream=1, block=(1, 1, 1))
    m.run()
    assert m.report.ok, m.report.findings
    assert c[0] == 7


def test_streams_that_wait_for_each_other_in_turn_run_each_launch_once():
    count = aligned(32)
    m = machine([count])
    body = "mov.b32 %r1, 1; red.global.add.u32 [%d0], %r1;"
    for _ in range(4):
        submit(m, body, [count], stream=1, block=(1, 1, 1))
        submit(m, body, [count], stream=2, block=(1, 1, 1))
        wait(m, 1, 2)
        wait(m, 2, 1)
    m.run()
    assert count[0] == 8


def test_events_of_a_run_that_broke_off_hold_nobody_up():
    flag, count = aligned(32), aligned(32)
    m = machine([flag, count])
    submit(m, AWAIT, [flag, count], stream=1, block=(1, 1, 1))
    event = m.record(0, 1)
    with pytest.raises(Deadlock):
        m.run()
    m.wait(0, 2, event)
    submit(m, STORE, [flag], stream=2, block=(1, 1, 1))
    m.run()
    assert flag[0] == 7


def test_a_warp_that_asks_alone_and_again_is_told_with_how_often():
    m = machine([], num_sms=1)
    one = "mov.u32 %r1, %tid.x; setp.ge.u32 %p0, %r1, 32; @%p0 bra END;"
    body = one + "setmaxnreg.dec.sync.aligned.u32 40; " * 3 + "setmaxnreg.dec.sync.aligned.u32 32; END:"
    submit(m, body, [], block=(128, 1, 1))
    m.run()
    (finding,) = m.report.findings
    assert (
        "(warp 0: dec 40, 3 times then dec 32, warp 1: none, warp 2: none, warp 3: none)" in finding.message
    )
