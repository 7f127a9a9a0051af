"""Stores of 16 bytes to shared memory that follow each other are made as one, and judged one by one."""

import numpy as np
import pytest

from cute_emulator.instructions.memory import Store
from cute_emulator.instructions.peephole import gather_runs, needed

from .handwritten import aligned, run

SMEM = ".shared .align 128 .b8 buf[4096];"
SETUP = """
mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; shr.u32 %r2, %r0, 5; setp.eq.b32 %p0, %r2, 0;
mov.b32 %r3, buf; shl.b32 %r4, %r1, 4; add.u32 %r4, %r4, %r3; xor.b32 %r5, %r4, 48;
""" + "".join(f"mad.lo.u32 %r{n}, %r1, 16, {n};" for n in range(10, 26))
APART = "mov.u32 %r60, %clock;"  # reading it is more than arithmetic: what lies before it must have happened


def stores(apart: str, places: tuple[str, ...]) -> str:
    each = [
        f"st.shared.v4.b32 [{place}], {{%r{10 + 4 * n}, %r{11 + 4 * n}, %r{12 + 4 * n}, %r{13 + 4 * n}}};\n"
        for n, place in enumerate(places)
    ]
    return apart.join(each)


DUMP = """
bar.sync 0; mov.b32 %r40, 0;
L: shl.b32 %r41, %r40, 2; add.u32 %r42, %r41, %r3; ld.shared.b32 %r43, [%r42];
cvt.u64.u32 %d20, %r41; add.s64 %d21, %d0, %d20; st.global.b32 [%d21], %r43;
add.u32 %r40, %r40, 1; setp.lt.u32 %p2, %r40, 512; @%p2 bra L;
"""


@pytest.fixture
def alone(monkeypatch):
    """How many stores were made by themselves."""
    made = []
    call = Store.__call__

    def counted(self, *args):
        made.append(1)
        call(self, *args)

    monkeypatch.setattr(Store, "__call__", counted)
    return made


@pytest.mark.parametrize(
    "places", [("%r4", "%r4+512", "%r5+1024"), ("%r4", "%r5", "%r4+16", "%r5+512")], ids=["apart", "overlap"]
)
def test_a_run_leaves_what_its_stores_leave(places, alone):
    found = []
    for apart in ("", APART):
        out = aligned(512)
        machine = run(SETUP + stores(apart, places) + DUMP, [out], SMEM)
        found.append((out.tobytes(), [str(f) for f in machine.report.findings if f.kind != "lane-race"]))
    assert found[0] == found[1] and np.count_nonzero(out) > 300
    assert len(alone) == len(places)  # of the second run only


RACES = {
    "another warp has read what the second store overwrites": (
        "@!%p0 ld.shared.b32 %r50, [%r4+512]; mov.b32 %r51, 0; W: add.u32 %r51, %r51, 1;"
        "setp.lt.u32 %p3, %r51, 300; @%p3 bra W; @!%p0 bra X; {} X:"
    ),
    "another warp has stored a word there": (
        "@!%p0 st.shared.b32 [%r3+520], %r0; mov.b32 %r51, 0; W: add.u32 %r51, %r51, 1;"
        "setp.lt.u32 %p3, %r51, 300; @%p3 bra W; @!%p0 bra X; {} X:"
    ),
    "another warp reads what the third store wrote": "@!%p0 bra W; {} bra X; W: mov.b32 %r51, 0;"
    "V: add.u32 %r51, %r51, 1; setp.lt.u32 %p3, %r51, 300; @%p3 bra V; ld.shared.b32 %r50, [%r4+1024]; X:",
    "another lane reads what the second store wrote": "@!%p0 bra X; {} xor.b32 %r52, %r4, 16;"
    "ld.shared.b32 %r50, [%r52+512]; X:",
}


@pytest.mark.parametrize("body", RACES.values(), ids=RACES)
def test_a_finding_names_the_store_that_it_is_about(body):
    said = []
    for apart in ("", APART):
        kernel = SETUP + body.format(stores(apart, ("%r4", "%r4+512", "%r4+1024")))
        report = run(kernel, [aligned(4)], SMEM, block=(64, 1, 1)).report
        (finding,) = report.findings
        said.append((finding.kind, finding.line, finding.message))
    assert said[0] == said[1]


def test_a_store_beyond_shared_memory_is_still_one_of_its_own():
    kernel = SETUP + stores("", ("%r4", "%r4+1000000"))
    with pytest.raises(Exception, match=r"beyond|bounds|shared"):
        run(kernel, [aligned(4)], SMEM)


def test_nothing_but_arithmetic_lies_between_the_stores_of_a_run():
    def store(n, a):
        return f"v{n} = s{n}(g, g.mask, {a}, (v1, v1, v1, v1, ))"

    both = "stores(g, (s3, s5), (v1, v4), ((v1, v1, v1, v1, ), (v1, v1, v1, v1, )))"
    assert needed(gather_runs([store(3, "v1"), "v4 = v1 + 1", store(5, "v4")])) == ["v4 = v1 + 1", both]
    for line in ("v4 = h7(g, g.mask)", "v4 = g.warp.special('%clock')", "R[3] = v1", "if v1: return 3"):
        assert "stores(" not in " ".join(gather_runs([store(3, "v1"), line, store(5, "v1")]))
