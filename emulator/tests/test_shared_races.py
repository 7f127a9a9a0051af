"""Planted races on shared and tensor memory, each found in every mode, each absent where it is fixed."""

import numpy as np
import pytest

from cute_emulator.machine.asyncq import MODES

from .handwritten import aligned, run

SETUP = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; mov.b32 %r10, bar; mov.b32 %r11, buf; and.b32 %r2, %r0, 31;
setp.eq.b32 %p0, %r0, 0; setp.eq.b32 %p1, %r1, 0; setp.eq.b32 %p2, %r1, 1; setp.eq.b32 %p3, %r2, 0;
shl.b32 %r3, %r2, 4; add.s32 %r3, %r3, %r11;
mul.wide.u32 %d5, %r0, 4; add.s64 %d6, %d0, %d5; add.s64 %d7, %d1, %d5;
"""
SMEM = ".shared .align 8 .b64 bar; .shared .align 8 .b64 bar2; .shared .align 128 .b8 buf[1024];"
INIT = "@%p0 mbarrier.init.shared.b64 [%r10], 1; @%p0 fence.mbarrier_init.release.cluster; bar.sync 0;"
LOAD = """
@%p0 mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 256;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r11], [%d0], 256, [%r10];
"""
AWAIT = "mov.b32 %r4, 0; W: mbarrier.try_wait.parity.shared.b64 %p4, [%r10], %r4; @!%p4 bra W;"
WRITE, READ = "st.shared.b32 [%r3], %r0;", "ld.shared.b32 %r5, [%r3]; st.global.b32 [%d7], %r5;"
PAIR = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
PEER = "mov.u32 %r7, %cluster_ctarank; xor.b32 %r7, %r7, 1; mapa.shared::cluster.u32 %r8, %r10, %r7;"
SLOW = "mov.b32 %r20, 0; S: add.s32 %r20, %r20, 1; setp.lt.s32 %p5, %r20, 300; @%p5 bra S;"
ALLOC = """
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r11], 32; {alloc}
ld.shared.b32 %r6, [%r11]; shl.b32 %r7, %r1, 21; add.s32 %r7, %r7, %r6;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r5}}, [%r7]; tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync; {done}
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32;
"""

# name: kind of the finding, launch, kernel with the mend at {}, mend
PLANTED = {
    "a copy is awaited with a barrier": (
        "shared-race", {}, INIT + LOAD + "{} bar.sync 0; @%p2 " + READ.split(";")[0] + ";", AWAIT,
    ),
    "a copy is awaited by another warp that tells nobody": (
        "shared-race", {}, INIT + LOAD + "@%p1 bra D; ld.shared.b32 %r5, [%r3]; bra X; D: {} X:", "",
    ),
    "no barrier between a write and a read": (
        "shared-race", {}, "@%p1 " + WRITE + "{} @%p2 ld.shared.b32 %r5, [%r3];", "bar.sync 0;",
    ),
    "no barrier between a read and a write": (
        "shared-race", {}, "@%p1 " + WRITE + "bar.sync 0; @%p2 ld.shared.b32 %r5, [%r3]; {} @%p1 " + WRITE,
        "bar.sync 0;",
    ),
    "one word, no barrier": (
        "shared-race", {}, "@%p0 st.shared.b32 [%r11], %r0; {} ld.shared.b32 %r5, [%r11];", "bar.sync 0;",
    ),
    "a byte of one word, no barrier": (
        "shared-race", {}, "@%p0 st.shared.b32 [%r11], %r0; {} ld.shared.u8 %r5, [%r11+1];", "bar.sync 0;",
    ),
    "the word of one byte, no barrier": (
        "shared-race", {}, "@%p0 st.shared.u8 [%r11+3], %r0; {} ld.shared.b32 %r5, [%r11];", "bar.sync 0;",
    ),
    "upper halves of lanes' words, one of them stored": (
        "shared-race", {}, "@%p0 st.shared.b32 [%r11], %r0; {} @%p2 ld.shared.u16 %r5, [%r3+2];",
        "bar.sync 0;",
    ),
    "a stage is filled before its readers released it": (
        "shared-race", {}, INIT + "@%p2 " + WRITE + "@%p2 ld.shared.b32 %r5, [%r3]; {}" + LOAD + AWAIT,
        "fence.proxy.async.shared::cta; bar.sync 0;",
    ),
    "an arrival goes ahead of the write that it announces": (
        "shared-race", {}, INIT + """
        @%p2 bra C; {}
        @%p0 mbarrier.arrive.shared.b64 %d9, [%r10]; st.shared.b32 [%r3], %r0; bra X;
        C: """ + AWAIT + " ld.shared.b32 %r5, [%r3]; X:", None,
    ),
    "a stage is overwritten before its bulk store has read it": (
        "shared-race", {}, "@%p1 " + WRITE + """
        fence.proxy.async.shared::cta; bar.sync 0;
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r11], 256;
        @%p0 cp.async.bulk.commit_group; {} bar.sync 0; @%p2 """ + WRITE,
        "@%p0 cp.async.bulk.wait_group.read 0;",
    ),
    "cp.async is not awaited": (
        "shared-race", {}, "@%p1 cp.async.cg.shared.global [%r3], [%d0], 16; @%p1 cp.async.commit_group; {}"
        "bar.sync 0; @%p2 ld.shared.b32 %r5, [%r3];", "@%p1 cp.async.wait_group 0;",
    ),
    "no barrier after mbarrier.init": (
        "mbarrier-race", {}, "@%p0 mbarrier.init.shared.b64 [%r10], 1; {} " + SLOW
        + "setp.eq.b32 %p6, %r0, 32; @%p6 mbarrier.arrive.shared.b64 %d9, [%r10];", "bar.sync 0;",
    ),
    "no cluster barrier before a peer's arrival": (
        "mbarrier-race", PAIR, PEER + "@%p0 mbarrier.init.shared.b64 [%r10], 1;"
        "@%p0 fence.mbarrier_init.release.cluster; {} bar.sync 0;" + SLOW +
        "@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];" + MEET,
        "barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;",
    ),
    "a CTA exits while a peer reads its memory": (
        "exit-remote", PAIR, PEER + "@%p1 st.shared.b32 [%r3], %r0;" + MEET
        + "mapa.shared::cluster.u32 %r8, %r11, %r7; ld.shared::cluster.b32 %r5, [%r8]; {}", MEET,
    ),
    "a CTA exits long before a peer reads its memory": (
        "exit-remote", PAIR, PEER + "@%p1 st.shared.b32 [%r3], %r0;" + MEET
        + "setp.eq.b32 %p6, %r7, 0; @%p6 bra Q;" + SLOW
        + "mapa.shared::cluster.u32 %r8, %r11, %r7; ld.shared::cluster.b32 %r5, [%r8]; Q: {}", MEET,
    ),
    "a CTA exits, and a peer's flag in its memory is not after the peer's last access": (
        "exit-remote", PAIR, "mov.b32 %r5, 0; @%p0 st.shared.b32 [%r11+512], %r5; fence.acq_rel.cluster;"
        + PEER + MEET + "mapa.shared::cluster.u32 %r8, %r11, %r7;"
        "setp.eq.b32 %p6, %r7, 0; @%p6 bra SEND; @!%p1 bra END;"
        "P: ld.acquire.cluster.shared.b32 %r5, [%r11+512]; setp.eq.b32 %p7, %r5, 0; @%p7 bra P; bra END;"
        "SEND: @!%p1 bra END; shl.b32 %r3, %r2, 4; add.s32 %r3, %r3, %r8;"
        "st.shared::cluster.b32 [%r3], %r1; bar.warp.sync -1;"
        "{} mov.b32 %r5, 1; @%p0 st.relaxed.cluster.shared::cluster.b32 [%r8+512], %r5; END:",
        "fence.acq_rel.cluster;",
    ),
    "no barrier after tcgen05.alloc": (
        "shared-race", {"block": (64, 1, 1)}, SLOW.join(("@%p1 bra A;", "A:"))
        + ALLOC.replace("{alloc}", "{}").format("{}", done="bar.sync 0;").replace("{%r5}", "{{%r5}}"),
        "bar.sync 0;",
    ),
    "tensor memory is freed before the other warps have read it": (
        "shared-race", {"block": (64, 1, 1)},
        ALLOC.replace("{done}", "{}").format("{}", alloc="bar.sync 0;").replace("{%r5}", "{{%r5}}"),
        "bar.sync 0;",
    ),
    "four warps add to one word of global memory": (
        "race", {"block": (128, 1, 1)},
        "@!%p3 bra X; {} ld.global.b32 %r5, [%d0]; add.s32 %r5, %r5, 1; st.global.b32 [%d0], %r5; X:",
        None,
    ),
}  # fmt: skip


def findings(mode, body, shape, seed=0):
    source, out = aligned(256), aligned(256)
    source[:] = np.arange(256)
    shape = {"block": (64, 1, 1), **shape}
    return run(SETUP + body, [source, out], smem=SMEM, mode=mode, seed=seed, **shape).report.findings


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_found_and_its_mend_is_clean(name, mode):
    kind, shape, body, mend = PLANTED[name]
    for seed in (0, 1):
        assert kind in {f.kind for f in findings(mode, body.format(""), shape, seed)}
        if mend:
            assert findings(mode, body.format(mend), shape, seed) == []


def test_a_finding_names_both_parties_their_lines_and_what_is_missing():
    kind, shape, body, _ = PLANTED["a copy is awaited with a barrier"]
    (found,) = findings("immediate", body.format(""), shape)
    assert found.kind == kind
    for part in ("read of shared", "warp 1", "asynchronous copy", "mbarrier", f"line {found.line}"):
        assert part in found.message, part


def test_warps_that_share_granules_but_no_word_do_not_race():
    body = """
    shl.b32 %r6, %r0, 2; add.s32 %r6, %r6, %r11; st.shared.b32 [%r6], %r0; ld.shared.b32 %r5, [%r6];
    shl.b32 %r7, %r1, 2; add.s32 %r7, %r7, %r11; @%p3 st.shared.b32 [%r7+512], %r0;
    @%p3 ld.shared.b32 %r5, [%r7+512];
    """
    assert findings("immediate", body, {}) == []


def test_warps_that_share_a_word_but_no_byte_do_not_race():
    body = "@%p0 st.shared.u8 [%r11], %r0; @%p2 ld.shared.u8 %r5, [%r11+1]; bar.sync 0;"
    assert findings("immediate", body + "ld.shared.b32 %r5, [%r11];", {}) == []


def test_atomics_of_several_warps_do_not_race():
    assert findings("immediate", "mov.b32 %r5, 1; red.shared.add.u32 [%r11], %r5;", {}) == []


def test_what_is_passed_on_through_a_third_warp_is_known():
    body = INIT + LOAD + f"@%p2 bra C; {AWAIT} C: bar.sync 0; ld.shared.b32 %r5, [%r3];"
    assert findings("lazy", body, {}) == []


def test_stages_of_a_few_bytes_that_cp_async_fills_do_not_race():
    body = """
    shl.b32 %r6, %r2, 2; add.s32 %r6, %r6, %r11; add.s64 %d8, %d0, %d5;
    setp.lt.u32 %p6, %r2, 2; and.pred %p6, %p6, %p1;
    @%p6 cp.async.ca.shared.global [%r6], [%d8], 4;
    @%p6 cp.async.ca.shared.global [%r6+8], [%d8], 4;
    cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
    @%p6 cp.async.ca.shared.global [%r6+16], [%d8], 4;
    @%p2 ld.shared.b32 %r5, [%r11+8];
    @%p6 cp.async.ca.shared.global [%r6], [%d8], 4; cp.async.wait_all; bar.sync 0;
    """
    assert findings("immediate", body, {}) == []


@pytest.mark.parametrize(("value", "kinds"), [("%r10", []), ("%r1", ["race"])])
def test_warps_that_all_store_one_result_do_not_race(value, kinds):
    assert [f.kind for f in findings("lazy", f"st.global.b32 [%d0], {value};", {})] == kinds


COPIES = "and.b32 %r6, %r0, 31; shl.b32 %r7, %r6, {shift}; and.b32 %r7, %r7, 127; add.s32 %r7, %r7, %r11;"


@pytest.mark.parametrize("shift", [2, 7])  # of each lane, and of all lanes in one place
@pytest.mark.parametrize(
    ("stores", "kinds"),
    [
        ("st.shared.b32 [%r7], %r6;", set()),
        ("st.shared.b32 [%r7], %r0;", {"shared-race"}),
        ("@%p1 st.shared.b32 [%r7], %r6;\n@%p2 st.shared.b32 [%r7], %r6;", {"shared-race"}),
    ],
)
def test_warps_with_copies_of_data_make_one_store_of_it(shift, stores, kinds):
    """As Triton's do. By another instruction, or of another value, it is a race."""
    for mode in MODES:
        found = findings(mode, COPIES.format(shift=shift) + stores, {})
        assert {f.kind for f in found} - {"lane-race"} == kinds, mode
