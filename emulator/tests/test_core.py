"""Control flow, memory, barriers and scheduling on hand-written PTX."""

import numpy as np
import pytest

from cute_emulator.errors import (
    Deadlock,
    EmulatorError,
    KernelTrap,
    MemoryFault,
    UnsupportedInstruction,
)
from cute_emulator.execution.launch import Machine
from cute_emulator.execution.scheduler import Schedule

from .handwritten import LANE_OUT, launch, machine, module, run

RANDOM = Schedule(order="random", lanes=True)
SCHEDULES = [Schedule(), Schedule(order="random"), RANDOM]
STORE = LANE_OUT.format(size=4) + "st.global.b32 [%d30], %r1;\n"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_divergent_loop_reconverges(schedule):
    """Each lane loops lane+1 times; a shuffle afterwards needs all of them."""
    out = np.zeros(32, np.uint32)
    body = """
    mov.u32 %r0, %tid.x;
    mov.b32 %r1, 0; mov.b32 %r2, 0;
    LOOP:
    add.s32 %r1, %r1, %r0;
    add.s32 %r2, %r2, 1;
    setp.le.u32 %p0, %r2, %r0;
    @%p0 bra LOOP;
    shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;
    add.s32 %r1, %r1, %r3;
    """
    run(body + STORE, [out], schedule=schedule)
    lane = np.arange(32)
    total = lane * (lane + 1)
    np.testing.assert_array_equal(out, total + total[lane ^ 1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_if_else_merges_registers_of_both_sides(schedule):
    out = np.zeros(32, np.uint32)
    body = """
    mov.u32 %r0, %tid.x;
    mov.b32 %r1, 7; mov.b32 %r4, 1000;
    setp.lt.u32 %p0, %r0, 5;
    @%p0 bra THEN;
    add.s32 %r1, %r0, %r4;
    add.s32 %r4, %r4, 1;
    bra.uni JOIN;
    THEN:
    mul.lo.s32 %r1, %r0, 3;
    JOIN:
    add.s32 %r1, %r1, %r4;
    """
    run(body + STORE, [out], schedule=schedule)
    lane = np.arange(32)
    np.testing.assert_array_equal(out, np.where(lane < 5, lane * 3 + 1000, lane + 1000 + 1001))


def test_guarded_instructions_touch_only_their_lanes():
    out = np.full(32, 9, np.uint32)
    body = (
        LANE_OUT.format(size=4)
        + """
    mov.u32 %r0, %tid.x;
    and.b32 %r2, %r0, 1;
    setp.eq.b32 %p0, %r2, 1;
    mov.b32 %r1, 100;
    @%p0 add.s32 %r1, %r1, %r0;
    setp.lt.u32 %p1, %r0, 30;
    @%p1 st.global.b32 [%d30], %r1;
    """
    )
    run(body, [out])
    lane = np.arange(32)
    want = np.where(lane % 2, 100 + lane, 100)
    want[30:] = 9
    np.testing.assert_array_equal(out, want)


def test_brx_idx_branches_by_table():
    out = np.zeros(32, np.uint32)
    body = """
    mov.u32 %r0, %tid.x;
    and.b32 %r2, %r0, 3;
    TABLE: .branchtargets L0, L1, L2, L1;
    brx.idx %r2, TABLE;
    L0: mov.b32 %r1, 10; bra.uni DONE;
    L1: mov.b32 %r1, 11; bra.uni DONE;
    L2: mov.b32 %r1, 12;
    DONE:
    """
    run(body + STORE, [out])
    np.testing.assert_array_equal(out, np.array([10, 11, 12, 11])[np.arange(32) % 4])


FUNCTION = """
.func (.param .b32 out) twice_plus(.param .b32 a, .param .b64 b)
{
    .reg .b32 %r<4>; .reg .b64 %d<2>;
    ld.param.b32 %r0, [a]; ld.param.b64 %d0, [b]; cvt.u32.u64 %r1, %d0;
    add.s32 %r2, %r0, %r0; add.s32 %r2, %r2, %r1;
    st.param.b32 [out], %r2;
    ret;
}
"""


@pytest.mark.parametrize("indirect", [False, True])
def test_calls_direct_and_through_a_register(indirect):
    out = np.zeros(32, np.uint32)
    target = "call (res), %d9, (p0, p1), proto;" if indirect else "call.uni (res), twice_plus, (p0, p1);"
    body = f"""
    mov.u32 %r0, %tid.x;
    mov.b64 %d8, 5;
    mov.b64 %d9, twice_plus;
    {{ .param .b32 p0; .param .b64 p1; .param .b32 res;
    st.param.b32 [p0], %r0; st.param.b64 [p1], %d8;
    proto: .callprototype (.param .b32 _) _ (.param .b32 _, .param .b64 _);
    {target}
    ld.param.b32 %r1, [res]; }}
    """
    run(body + STORE, [out], head=FUNCTION)
    np.testing.assert_array_equal(out, 2 * np.arange(32) + 5)


def test_local_memory_and_printf():
    out = np.zeros(32, np.uint32)
    body = (
        """
    mov.u32 %r0, %tid.x;
    mov.b64 %d5, buffer; cvta.local.u64 %d6, %d5;
    st.local.b32 [%d5+4], %r0;
    ld.b32 %r1, [%d6+4];
    setp.ne.b32 %p0, %r0, 3;
    """
        + STORE
        + """
    @%p0 bra END;
    st.local.b32 [%d5], %r1;
    { .param .b64 p0; .param .b64 p1; .param .b32 res;
    mov.b64 %d7, text; st.param.b64 [p0], %d7; st.param.b64 [p1], %d6;
    call.uni (res), vprintf, (p0, p1); }
    END:
    """
    )
    head = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
    head += ".global .align 1 .b8 text[9] = {108, 97, 110, 101, 32, 37, 100, 10, 0};\n"
    m = run(body, [out], smem=".local .align 8 .b8 buffer[16];", head=head)
    np.testing.assert_array_equal(out, np.arange(32))
    assert m.report.output == ["lane 3\n"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bar_sync_orders_shared_memory_between_warps(schedule):
    out = np.zeros(128, np.uint32)
    body = """
    mov.u32 %r0, %tid.x;
    shl.b32 %r2, %r0, 2; mov.b32 %r3, buf; add.s32 %r2, %r2, %r3;
    mul.lo.s32 %r4, %r0, 3;
    st.shared.b32 [%r2], %r4;
    bar.sync 0;
    sub.s32 %r5, 127, %r0; shl.b32 %r5, %r5, 2; add.s32 %r5, %r5, %r3;
    ld.shared.b32 %r1, [%r5];
    """
    run(body + STORE, [out], smem=".shared .align 4 .b8 buf[512];", block=(128, 1, 1), schedule=schedule)
    np.testing.assert_array_equal(out, 3 * np.arange(128)[::-1])


def test_named_barriers_with_counts_and_arrive():
    """Warp 1 arrives, warp 0 waits for 64 threads."""
    out = np.zeros(64, np.uint32)
    body = """
    mov.u32 %r0, %tid.x;
    mov.b32 %r1, 0;
    setp.ge.u32 %p0, %r0, 32;
    @%p0 bra W1;
    bar.sync 3, 64;
    ld.shared.b32 %r1, [buf];
    bra.uni END;
    W1: mov.b32 %r2, 42; st.shared.b32 [buf], %r2; bar.arrive 3, 64;
    END:
    """
    run(body + STORE, [out], smem=".shared .align 4 .b8 buf[4];", block=(64, 1, 1))
    np.testing.assert_array_equal(out, np.repeat([42, 0], 32))


SPIN = """
mov.u32 %r0, %ctaid.x;
setp.ne.b32 %p0, %r0, 0;
@%p0 bra WRITER;
WAIT: ld.acquire.gpu.global.b32 %r1, [%d1];
setp.eq.b32 %p1, %r1, 0;
@%p1 bra WAIT;
st.global.b32 [%d0], %r1;
bra.uni END;
WRITER: {write}
END:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_spin_loop_is_parked_until_the_flag_is_written(schedule):
    out, flag = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    body = SPIN.format(write="mov.b32 %r2, 5; st.release.gpu.global.b32 [%d1], %r2;")
    m = run(body, [out, flag], grid=(2, 1, 1), schedule=schedule)
    assert out[0] == 5
    assert m.report.instructions < 200


def test_a_flag_that_never_comes_is_a_deadlock_naming_the_line():
    out, flag = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    with pytest.raises(Deadlock, match=r"CTA \(0, 0, 0\) warp 0.*ld.acquire.*waits for a change at global"):
        run(SPIN.format(write="mov.b32 %r2, 5;"), [out, flag], grid=(2, 1, 1))


def test_a_deadlock_says_whose_memory_a_flag_is_in_and_what_was_found_there():
    """A flag that was never set to where it begins is the commonest mistake."""
    out, flag = np.zeros(1, np.uint32), np.array([0xFFFFFFFF], np.uint32)
    body = SPIN.replace("%r1, 0;", "%r1, -1;").format(write="mov.b32 %r2, 5;")
    with pytest.raises(Deadlock) as error:
        run(body, [out, flag], grid=(2, 1, 1))
    at = flag.ctypes.data
    assert f"global {at:#x} of array 1 of rank 0 [{at:#x}, {at + 4:#x}), read 0xffffffff" in str(error.value)


def test_a_spin_loop_with_a_counter_ends_by_itself():
    out, flag = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    body = """
    mov.b32 %r1, 0;
    WAIT: ld.relaxed.sys.global.b32 %r2, [%d1];
    add.s32 %r1, %r1, 1;
    setp.eq.b32 %p0, %r2, 0;
    setp.lt.u32 %p1, %r1, 3000;
    and.pred %p0, %p0, %p1;
    @%p0 bra WAIT;
    """
    run(body + STORE, [out, flag])
    assert (out == 3000).all()


def test_a_wait_bounded_by_the_global_timer_traps():
    flag = np.zeros(1, np.uint32)
    body = """
    mov.u64 %d5, %globaltimer; add.s64 %d5, %d5, 30000000000;
    WAIT: ld.relaxed.sys.global.b32 %r2, [%d0];
    setp.ne.b32 %p0, %r2, 0;
    @%p0 bra END;
    mov.u64 %d6, %globaltimer; setp.lt.u64 %p1, %d6, %d5;
    @%p1 bra WAIT;
    trap;
    END:
    """
    with pytest.raises(KernelTrap, match="trap in lane"):
        run(body, [flag])


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (
            "mov.b32 %r1, 1; st.global.b32 [%d0+128], %r1;",
            "out of bounds: 4 bytes at .* 4 bytes? beyond|out of bounds",
        ),
        ("ld.global.b32 %r1, [%d0+2];", "not a multiple of 4"),
        ("mov.b64 %d5, 16; ld.global.b32 %r1, [%d5];", "out of bounds"),
        ("mov.b32 %r1, 1; mov.b32 %r2, 4096; st.shared.b32 [%r2], %r1;", "shared memory overflow"),
        ("mov.b32 %r2, 1026; ld.shared.b32 %r1, [%r2];", "not a multiple of 4"),
        (
            "mov.u32 %r0, %tid.x; mul.wide.u32 %d5, %r0, 8; add.s64 %d5, %d5, %d0; ld.global.b32 %r1, [%d5];",
            "out of",
        ),
    ],
)
def test_faults_are_reported_with_line_and_instruction(body, match):
    with pytest.raises(MemoryFault, match=match) as caught:
        run(body, [np.zeros(32, np.uint32)])
    assert "line 10" in str(caught.value) and "warp 0" in str(caught.value)


def test_use_after_free_is_reported():
    a = np.zeros(4, np.uint32)
    m = machine([a])
    m.memory.unregister(a.ctypes.data)
    m.submit(launch(module("ld.global.b32 %r1, [%d0];", 1), [a]))
    with pytest.raises(MemoryFault, match="use after free.*array 0"):
        m.run()


def test_an_unsupported_instruction_raises_only_when_executed():
    body = "setp.eq.b64 %p0, %d0, 0; @%p0 bra SKIP; fns.b32 %r1, %r2, %r3, %r4; SKIP:"
    run(body, [0])
    with pytest.raises(UnsupportedInstruction, match=r"line 10.*fns.b32"):
        run(body, [1])


MBARRIER = """
mov.u32 %r0, %tid.x;
mov.b32 %r10, bar;
setp.eq.b32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [%r10], {count};
bar.sync 0;
setp.lt.u32 %p1, %r0, 32;
@%p1 bra CONSUMER;
st.shared.b32 [buf], %r0;
{arrive}
bra.uni END;
CONSUMER:
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0;
@!%p2 bra WAIT;
ld.shared.b32 %r1, [buf];
END:
"""
SMEM = ".shared .align 8 .b64 bar; .shared .align 4 .b8 buf[4];"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_mbarrier_hands_over_between_warps(schedule):
    out = np.zeros(64, np.uint32)
    body = MBARRIER.format(count=32, arrive="mbarrier.arrive.shared.b64 %d9, [%r10];")
    run(body + STORE, [out], smem=SMEM, block=(64, 1, 1), schedule=schedule)
    assert (out[:32] >= 32).all()


def test_mbarrier_over_arrival_and_missing_arrival():
    out = np.zeros(64, np.uint32)
    arrive = "mbarrier.arrive.shared.b64 %d9, [%r10];"
    with pytest.raises(EmulatorError, match="over-arrival"):
        twice = "mbarrier.arrive.shared.b64 %d9, [%r10], 2;"
        run(MBARRIER.format(count=33, arrive=twice) + STORE, [out], smem=SMEM, block=(64, 1, 1))
    with pytest.raises(Deadlock, match="1 of 33 arrivals pending"):
        run(MBARRIER.format(count=33, arrive=arrive) + STORE, [out], smem=SMEM, block=(64, 1, 1))


def test_missing_bar_warp_sync_shows_only_with_random_lane_groups():
    """Lane 0 writes after a divergent branch, the others read: without bar.warp.sync the order is open."""
    text = """
    mov.u32 %r0, %tid.x;
    setp.ne.b32 %p0, %r0, 0;
    @%p0 bra JOIN;
    mov.b32 %r2, 77; st.shared.b32 [buf], %r2;
    JOIN:
    {sync}
    ld.shared.b32 %r1, [buf];
    """
    smem = ".shared .align 4 .b8 buf[4];"

    def results(sync: str, schedule: Schedule) -> set[int]:
        found = set()
        for seed in range(6):
            out = np.zeros(32, np.uint32)
            run(text.format(sync=sync) + STORE, [out], smem=smem, schedule=schedule, seed=seed)
            found |= set(out.tolist())
        return found

    assert results("bar.warp.sync -1;", RANDOM) == {77}
    assert results("", Schedule()) == {77}
    assert results("", RANDOM) == {77, 0xFFFFFFFF}


def test_cluster_barrier_and_distributed_shared_memory():
    out = np.zeros(64, np.uint32)
    body = """
    mov.u32 %r0, %tid.x; mov.u32 %r4, %cluster_ctarank;
    add.s32 %r5, %r4, 100;
    st.shared.b32 [buf], %r5;
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    xor.b32 %r6, %r4, 1; mov.b32 %r7, buf;
    mapa.shared::cluster.u32 %r8, %r7, %r6;
    ld.shared::cluster.b32 %r1, [%r8];
    mov.u32 %r9, %ctaid.x; shl.b32 %r9, %r9, 5; add.s32 %r9, %r9, %r0;
    mul.wide.u32 %d5, %r9, 4; add.s64 %d5, %d5, %d0; st.global.b32 [%d5], %r1;
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    """
    run(body, [out], smem=".shared .align 4 .b8 buf[4];", grid=(2, 1, 1), cluster=(2, 1, 1))
    np.testing.assert_array_equal(out, np.repeat([101, 100], 32))


def test_more_ctas_than_fit_run_in_turn_and_a_spin_between_them_deadlocks():
    out, flag = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    body = SPIN.format(write="mov.b32 %r2, 5; st.release.gpu.global.b32 [%d1], %r2;")
    with pytest.raises(Deadlock):
        run(body, [out, flag], grid=(2, 1, 1), num_sms=1, dynamic_smem=120_000)


def test_starved_rank_runs_only_when_no_other_can():
    order = np.zeros(3, np.uint32)
    body = "mov.b32 %r1, 1; atom.global.add.u32 %r2, [%d0], %r1; mul.wide.u32 %d5, %r2, 4;"
    body += "add.s64 %d5, %d5, %d0; cvt.u32.u64 %r3, %d1; st.global.b32 [%d5+4], %r3;"
    m = Machine("sm_100a", ranks=2, schedule=Schedule(starved=lambda rank, cta, warp: rank == 0))
    m.memory.register(order.ctypes.data, order.nbytes)
    for rank in (0, 1):
        ptx = module(body, 2)
        one = launch(ptx, [order, 10 + rank], block=(1, 1, 1))
        m.submit(type(one)(**{**one.__dict__, "rank": rank}))
    m.run()
    np.testing.assert_array_equal(order, [2, 11, 10])


def test_launches_of_one_stream_run_in_order():
    out = np.ones(32, np.uint32)
    body = LANE_OUT.format(size=4) + "ld.global.b32 %r1, [%d30]; mul.lo.s32 %r1, %r1, 3; add.s32 %r1, %r1, 1;"
    m = machine([out])
    for _ in range(3):
        m.submit(launch(module(body + "st.global.b32 [%d30], %r1;", 1), [out]))
    m.run()
    assert (out == 40).all()


def test_a_seed_fixes_the_run():
    def trace(seed: int) -> list[int]:
        out, flag = np.zeros(64, np.uint32), np.zeros(1, np.uint32)
        body = "mov.b32 %r1, 1; atom.global.add.u32 %r1, [%d1], %r1;" + STORE
        run(body, [out, flag], block=(64, 1, 1), schedule=Schedule(order="random"), seed=seed)
        return out.tolist()

    assert trace(1) == trace(1)
    assert len({tuple(trace(s)) for s in range(8)}) > 1


@pytest.mark.parametrize("lanes", [32, 5])
def test_a_negative_immediate_is_stored_as_its_pattern(lanes):
    out = np.zeros(64, np.uint32)
    body = f"""
    mov.u32 %r0, %tid.x; setp.ge.u32 %p0, %r0, {lanes}; @%p0 bra END;
    mul.wide.u32 %d10, %r0, 8; add.s64 %d11, %d0, %d10;
    st.global.b32 [%d11], -1; st.global.v2.b16 [%d11+4], {{-2, 3}};
    END:
    """
    run(body, [out])
    np.testing.assert_array_equal(out[: 2 * lanes].reshape(-1, 2), [[0xFFFFFFFF, 0x3FFFE]] * lanes)
    assert not out[2 * lanes :].any()


def test_an_endless_loop_ends_at_the_limit_and_says_where():
    out = np.zeros(1, np.uint32)
    with pytest.raises(
        EmulatorError, match=r"no end after [0-9,]+ warp instructions(?s:.*)line \d+: add.s32"
    ):
        run("L: add.s32 %r1, %r1, 1; bra L;", [out], limit=1000)
