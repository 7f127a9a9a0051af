"""One place, two names: accesses through a multicast address and the rank's own need a fence.proxy.alias."""

import pytest

from .handwritten import aligned, launch, machine, module

START = """
mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 32; setp.ge.u32 %p2, %r0, 32; setp.eq.u32 %p0, %r0, 0;
mov.b32 %r1, 7; mov.b32 %r10, buf; @%p0 st.shared.b32 [%r10], %r1; @%p0 fence.proxy.async.shared::cta;
"""
FENCE = "fence.proxy.alias;"
STORE, LOAD = "st.global.b32 [%d0], %r1;", "ld.global.b32 %r2, [%d0];"
EVERYWHERE = "multimem.st.relaxed.sys.global.b32 [%d1], %r1;"
SUM = "multimem.ld_reduce.relaxed.sys.global.add.u32 %r2, [%d1];"
PAIRS = {
    "stored, then summed": (STORE, SUM),
    "stored everywhere, then loaded": (EVERYWHERE, LOAD),
    "stored everywhere, then stored": (EVERYWHERE, STORE),
    "summed, then stored": (SUM, STORE),
    "loaded, then stored everywhere": (LOAD, EVERYWHERE),
}
FENCED = {
    "by the first": (f"@%p1 {FENCE}", "", False),
    "by the second": ("", f"@%p2 {FENCE}", False),
    "by nobody": ("", "", True),
    "by another kind": ("@%p1 fence.proxy.async.global;", "@%p2 fence.acq_rel.sys;", True),
}


def run(bodies, block=64, ranks=(0, 0)):
    """Findings of launches: place 0 of two copies is %d0, of both %d1; a flag is %d2."""
    copies, multicast, flag = [aligned(32), aligned(32)], aligned(32), aligned(32)
    m = machine([*copies, flag], ranks=2)
    m.memory.register_multicast(multicast.ctypes.data, multicast.nbytes, [c.ctypes.data for c in copies])
    for body, rank in zip(bodies, ranks, strict=False):
        ptx = module(START + body, 3, ".shared .align 128 .b8 buf[128];")
        m.submit(launch(ptx, [copies[0], multicast, flag], block=(block, 1, 1), rank=rank))
    m.run()
    return m.report.findings, [int(c[0]) for c in copies]


def written(first):
    """A read is remembered of what was written in a run: so something is, by the first one's name."""
    return f"@%p1 {EVERYWHERE if first.startswith('multimem') else STORE}"


@pytest.mark.parametrize("fenced", FENCED)
@pytest.mark.parametrize("pair", PAIRS)
def test_between_two_warps(pair, fenced):
    (first, second), (before, after, is_wrong) = PAIRS[pair], FENCED[fenced]
    findings, _ = run([f"{written(first)} @%p1 {first} {before} bar.sync 0; {after} @%p2 {second}"])
    assert {finding.kind for finding in findings} == ({"alias-fence"} if is_wrong else set())
    if is_wrong:
        text = str(findings[0])
        assert "through a multicast address" in text and "no fence.proxy.alias between" in text


@pytest.mark.parametrize("pair", PAIRS)
def test_a_fence_in_front_of_both_or_behind_both_does_not_help(pair):
    first, second = PAIRS[pair]
    body = f"{FENCE} {written(first)} @%p1 {first} bar.sync 0; @%p2 {second} {FENCE}"
    assert {finding.kind for finding in run([body])[0]} == {"alias-fence"}


@pytest.mark.parametrize("fence", ["", FENCE])
@pytest.mark.parametrize("pair", PAIRS)
def test_also_within_a_thread(pair, fence):
    first, second = PAIRS[pair]
    findings, _ = run([f"{written(first)} @%p1 {first} {fence} @%p1 {second}"], block=32)
    assert [finding.kind for finding in findings] == ([] if fence else ["alias-fence"])


@pytest.mark.parametrize("fence", ["", FENCE])
def test_a_bulk_store_to_a_multicast_address(fence):
    store = (
        "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 16;"
        "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"
    )
    findings, values = run([f"{store} {fence} bar.sync 0; @%p2 {LOAD}"])
    assert [finding.kind for finding in findings] == ([] if fence else ["alias-fence"])
    assert values == [7, 7]


@pytest.mark.parametrize("pair", PAIRS)
def test_the_end_of_a_kernel_is_enough(pair):
    first, second = PAIRS[pair]
    assert run([f"{written(first)} @%p1 {first}", f"@%p1 {second}"])[0] == []


WAIT = "W: ld.acquire.sys.global.b32 %r5, [%d2]; setp.ne.s32 %p3, %r5, 7; @%p3 bra W;"
RAISE = "st.release.sys.global.b32 [%d2], %r1;"


@pytest.mark.parametrize("ends", [True, False])
def test_of_another_rank_too_if_a_flag_tells_of_it(ends):
    first = [f"@%p1 {EVERYWHERE}", RAISE] if ends else [f"{EVERYWHERE} {RAISE}"]
    findings, _ = run([*first, f"{WAIT} {LOAD}"], 32, [0] * len(first) + [1])
    assert {finding.kind for finding in findings} == (set() if ends else {"alias-fence"})


def test_one_name_needs_no_fence():
    body = f"@%p1 {EVERYWHERE} bar.sync 0; @%p2 {SUM} bar.sync 0; @%p1 {EVERYWHERE}"
    assert run([body]) == ([], [7, 7])
    assert run([body.replace(EVERYWHERE, STORE).replace(SUM, LOAD)])[0] == []


def test_without_an_order_it_is_a_race_and_no_fence_is_asked_for():
    findings, _ = run([f"@%p1 {EVERYWHERE} @%p2 {LOAD}"])
    assert {finding.kind for finding in findings} == {"race"}
