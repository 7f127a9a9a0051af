"""Traces: what the machine tells, what is written, and that a kernel's roles can be read off it."""

import json
from types import SimpleNamespace

import pytest

from cute_emulator.errors import Deadlock
from cute_emulator.host.emulator import Emulator
from cute_emulator.trace import Trace

from .handwritten import aligned, run
from .kernels import build
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
    assert max(s.end for s in trace.spans) == instructions
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
    assert sum(span[4] for row in rows for span in row["spans"]) == instructions == data["end"]
    assert {row["name"] for row in rows if row["separate"]} == {"load", "tensor", "store"}
    assert {span[2] for row in rows for span in row["spans"]} <= set(data["colours"])
    assert "warp 4 (mma)" in {row["name"] for row in rows}
    with pytest.raises(ValueError, match="empty"):
        Trace().save_html(tmp_path / "none.html")


def test_waiting_is_named_and_closed_when_the_warp_goes_on():
    trace = Trace(roles=lambda warp: "only")
    grid = SimpleNamespace(number=1, launch=SimpleNamespace(rank=0))
    group = SimpleNamespace(why="mbarrier 0x400")
    warp = SimpleNamespace(grid=grid, cta=SimpleNamespace(ctaid=(0, 0, 0)), index=0, groups=[group])
    trace.ran(warp, 10, 10)
    group.why = ""
    trace.ran(warp, 25, 5)
    warp.groups = []
    trace.ran(warp, 30, 5)
    assert [(s.kind, s.begin, s.end, s.what, s.instructions) for s in trace.spans] == [
        ("active", 0, 10, "", 10),
        ("wait", 10, 20, "mbarrier 0x400", 0),
        ("active", 20, 30, "", 10),
    ]
    assert trace.name(0) == "warp 0 (only)"


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
