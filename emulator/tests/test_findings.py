"""What a finding and an error show: the instructions around the place, both parties, and their roles."""

import re

import pytest
import torch

from cute_emulator.errors import EmulatorError, KernelTrap, MemoryFault
from cute_emulator.execution.launch import Machine
from cute_emulator.host.emulator import Emulator
from cute_emulator.machine.memory import Named
from cute_emulator.machine.roles import parse_roles
from cute_emulator.ptx.shared_names import Part, View, as_comment, name
from cute_emulator.rules import CHECKS
from cute_emulator.source import excerpt
from cute_emulator.testing import emulator_command
from cute_emulator.trace import Trace

from .handwritten import aligned, launch, module, run
from .test_shared_races import INIT, LOAD, SETUP, SMEM

ROLES = {0: "writer", 1: "reader"}


def shown(text):
    """Numbers and marks of the instructions that an excerpt shows, those of the other party apart."""
    mine, _, other = text.partition("the other")
    rows = re.findall(r"^ +(>?) +(\d+) \| (.*)$", mine, re.M)
    return rows, re.findall(r"> +(\d+) \| (.*)$", other, re.M)


def planted(body, **options):
    out = aligned(64)
    return run(SETUP + body, [aligned(64), out], smem=SMEM, block=(64, 1, 1), roles=ROLES, **options)


# kind of the finding: kernel, its instruction, the other party's, roles of both
FINDINGS = {
    "shared-race": (
        "@%p1 st.shared.b32 [%r3], %r0;\nmov.b32 %r9, 1;\n@%p2 ld.shared.b32 %r5, [%r3];\n",
        "ld.shared.b32", "st.shared.b32", ("warp 1 (reader)", "warp 0 (writer)"),
    ),
    "race": (
        "@%p1 st.global.b32 [%d1], 7;\n@%p2 ld.global.b32 %r5, [%d1];\n",
        "ld.global.b32", "st.global.b32", ("warp 1 (reader)", "warp 0 (writer)"),
    ),
    "proxy-fence": (
        "@%p1 st.shared.b32 [%r3], %r0;\nbar.sync 0;\n"
        "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r11], 16;\n"
        "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;\n",
        "cp.async.bulk.global", None, ("warp 0 (writer)",),
    ),
    "mbarrier-race": (
        "@%p0 mbarrier.init.shared.b64 [%r10], 1;\n@%p2 mbarrier.arrive.shared.b64 %d9, [%r10];\n",
        "mbarrier.arrive", "mbarrier.init", ("warp 1 (reader)", "warp 0 (writer)"),
    ),
    "exit-tx": (
        INIT + "\n@%p0 mbarrier.arrive.expect_tx.shared.b64 %d9, [%r10], 256;\n", "expect_tx", None, (),
    ),
    "exit-pending": (INIT + "\n" + LOAD, "cp.async.bulk.shared", None, ()),
    "tmem-leak": (
        "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r11], 32;\n",
        "tcgen05.alloc", None, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FINDINGS)
def test_a_finding_shows_its_instruction_three_on_either_side_the_other_party_and_roles(kind):
    body, mine, other, who = FINDINGS[kind]
    checks = [*CHECKS, "tx"]
    report = planted(body, mode="lazy" if kind == "exit-pending" else "immediate", checks=checks).report
    finding = next(f for f in report.findings if f.kind == kind)
    rows, others = shown(finding.excerpt)
    numbers = [int(number) for _, number, _ in rows]
    (at,) = [n for n, (mark, _, _) in enumerate(rows) if mark]
    assert numbers[at] == finding.line and mine in rows[at][2]
    assert at == 3, "three instructions before"
    assert len(rows) == 7 or re.match(r"ret;|}", rows[-1][2]), "three after, if the kernel goes on"
    assert numbers == sorted(numbers)
    assert not any(text.lstrip().startswith((".loc", "{", "//")) for _, _, text in rows)
    assert bool(others) == (other is not None) and all(other in text for _, text in others)
    assert all(role in finding.message for role in who)
    assert str(finding) == f"[{kind}] {finding.message}\n{finding.excerpt}"


@pytest.mark.parametrize(
    ("error", "body", "mine"),
    [
        (MemoryFault, "ld.global.b32 %r5, [%d1+4096];", "ld.global.b32"),
        (EmulatorError, INIT + "\n@%p0 mbarrier.arrive.shared.b64 %d9, [%r10], 2;", "mbarrier.arrive"),
        (EmulatorError, "@%p1 bar.arrive 1, 64;\n@%p2 bar.sync 1, 32;", "bar.sync 1"),
        (EmulatorError, "@%p2 trap;", "trap"),
        (EmulatorError, INIT + "\n" + LOAD + "@%p0 mbarrier.inval.shared.b64 [%r10];", "cp.async.bulk"),
    ],
    ids=["out of bounds", "over-arrival", "barrier count", "trap", "in a copy, later"],
)
def test_an_error_shows_its_place_too(error, body, mine):
    with pytest.raises(error) as caught:
        planted(body, mode="lazy")
    rows, _ = shown(str(caught.value))
    (marked,) = [text for mark, _, text in rows if mark]
    assert mine in marked
    assert str(caught.value).count("    > ") == 1


def test_kernels_with_an_error_at_the_same_line_have_a_finding_each():
    out = aligned(64)
    machine = Machine("sm_100a")
    machine.memory.register(out.ctypes.data, out.nbytes, name="out")
    for value in (7, 7, 8):  # the first kernel twice: one finding of it
        body = f"setp.lt.u32 %p1, %tid.x, 32; @%p1 st.global.b32 [%d0], {value};"
        body += "@!%p1 ld.global.b32 %r5, [%d0];"
        machine.submit(launch(module(body, 1), [out], block=(64, 1, 1)))
    machine.run()
    races = [finding for finding in machine.report.findings if finding.kind == "race"]
    assert len(races) == 2 and races[0].line == races[1].line
    assert ", 7;" in races[0].excerpt and ", 8;" in races[1].excerpt


def test_the_other_party_of_another_kernel_is_shown_from_its_own_text():
    flag = aligned(32)
    machine = Machine("sm_100a", ranks=2, roles=lambda warp: f"only {warp}")
    machine.memory.register(flag.ctypes.data, flag.nbytes, name="flag")
    writes = module("// a comment that moves the lines\n\n\nst.global.b32 [%d0], 7;", 1)
    reads = module("nanosleep.u32 1000; ld.global.b32 %r1, [%d0];", 1)
    machine.submit(launch(writes, [flag]))
    machine.submit(launch(reads, [flag], rank=1))
    machine.run()
    (finding,) = machine.report.findings
    rows, others = shown(finding.excerpt)
    assert "ld.global" in next(text for mark, _, text in rows if mark)
    assert [text for _, text in others] == ["st.global.b32 [%d0], 7;"]
    assert finding.message.count("warp 0 (only 0)") == 2


def test_a_finding_at_the_end_says_how_to_wait():
    store = (
        "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r11], 16; @%p0 cp.async.bulk.commit_group;"
    )
    (finding,) = planted(store, mode="lazy").report.findings
    assert finding.kind == "exit-pending" and "cp.async.bulk.wait_group.read 0" in finding.message
    assert not planted(store + "cp.async.bulk.wait_group.read 0;", mode="lazy").report.findings
    assert not planted(store, mode="lazy", ignore=["exit-pending"]).report.findings
    assert planted(store, mode="lazy", ignore=["exit-tx"]).report.findings


def test_kinds_that_there_are_not_cannot_be_ignored():
    with pytest.raises(
        ValueError, match="no findings are of kind 'exit-pendign'; kinds: .*exit-pending"
    ) as said:
        Machine("sm_100a", ignore=["race", "exit-pendign"])
    assert "\n" not in str(said.value)


def test_a_trace_names_the_warps_of_messages():
    out = aligned(64)
    body = "@%p1 st.shared.b32 [%r3], %r0; @%p2 ld.shared.b32 %r5, [%r3];"
    report = run(SETUP + body, [out, out], smem=SMEM, block=(64, 1, 1), trace=Trace(roles=ROLES)).report
    assert "warp 1 (reader)" in report.findings[0].message


def test_roles_on_the_command_line():
    assert parse_roles("0-2=epilogue, 4=mma") == {0: "epilogue", 1: "epilogue", 2: "epilogue", 4: "mma"}
    assert parse_roles("") == {}
    for wrong in ("4:mma", "3-1=mma"):
        with pytest.raises(ValueError, match=wrong):
            parse_roles(wrong)


def test_lines_beyond_the_text_show_nothing():
    assert excerpt("a;\nb;", 3) == excerpt("a;", 0) == ""


@pytest.mark.parametrize("waits", [True, False])
def test_a_bounded_wait_that_runs_out_because_nothing_goes_on_shows_where_the_others_stand(waits):
    flag = aligned(1)
    body = """
    mov.u32 %r0, %tid.x; setp.ge.u32 %p0, %r0, 32; @%p0 bra OTHER;
    mov.u64 %d5, %globaltimer; add.s64 %d5, %d5, {bound};
    WAIT: ld.relaxed.sys.global.b32 %r2, [%d0]; setp.ne.b32 %p0, %r2, 0; @%p0 bra END;
    mov.u64 %d6, %globaltimer; setp.lt.u64 %p1, %d6, %d5; @%p1 bra WAIT;
    trap;
    OTHER: bar.sync 3, 96;
    END:
    """
    with pytest.raises(KernelTrap) as error:
        run(body.format(bound=10**9 if waits else 0), [flag], block=(64, 1, 1))
    shown = "where the warps stood" in str(error.value) and "bar.sync 3, 96; waits for barrier 3" in str(
        error.value
    )
    assert shown == waits


NAMES = """
import cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if thread % 32 == 5:
        y[3, 2] = x[thread, 0] + thread

@cute.jit
def go(x: cute.Tensor, y: cute.Tensor):
    kernel(x, y).launch(grid=(1, 1, 1), block=(64, 1, 1))

x, y = torch.ones(64, 4, device="cuda"), torch.zeros(4, 8, device="cuda").T
go(from_dlpack(x), from_dlpack(y))
"""


def test_a_race_names_the_lane_and_the_tensors_element(tmp_path):
    (tmp_path / "names.py").write_text(NAMES)
    done = emulator_command("--collect", tmp_path / "names.py")
    (line,) = (one for one in done.stderr.splitlines() if "[race]" in one)
    assert "(element [3, 2] of argument 1, " in line, line
    assert "by rank 0 CTA (0, 0, 0) warp 1 lane 5, line" in line


SHARED = """
import sys
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

@cute.struct
class Storage:
    full: cute.struct.MemRange[cutlass.Int64, 2]
    sA: cute.struct.Align[cute.struct.MemRange[cutlass.Float16, 2048], 1024]

@cute.kernel
def kernel(x: cute.Tensor, part: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator()
    words = smem.allocate_array(cutlass.Float32, 65)
    storage = smem.allocate(Storage)
    table = smem.allocate_tensor(cutlass.Float32, cute.make_layout((64, 4), stride=(1, 64)), 128)
    row = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, 64), cute.make_layout(64))
    sA = storage.sA.get_tensor(cute.make_layout((64, 8, 4)))
    if cutlass.const_expr(part == "stage"):
        sA[thread, 0, 2] = cutlass.Float16(1)
        x[thread] = cutlass.Float32(sA[63 - thread, 0, 2])
    elif cutlass.const_expr(part == "table"):
        table[thread, 1] = x[thread]
        x[thread] = table[63 - thread, 1]
    elif cutlass.const_expr(part == "words"):
        words[thread] = x[thread]
        x[thread] = words[63 - thread]
    elif cutlass.const_expr(part == "row"):
        row[thread] = x[thread]
        x[thread] = row[63 - thread]
    else:
        cute.arch.mbarrier_init(storage.full.data_ptr() + 1, 3)
        cute.arch.sync_threads()
        cute.arch.mbarrier_wait(storage.full.data_ptr() + 1, 0)

@cute.jit
def go(x: cute.Tensor, part: cutlass.Constexpr):
    kernel(x, part).launch(grid=(1, 1, 1), block=(64, 1, 1))

go(from_dlpack(torch.ones(64, device="cuda")), sys.argv[1])
"""


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("stage", r"write of shared 0x\w+ \(stage 2 of storage.sA\) of rank 0 CTA"),
        ("table", r"write of shared 0x\w+ \(element \[32, 1\] of table\) of rank 0 CTA"),
        ("words", r"write of shared 0x\w+ \(words \+ 128\) of rank 0 CTA"),
        ("row", r"write of shared 0x\w+ \(element \[32\] of row\) of rank 0 CTA"),
        ("wait", r"waits for mbarrier 0x\w+ \(storage.full \+ 8\) \(phase 0"),
    ],
)
def test_shared_memory_is_named_as_in_the_source(part, said, tmp_path):
    (tmp_path / "names.py").write_text(SHARED)
    done = emulator_command("--collect", tmp_path / "names.py", part)
    assert done.returncode and re.search(said, done.stderr), done.stderr


PARTS = [
    Part("dynamic", 64, 64, "bar"),
    Part("dynamic", 1024, 4096, "sA", View(16, "((8,8),(16,1),(1,2)):((16,128),(1,0),(0,1024))")),
    Part("static", 0, 64, "row", View(32, "(4,4):(4,1)")),
    Part("static", 64, 64, "any", View(32, "(?,4):(4,1)")),
]


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (2048 + 64, "bar"),
        (2048 + 72, "bar + 8"),
        (2048 + 128, ""),
        (2048, ""),
        (2048 + 1024 + 2047, "stage 0 of sA"),
        (2048 + 1024 + 2048, "stage 1 of sA"),
        (1024 + 4 * 6, "element [1, 2] of row"),
        (1024 + 72, "any + 8"),
    ],
)
def test_places_in_shared_memory(at, said):
    ptx = ".entry k()\n{\n}\n" + as_comment("other", []) + as_comment("k", PARTS)
    symbols = {"static@17": 1024, "dynamic": 2048}
    assert name(ptx, "k", symbols, 8192, at) == said
    assert name(ptx, "k", symbols, 4096, at) == "", "a part beyond the end: the layout is another one"
    assert name(ptx, "other", symbols, 8192, at) == name(ptx, "none", symbols, 8192, at) == ""


@pytest.mark.parametrize(
    ("shape", "strides", "bits", "offset", "said"),
    [
        ((8, 4), (4, 1), 32, 4 * 14, "element [3, 2] of x"),
        ((8, 4), (1, 8), 32, 4 * 19, "element [3, 2] of x"),
        ((2, 3, 4), (100, 4, 1), 16, 2 * (100 + 6), "element [1, 1, 2] of x"),
        ((2, 3, 4), (100, 4, 1), 16, 2 * 50, ""),
        ((4,), (1,), 32, 16, ""),
        ((4,), (1,), 32, -4, ""),
        ((1, 64), (1, 1), 4, 3, "element [0, 6] of x"),
    ],
)
def test_elements_by_address(shape, strides, bits, offset, said):
    assert Named("x", 4096, bits, shape, strides).element(4096 + offset) == said


def test_symmetric_memory_is_named_as_it_was_made():
    with Emulator(ranks=2) as emu:
        flags = emu.symmetric((4, 8), torch.int32, name="flags")
        spot = emu.machine.memory.spot(flags[1].data_ptr() + 4 * 19)
    assert "(element [2, 3] of flags, flags of rank 1 [" in spot
