"""Happens-before: every finding is planted, and the right kernel is silent."""

import dataclasses

import pytest

from cute_emulator.execution.launch import Machine
from cute_emulator.execution.scheduler import Schedule
from cute_emulator.machine.asyncq import MODES

from .handwritten import aligned, launch, module, run


def exchange(
    producer: str,
    consumer: str,
    ranks: int = 2,
    block: int = 32,
    smem: str = ".shared .align 128 .b8 buf[512]; .shared .align 8 .b64 bar;",
    mode: str = "immediate",
    **options,
):
    """Rank 0 (or CTA 0) runs `producer`, the other `consumer`.

    %d1 is data and %d2 a flag in the consumer's memory, %d0 the output.

    Returns:
        The kinds of the findings, their text, and the output.
    """
    out, data, flag = aligned(128), aligned(128), aligned(32)
    who = "cvt.u32.u64 %r50, %d3;" if ranks == 2 else "mov.u32 %r50, %ctaid.x;"
    body = f"""
    {who} mov.u32 %r0, %tid.x; and.b32 %r51, %r0, 31; shl.b32 %r52, %r0, 2; cvt.u64.u32 %d20, %r52;
    add.s64 %d10, %d0, %d20; add.s64 %d11, %d1, %d20;
    setp.eq.b32 %p0, %r0, 0;
    setp.ne.b32 %p9, %r50, 0;
    @%p9 bra CONSUMER;
    {producer}
    bra.uni END;
    CONSUMER:
    {consumer}
    END:
    """
    m = Machine("sm_100a", ranks=ranks, mode=mode, **options)
    for array, owner, name in ((out, ranks - 1, "out"), (data, ranks - 1, "data"), (flag, ranks - 1, "flag")):
        m.memory.register(array.ctypes.data, array.nbytes, owner, name, "symmetric")
    ptx = module(body, 4, smem)
    for rank in range(ranks):
        grid = (1, 1, 1) if ranks == 2 else (2, 1, 1)
        one = launch(ptx, [out, data, flag, rank], grid=grid, block=(block, 1, 1))
        m.submit(dataclasses.replace(one, rank=rank))
    m.run()
    findings = m.report.findings
    return {f.kind for f in findings}, "\n".join(map(str, findings)), out


WRITE = "mov.b32 %r1, 7; st.global.b32 [%d11], %r1; bar.warp.sync -1;\n"
READ = "ld.global.b32 %r3, [%d11]; st.global.b32 [%d10], %r3;\n"


def flag(op: str) -> str:
    return f"mov.b32 %r2, 1; @%p0 st.{op}.global.b32 [%d2], %r2;\n"


def wait(op: str, after: str = "") -> str:
    return f"WAIT: ld.{op}.global.b32 %r4, [%d2]; setp.eq.b32 %p1, %r4, 0; @%p1 bra WAIT; {after}\n"


RIGHT = {
    "release/acquire.sys": (WRITE + flag("release.sys"), wait("acquire.sys") + READ),
    "fences.sys": (
        WRITE + "fence.acq_rel.sys;" + flag("relaxed.sys"),
        wait("relaxed.sys", "fence.acq_rel.sys;") + READ,
    ),
    "membar.sys and volatile": (
        WRITE + "membar.sys;" + flag("volatile"),
        wait("volatile", "fence.sc.sys;") + READ,
    ),
    "relaxed spin, one acquire": (
        WRITE + flag("release.sys"),
        wait("relaxed.sys", "ld.acquire.sys.global.b32 %r4, [%d2];") + READ,
    ),
    "red.release.sys": (
        WRITE + "mov.b32 %r2, 1; @%p0 red.release.sys.global.add.u32 [%d2], %r2;",
        wait("acquire.sys") + READ,
    ),
}
WRONG = {
    "release at gpu scope": (WRITE + flag("release.gpu"), wait("acquire.sys") + READ),
    "acquire at gpu scope": (WRITE + flag("release.sys"), wait("acquire.gpu") + READ),
    "relaxed store": (WRITE + flag("relaxed.sys"), wait("acquire.sys") + READ),
    "relaxed load": (WRITE + flag("release.sys"), wait("relaxed.sys") + READ),
    "fence at gpu scope": (WRITE + "fence.acq_rel.gpu;" + flag("relaxed.sys"), wait("acquire.sys") + READ),
    "flag before data": (flag("release.sys") + WRITE, wait("acquire.sys") + READ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RIGHT)
def test_right_handoff_between_ranks_is_silent(name, mode):
    kinds, text, out = exchange(*RIGHT[name], mode=mode)
    assert not kinds, text
    assert (out[:32] == 7).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_handoff_between_ranks_is_a_race(name, mode):
    kinds, text, _ = exchange(*WRONG[name], mode=mode)
    assert kinds == {"race"}
    assert "rank 0 CTA (0, 0, 0) warp 0" in text and "rank 1 CTA (0, 0, 0) warp 0" in text and "line" in text
    if "gpu" in name:
        assert ".gpu" in text or "sufficient scope" in text


def test_data_becomes_visible_after_a_flag_of_too_small_scope():
    """The adversarial store model: no system-scope release, so the peer sees the flag and old data."""
    for name in ("release at gpu scope", "relaxed store", "fence at gpu scope"):
        _, _, out = exchange(*WRONG[name], mode="lazy")
        assert not (out[:32] == 7).any(), name
        _, _, out = exchange(*WRONG[name], mode="immediate")
        assert (out[:32] == 7).all(), name
    own = WRITE + "ld.global.b32 %r5, [%d11]; st.global.b32 [%d11+256], %r5;" + flag("release.sys")
    for mode in MODES:
        _, _, out = exchange(own, wait("acquire.sys") + READ.replace("[%d11]", "[%d11+256]"), mode=mode)
        assert (out[:32] == 7).all()


def test_a_weak_flag_is_a_race_itself():
    kinds, text, _ = exchange(
        WRITE + "mov.b32 %r2, 1; @%p0 st.global.b32 [%d2], %r2;", wait("acquire.sys") + READ
    )
    assert kinds == {"race"} and "flag of rank 1" in text


@pytest.mark.parametrize(
    ("second", "want"), [("", {"race"}), (".relaxed.gpu", {"race"}), (".relaxed.sys", set())]
)
def test_each_read_of_what_a_strong_store_overwrites_is_judged_by_its_own_strength(second, want):
    """Judges two reads of one epoch, of which the first one is strong and does not race."""
    reads = f"@%p0 ld.relaxed.sys.global.b32 %r1, [%d2]; @%p0 ld{second}.global.b32 %r2, [%d2+4];"
    store = "@%p0 st.relaxed.sys.global.v2.b32 [%d2], {%r3, %r3};"
    assert exchange(reads, store)[0] == want


@pytest.mark.parametrize(("scope", "clean"), [("gpu", True), ("sys", True), ("cta", False)])
def test_scope_between_ctas_of_one_rank(scope, clean):
    kinds, text, _ = exchange(WRITE + flag(f"release.{scope}"), wait(f"acquire.{scope}") + READ, ranks=1)
    assert (not kinds) == clean, text


HOP = """
mov.b32 %r10, bar; @%p0 mbarrier.init.shared.b64 [%r10], 32; bar.sync 0;
setp.ge.u32 %p2, %r0, 32; @%p2 bra SECOND;
mov.b32 %r1, 7; st.global.b32 [%d11], %r1;
{arrive}
bra.uni END;
SECOND:
{wait}
setp.eq.b32 %p3, %r51, 0; mov.b32 %r2, 1; @%p3 st.release.sys.global.b32 [%d2], %r2;
"""
TWO_WARPS = wait("acquire.sys") + "setp.lt.u32 %p2, %r0, 32; @%p2 ld.global.b32 %r3, [%d11];"


@pytest.mark.parametrize(
    ("arrive", "waits", "clean"),
    [
        (
            "mbarrier.arrive.shared.b64 %d9, [%r10];",
            "W2: mbarrier.try_wait.parity.shared.b64 %p4, [%r10], 0; @!%p4 bra W2;",
            True,
        ),
        ("bar.arrive 1, 64;", "bar.sync 1, 64;", True),
        ("", "", False),
        (
            "mbarrier.arrive.relaxed.cta.shared.b64 %d9, [%r10];",
            "W2: mbarrier.try_wait.parity.shared.b64 %p4, [%r10], 0; @!%p4 bra W2;",
            False,
        ),
    ],
)
def test_data_of_one_warp_flagged_by_another(arrive, waits, clean):
    kinds, text, _ = exchange(HOP.format(arrive=arrive, wait=waits), TWO_WARPS, block=64)
    assert (not kinds) == clean, text


BULK = """
mov.b32 %r10, buf; add.s32 %r11, %r10, %r52; mov.b32 %r1, 7; st.shared.b32 [%r11], %r1;
{fence}
bar.warp.sync -1;
@!%p0 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 128;
cp.async.bulk.commit_group;
{wait}
mov.b32 %r2, 1; st.release.sys.global.b32 [%d2], %r2;
cp.async.bulk.wait_group 0;
DONE:
"""
FENCE = "fence.proxy.async.shared::cta;"
FULL = "cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize("mode", MODES)
def test_bulk_store_then_full_wait_then_flag_is_silent(mode):
    kinds, text, out = exchange(BULK.format(fence=FENCE, wait=FULL), wait("acquire.sys") + READ, mode=mode)
    assert not kinds, text
    assert (out[:32] == 7).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("waits", ["cp.async.bulk.wait_group.read 0;", "", "cp.async.bulk.wait_group 1;"])
def test_flag_before_the_bulk_store_is_complete_is_a_race(waits, mode):
    kinds, text, out = exchange(BULK.format(fence=FENCE, wait=waits), wait("acquire.sys") + READ, mode=mode)
    assert kinds == {"race"} and "full wait_group" in text
    assert mode != "lazy" or not (out[:32] == 7).any()


@pytest.mark.parametrize("mode", MODES)
def test_missing_proxy_fence_before_a_bulk_store(mode):
    kinds, text, _ = exchange(BULK.format(fence="", wait=FULL), wait("acquire.sys") + READ, mode=mode)
    assert kinds == {"proxy-fence"} and "warp 0 wrote" in text


def test_proxy_fence_by_the_issuing_thread_after_a_barrier_is_enough():
    late = BULK.format(fence="bar.sync 0;", wait=FULL).replace("@!%p0 bra DONE;", f"@!%p0 bra DONE; {FENCE}")
    kinds, text, _ = exchange(late, wait("acquire.sys") + READ, block=32)
    assert not kinds, text


LOAD = """
mov.b32 %r10, bar; mov.b32 %r11, buf;
@%p0 mbarrier.init.shared.b64 [%r10], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
{wait}
{fence}
@%p0 mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 128;
@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r11], [%d1], 128, [%r10];
W2: mbarrier.try_wait.parity.shared.b64 %p4, [%r10], 0; @!%p4 bra W2;
add.s32 %r12, %r11, %r52; ld.shared.b32 %r3, [%r12]; st.global.b32 [%d10], %r3;
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("fence", "where", "want"),
    [
        ("fence.proxy.async.global;", "consumer", set()),
        ("fence.proxy.async;", "producer", set()),
        ("", "consumer", {"proxy-fence"}),
    ],
)
def test_generic_writes_read_by_a_bulk_copy_need_a_proxy_fence(fence, where, want, mode):
    producer = WRITE + (fence if where == "producer" else "") + flag("release.sys")
    load = LOAD.format(wait=wait("acquire.sys"), fence=fence if where == "consumer" else "")
    kinds, text, out = exchange(producer, load, mode=mode)
    assert kinds == want, text
    assert (out[:32] == 7).all()


def test_overwriting_what_a_peer_still_reads_is_a_race():
    """Single buffer, no acknowledgement: the second round of writes races with the reads of the first."""
    again = "mov.b32 %r1, 9; st.global.b32 [%d11], %r1;"
    kinds, text, _ = exchange(WRITE + flag("release.sys") + again, wait("acquire.sys") + READ)
    assert kinds == {"race"} and ("read by" in text or "read of" in text)
    acknowledge = "bar.warp.sync -1; mov.b32 %r5, 1; @%p0 st.release.sys.global.b32 [%d2+64], %r5;"
    acknowledged = wait("acquire.sys").replace("%d2", "%d2+64").replace("WAIT", "ACK")
    kinds, text, _ = exchange(
        WRITE + flag("release.sys") + acknowledged + again, wait("acquire.sys") + READ + acknowledge
    )
    assert not kinds, text


def test_atomics_at_gpu_scope_across_ranks_are_reported():
    add = "mov.b32 %r1, 1; @%p0 atom.{}.global.add.u32 %r2, [%d2], %r1;"
    kinds, text, _ = exchange(add.format("relaxed.gpu"), add.format("relaxed.gpu"))
    assert kinds == {"race"} and ".gpu scope" in text
    kinds, text, _ = exchange(add.format("relaxed.sys"), add.format("relaxed.sys"))
    assert not kinds, text


def test_neighbouring_elements_of_different_ctas_are_no_race():
    mine = "add.s64 %d12, %d1, 4; mov.b32 %r1, 1; @%p0 st.global.b32 [{}], %r1;"
    kinds, text, _ = exchange(mine.format("%d1"), mine.format("%d12"), ranks=1)
    assert not kinds, text
    mine = "add.s64 %d12, %d1, 1; mov.b32 %r1, 1; @%p0 st.global.b8 [{}], %r1;"
    kinds, text, _ = exchange(mine.format("%d1"), mine.format("%d12"), ranks=1)
    assert not kinds, text


def test_launches_of_one_stream_are_ordered_and_of_two_ranks_are_not():
    data = aligned(32)
    body = "mov.u32 %r0, %tid.x; mul.wide.u32 %d5, %r0, 4; add.s64 %d5, %d5, %d0; st.global.b32 [%d5], %r0;"
    for ranks, clean in (((0, 0), True), ((0, 1), False)):
        m = Machine("sm_100a", ranks=2)
        m.memory.register(data.ctypes.data, data.nbytes, 0, "data")
        for rank in ranks:
            m.submit(dataclasses.replace(launch(module(body, 1), [data]), rank=rank))
        m.run()
        assert m.report.ok == clean
        before = len(m.report.findings)
        m.submit(dataclasses.replace(launch(module(body, 1), [data]), rank=1))
        m.run()
        assert len(m.report.findings) == before


def test_findings_do_not_depend_on_the_schedule():
    for seed in range(5):
        kinds, _, _ = exchange(
            *WRONG["relaxed store"], schedule=Schedule(order="random", lanes=True), seed=seed, mode="random"
        )
        assert kinds == {"race"}
        kinds, text, _ = exchange(
            *RIGHT["fences.sys"], schedule=Schedule(order="random", lanes=True), seed=seed, mode="random"
        )
        assert not kinds, text


def test_checks_can_be_turned_off():
    kinds, _, _ = exchange(*WRONG["relaxed store"], checks=("exit",))
    assert not kinds


@pytest.mark.parametrize("waits", [True, False])
def test_knowledge_passes_through_the_launches_of_a_stream(waits):
    """Rank 0 reads, then sends a flag; rank 1 waits for it, then overwrites: each step is a launch."""
    data, flag_word, out = aligned(32), aligned(32), aligned(32)
    address = "mov.u32 %r0, %tid.x; setp.eq.b32 %p0, %r0, 0; mul.wide.u32 %d20, %r0, 4;"
    address += "add.s64 %d11, %d1, %d20; add.s64 %d10, %d0, %d20;"
    bodies = [(0, READ), (0, flag("release.sys")), (1, wait("acquire.sys") if waits else ""), (1, WRITE)]
    m = Machine("sm_100a", ranks=2)
    for array, name in ((out, "out"), (data, "data"), (flag_word, "flag")):
        m.memory.register(array.ctypes.data, array.nbytes, 0, name, "symmetric")
    for rank, body in bodies:
        one = launch(module(address + body, 3), [out, data, flag_word])
        m.submit(dataclasses.replace(one, rank=rank))
    m.run()
    assert m.report.ok == waits, m.report.findings


SECOND = "add.s64 %d12, %d11, 256; mov.b32 %r1, 8; st.global.b32 [%d12], %r1; bar.warp.sync -1;\n"
READ_SECOND = "ld.global.b32 %r3, [%d11+256]; st.global.b32 [%d10], %r3;\n"
FENCE_SYS = "fence.acq_rel.sys;"


def flags(between: str, second: str = "st.relaxed.sys") -> tuple[str, str]:
    """Data, fence, flag; more data, `between`, second flag. The consumer has a fence after each wait."""
    one, two = (
        flag("relaxed.sys"),
        flag("relaxed.sys").replace("%d2]", "%d2+64]").replace("st.relaxed.sys", second),
    )
    if second.startswith("red"):
        two = two.replace(".global.b32", ".global.add.u32")
    waits = wait("relaxed.sys", FENCE_SYS) + READ
    waits += wait("relaxed.sys", FENCE_SYS).replace("WAIT", "AGAIN").replace("%d2]", "%d2+64]") + READ_SECOND
    return WRITE + FENCE_SYS + one + SECOND + between + two, waits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second", ["st.relaxed.sys", "st.volatile", "red.relaxed.sys"])
def test_a_fence_covers_only_what_lies_before_it(second, mode):
    """The warp has executed a fence, but not since the data of the second flag: that data is not released."""
    kinds, text, _ = exchange(*flags("", second), mode=mode)
    assert kinds == {"race"} and text.count("after it was") == 1, text
    kinds, text, out = exchange(*flags(FENCE_SYS, second), mode=mode)
    assert not kinds, text
    assert (out[:32] == 8).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("between", ["", FENCE_SYS])
def test_a_fence_is_no_release_of_reads_behind_it(between, mode):
    """The consumer reads after its fence and says so by a relaxed store: what it read is overwritten."""
    acknowledge = "bar.warp.sync -1; mov.b32 %r5, 1; @%p0 st.relaxed.sys.global.b32 [%d2+64], %r5;"
    acknowledged = wait("acquire.sys").replace("%d2", "%d2+64").replace("WAIT", "ACK")
    again = "mov.b32 %r1, 9; st.global.b32 [%d11], %r1;"
    kinds, text, _ = exchange(
        WRITE + flag("release.sys") + acknowledged + again,
        wait("relaxed.sys", FENCE_SYS) + READ + between + acknowledge,
        mode=mode,
    )
    assert kinds == set() if between else kinds == {"race"}, text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("release", [FENCE_SYS + flag("relaxed.sys"), flag("release.sys")])
def test_who_observes_a_flag_may_reset_it_by_an_ordinary_store(release, mode):
    reset = "mov.b32 %r5, 0; @%p0 st.global.b32 [%d2], %r5;"
    kinds, text, _ = exchange(WRITE + release, wait("acquire.sys") + READ + reset, mode=mode)
    assert not kinds, text
    count = "mov.b32 %r2, 1; @%p0 atom.relaxed.sys.global.add.u32 %r6, [%d2], %r2;"
    kinds, text, _ = exchange(WRITE + FENCE_SYS + count, wait("acquire.sys") + READ + reset, mode=mode)
    assert not kinds, text


WITHIN = """
mov.b32 %r10, buf; shl.b32 %r11, %r51, 2; add.s32 %r11, %r10, %r11;
mov.b32 %r1, 0; @%p0 st.shared.b32 [%r10+256], %r1; bar.sync 0;
setp.ge.u32 %p2, %r0, 32; @%p2 bra SECOND;
fence.acq_rel.cta;
st.shared.b32 [%r11], %r0; bar.warp.sync -1; {late}
mov.b32 %r2, 1; @%p0 st.relaxed.cta.shared.b32 [%r10+256], %r2;
bra.uni END;
SECOND:
POLL: ld.acquire.cta.shared.b32 %r4, [%r10+256]; setp.eq.b32 %p1, %r4, 0; @%p1 bra POLL;
ld.shared.b32 %r3, [%r11]; st.shared.b32 [%r10+256], %r1; st.global.b32 [%d10], %r3;
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("late", "want"), [("fence.acq_rel.cta;", set()), ("", {"shared-race"})])
def test_a_fence_covers_only_what_lies_before_it_in_shared_memory(late, want, mode):
    kinds, text, _ = exchange(WITHIN.format(late=late), "", ranks=1, block=64, mode=mode)
    assert kinds == want, text


@pytest.mark.parametrize("fence", ["fence.acq_rel.gpu;", ""])
def test_the_last_of_many_ctas_to_count_observes_all_of_them(fence):
    parts, count = aligned(80), aligned(32)
    body = f"""
    mov.u32 %r0, %ctaid.x; mul.wide.u32 %d4, %r0, 4; add.s64 %d4, %d0, %d4; st.global.u32 [%d4], %r0;
    {fence} atom.global.add.u32 %r1, [%d1], 1; setp.ne.u32 %p0, %r1, 79; @%p0 bra END;
    fence.acq_rel.gpu; mov.u32 %r4, 0;
    L: mul.wide.u32 %d6, %r4, 4; add.s64 %d6, %d0, %d6; ld.global.u32 %r5, [%d6];
    add.u32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 80; @%p1 bra L;
    END:
    """
    m = run(body, [parts, count], grid=(80, 1, 1), block=(1, 1, 1))
    assert count[0] == 80 and {f.kind for f in m.report.findings} == (set() if fence else {"race"})


@pytest.mark.parametrize("fence", ["fence.acq_rel.gpu;", ""])
def test_a_fence_after_many_relaxed_loads_acquires_all_of_them(fence):
    """Checks a CTA that waits for the flags of all others, and reads their parts after one fence."""
    parts, flags = aligned(300), aligned(300)
    body = f"""
    mov.u32 %r0, %ctaid.x; mul.wide.u32 %d4, %r0, 4; add.s64 %d5, %d1, %d4; add.s64 %d4, %d0, %d4;
    setp.eq.u32 %p0, %r0, 299; @%p0 bra WAIT;
    st.global.u32 [%d4], %r0; fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%d5], 1; bra END;
    WAIT: mov.u32 %r4, 0;
    N: mul.wide.u32 %d6, %r4, 4; add.s64 %d6, %d1, %d6;
    S: ld.relaxed.gpu.global.u32 %r5, [%d6]; setp.ne.u32 %p1, %r5, 1; @%p1 bra S;
    add.u32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 299; @%p1 bra N;
    {fence} mov.u32 %r4, 0;
    L: mul.wide.u32 %d6, %r4, 4; add.s64 %d6, %d0, %d6; ld.global.u32 %r5, [%d6];
    add.u32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 299; @%p1 bra L;
    END:
    """
    m = run(body, [parts, flags], grid=(300, 1, 1), block=(1, 1, 1))
    assert {f.kind for f in m.report.findings} == (set() if fence else {"race"})
