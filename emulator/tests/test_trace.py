"""Traces: what the machine tells, what is written, and that a kernel's roles can be read off it."""

import json

import pytest

from cute_emulator.errors import Deadlock
from cute_emulator.execution.scheduler import Schedule
from cute_emulator.host.emulator import Emulator
from cute_emulator.machine.clocks import BYTES, ISSUE, LATENCY
from cute_emulator.trace import Trace

from .handwritten import aligned, launch, machine, module, run
from .kernels import build
from .kernels.gemm_sm90 import GemmSm90
from .kernels.gemm_sm100 import LOAD_WARP, MMA_WARP, GemmSm100

ROLES = {MMA_WARP: "mma", LOAD_WARP: "load"}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    trace = Trace(roles=ROLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path_factory.mktemp("dump")))
        gemm = GemmSm100()
        with Emulator("sm_100a", mode="random", trace=trace) as emulator:
            build.call(build.compile_gemm(gemm), gemm, build.operands(gemm, 256, 64, 256), 2)
    return trace, emulator.report.instructions


def test_every_instruction_is_in_one_active_span(traced):
    trace, instructions = traced
    assert sum(s.instructions for s in trace.spans if s.kind == "active") == instructions
    assert all(s.begin <= s.end for s in trace.spans)


def test_rows_do_not_overlap_and_have_no_holes(traced):
    trace, _ = traced
    rows = {(s.place, s.row) for s in trace.spans if isinstance(s.row, int)}
    assert len(rows) == 2 * 6
    for row in rows:
        spans = sorted((s for s in trace.spans if (s.place, s.row) == row), key=lambda s: (s.begin, s.end))
        assert all(a.end == b.begin for a, b in zip(spans, spans[1:], strict=False))
        assert {s.kind for s in spans} == {"active", "wait"}


def test_async_operations_come_from_their_warps(traced):
    trace, _ = traced
    for kind, count in (("load", 2 * 4 * 2), ("tensor", 2 * (4 * 5 + 1)), ("store", 2 * 2 * 2)):
        assert len([s for s in trace.spans if s.kind == kind]) == count, kind
    reasons = {s.what.split()[0] for s in trace.spans if s.kind == "wait" and s.row == MMA_WARP}
    assert "mbarrier" in reasons


def test_chrome_json(traced, tmp_path):
    trace, _ = traced
    trace.save_json(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"warp 4 (mma)", "warp 5 (load)", "warp 0", "load", "tensor", "store"} <= names
    assert len([e for e in events if e["ph"] == "X"]) == len(
        [s for s in trace.spans if isinstance(s.row, int)]
    )
    begun, ended = (sorted(e["id"] for e in events if e["ph"] == ph) for ph in "be")
    assert begun == ended and len(set(begun)) == len(begun)


def test_picture(traced, tmp_path):
    trace, _ = traced
    trace.save_png(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="empty"):
        Trace().save_png(tmp_path / "none.png")


def test_page(traced, tmp_path):
    trace, instructions = traced
    trace.save_html(tmp_path / "trace.html", title="A <GEMM>")
    text = (tmp_path / "trace.html").read_text()
    assert "<title>A &lt;GEMM></title>" in text and "http" not in text
    data = json.loads(text.partition("const data = ")[2].partition(";\n")[0])
    assert [group["name"] for group in data["groups"]] == [
        f"rank 0, launch 1, CTA (0, 0, {z})" for z in range(2)
    ]
    rows = [row for group in data["groups"] for row in group["rows"]]
    assert sum(len(row["spans"]) for row in rows) == len(trace.spans)
    assert sum(span[4] for row in rows for span in row["spans"]) == instructions
    assert data["end"] == max(s.end for s in trace.spans)
    assert {row["name"] for row in rows if row["separate"]} == {"load", "tensor", "store"}
    assert {span[2] for row in rows for span in row["spans"]} <= set(data["colours"])
    assert "warp 4 (mma)" in {row["name"] for row in rows}
    with pytest.raises(ValueError, match="empty"):
        Trace().save_html(tmp_path / "none.html")


WHO = "mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; mov.u32 %r2, %ctaid.x;\n"
BUSY = "mov.b32 %r9, 500; BUSY: sub.s32 %r9, %r9, 1; setp.ne.s32 %p9, %r9, 0; @%p9 bra BUSY;\n"
BARRIER = """
mov.b32 %r8, bar; mbarrier.init.shared.b64 [%r8], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %d9, [%r8], {nbytes};
"""
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r{to}], [%d0], {nbytes}, [%r8];\n"
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r8], 0; @!%p1 bra WAIT;\n"
SMEM = ".shared .align 16 .b8 data[8192]; .shared .align 8 .b8 bar[8];"
ALL_MODES = [("immediate", 0), ("random", 1), ("lazy", 0), ("lazy", 1)]


def spans_of(body, args, *more, **options):
    trace = Trace()
    run(body, args, *more, trace=trace, **options)
    return trace.spans


@pytest.mark.parametrize(("mode", "seed"), ALL_MODES)
def test_a_load_takes_its_latency_and_its_bytes_and_the_next_one_waits_for_its_unit(mode, seed):
    source = aligned(4096)
    body = "mov.b32 %r3, data; add.s32 %r4, %r3, 4096; setp.ne.u32 %p0, %r0, 0; @%p0 bra END;"
    body += BARRIER.format(nbytes=8192) + LOAD.format(to=3, nbytes=4096) + LOAD.format(to=4, nbytes=4096)
    spans = spans_of(WHO + body + WAIT + "END:", [source], SMEM, mode=mode, seed=seed)
    first, second = sorted((s for s in spans if s.kind == "load"), key=lambda s: s.end)
    (wait,) = (s for s in spans if s.kind == "wait")
    busy = 4096 // BYTES["load"]
    assert first.end - first.begin == busy + LATENCY["load"]
    assert second.end - first.end == busy and wait.end == second.end
    assert wait.what.startswith("mbarrier 0x") and wait.begin >= second.begin


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_model_gives_the_same_times_in_every_mode_and_schedule(arch, traced, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path))
    ends = {max(s.end for s in traced[0].spans)} if arch == "sm_100a" else set()
    gemm = {"sm_100a": GemmSm100, "sm_90a": GemmSm90}[arch]()
    shape = (256, 64, 256) if arch == "sm_100a" else (256, 128, 256)
    for mode, seed in ALL_MODES:
        trace = Trace()
        schedule = Schedule("random") if seed else None
        with Emulator(arch, mode=mode, seed=seed, schedule=schedule, trace=trace):
            build.call(build.compile_gemm(gemm), gemm, build.operands(gemm, *shape), 2)
        ends.add(max(s.end for s in trace.spans))
        places = {s.place for s in trace.spans}
        assert len(places) == 2 and {min(s.begin for s in trace.spans if s.place == p) for p in places} == {0}
    assert max(ends) - min(ends) <= max(ends) // 200, ends  # a look at a barrier more or less


def test_who_comes_early_to_a_barrier_waits_for_who_comes_late():
    body = WHO + "setp.ne.u32 %p0, %r1, 0; @%p0 bra MEET;" + BUSY + "MEET: bar.sync 0;"
    spans = spans_of(body, [aligned(4)], block=(64, 1, 1))
    (wait,) = (s for s in spans if s.kind == "wait")
    late = next(s for s in spans if s.row == 0)
    assert wait.row == 1 and wait.what.startswith("barrier 0 of")
    assert 1500 * ISSUE < wait.end <= late.end and wait.begin < 20 * ISSUE


def test_who_polls_a_flag_waits_until_it_was_stored():
    body = WHO + "setp.ne.u32 %p0, %r2, 0; @%p0 bra LOOK;" + BUSY + "st.release.gpu.global.b32 [%d0], 1;"
    body += (
        "bra END; LOOK: ld.acquire.gpu.global.b32 %r5, [%d0]; setp.eq.b32 %p1, %r5, 0; @%p1 bra LOOK; END:"
    )
    spans = spans_of(body, [aligned(4)], grid=(2, 1, 1))
    (wait,) = (s for s in spans if s.kind == "wait")
    assert (wait.place[2][0], wait.what) == (1, "a flag") and wait.end > 1500 * ISSUE


@pytest.mark.parametrize(("num_sms", "apart"), [(None, True), (1, False)])
def test_ctas_overlap_where_there_are_sms_for_them(num_sms, apart):
    """Each takes all of an SM's shared memory."""
    options = {"grid": (2, 1, 1), "dynamic_smem": 200_000} | ({"num_sms": num_sms} if num_sms else {})
    first, second = sorted(spans_of(WHO + BUSY, [aligned(4)], **options), key=lambda s: s.place)
    assert (second.begin == first.begin == 0) if apart else (second.begin == first.end)


def test_a_launch_begins_when_the_one_before_it_in_its_stream_has_ended_and_no_other():
    trace = Trace()
    out = aligned(4)
    m = machine([out], trace=trace)
    for stream in (1, 1, 2):
        m.submit(launch(module(WHO + BUSY, 1), [out], stream=stream))
    m.run()
    by_launch = {s.place[0]: s for s in trace.spans}
    begins = sorted(s.begin for s in by_launch.values())
    assert begins == [0, 0, next(iter(by_launch.values())).end]
    m.submit(launch(module(WHO, 1), [out]))
    m.run()
    assert trace.spans[-1].begin == max(s.end for s in by_launch.values())


def test_a_run_that_breaks_off_shows_who_waited_for_what():
    """Warp 1 ends, warp 0 waits for a flag that nobody sets."""
    trace, out = Trace(), aligned(1)
    body = """
    mov.u32 %r0, %tid.x; setp.ge.u32 %p0, %r0, 32; @%p0 bra END;
    WAIT: ld.acquire.gpu.global.b32 %r1, [%d0]; setp.eq.b32 %p1, %r1, 0; @%p1 bra WAIT;
    END:
    """
    with pytest.raises(Deadlock):
        run(body, [out], block=(64, 1, 1), trace=trace)
    last = {s.row: s for s in trace.spans}
    assert (last[1].kind, last[0].kind) == ("active", "wait")
    assert f"a change at global {out.ctypes.data:#x}" in last[0].what
    assert last[0].end == max(s.end for s in trace.spans)
