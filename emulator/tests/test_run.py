"""`run` and launch files: kernels of any PTX text, with arrays and numbers as arguments."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch

import cute_emulator
from cute_emulator import Emulator, EmulatorError, FindingsError
from cute_emulator.errors import MemoryFault
from cute_emulator.host.arguments import entry_of, parameters
from cute_emulator.host.kernels import device_of
from cute_emulator.settings import settings
from cute_emulator.source import place
from cute_emulator.testing import emulator_command

HEAD = ".version 8.8\n.target {}\n.address_size 64\n"
TWICE = (
    HEAD.format("sm_90a")
    + """
.visible .entry twice(.param .u64 .ptr .global .align 4 x, .param .u64 y, .param .u32 n)
{
.reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %d<8>;
.shared .align 4 .b8 row[256];
ld.param.u64 %d1, [x]; ld.param.u64 %d2, [y]; ld.param.u32 %r1, [n];
mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r3, %r3, 64, %r2;
setp.ge.u32 %p1, %r3, %r1; @%p1 ret;
mul.wide.u32 %d3, %r3, 4; add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
ld.global.b32 %r4, [%d1]; mov.b32 %r5, row; shl.b32 %r6, %r2, 2; add.s32 %r5, %r5, %r6;
st.shared.b32 [%r5], %r4;
bar.sync 0;
ld.shared.b32 %r4, [%r5]; add.u32 %r4, %r4, %r4; st.global.b32 [%d2], %r4;
ret;
}
"""
)
NEIGHBOUR = TWICE.replace("ld.shared.b32 %r4", "xor.b32 %r5, %r5, 128; ld.shared.b32 %r4")
RACE = NEIGHBOUR.replace("bar.sync 0;\n", "")
"""Reads what the other warp wrote."""


@pytest.mark.parametrize("make", [np.asarray, lambda a: torch.from_numpy(a.copy())])
def test_arrays_and_tensors_are_read_and_written(make):
    x, y = make(np.arange(100, dtype=np.int32)), make(np.full(100, -1, np.int32))
    report = cute_emulator.run(TWICE, "twice", 2, 64, [x, y, 100])
    assert list(y) == [2 * n for n in range(100)] and list(x) == list(range(100))
    assert report.findings == [] and report.instructions > 0


def test_findings_are_in_the_report_and_use_the_names_of_arguments():
    for setting in settings():
        x, y = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
        report = cute_emulator.run(RACE, "twice", (2,), (64, 1), [x, y, 128], **setting.options())
        assert {f.kind for f in report.findings} == {"shared-race"}, setting
    both = {"source": np.arange(64, dtype=np.int32), "target": np.zeros(64, np.int32), "n": 64}
    store = "st.global.b32 [%d2], %r4;"
    racing = TWICE.replace(store, f"ld.param.u64 %d2, [y]; {store}")
    report = cute_emulator.run(racing, "twice", 1, 64, both)
    assert any("element [0] of target" in f.message for f in report.findings)


def test_an_open_emulator_runs_it_and_its_settings_hold():
    args = [np.arange(64, dtype=np.int32), np.zeros(64, np.int32), 64]
    with Emulator("sm_100a", mode="lazy") as emu:
        with pytest.raises(FindingsError, match="shared-race"):
            cute_emulator.run(RACE, "twice", 1, 64, args)
        assert emu.report.instructions
        before = emu.report.instructions
        assert cute_emulator.run(RACE, "twice", 1, 64, args, mode="lazy").findings  # one of its own
        assert emu.report.instructions == before


def test_ranks_and_streams_launch_in_an_emulator():
    tensors = [torch.arange(64, dtype=torch.int32) + r for r in range(2)]
    with Emulator(ranks=2) as emu:
        for r, x in enumerate(tensors):
            with emu.rank(r):
                for stream in (1, 1):
                    emu.launch(TWICE, "twice", (1, 1, 1), (64, 1, 1), [x, x, 64], stream=stream)
        emu.run()
    assert [x[0] for x in tensors] == [0, 4] and tensors[1][63] == 4 * 64


VECTOR = HEAD.format("sm_100a") + (
    ".visible .entry k(.param .u64 x) { .reg .b64 %d<2>; .reg .b32 %r<9>; ld.param.u64 %d1, [x];\n"
    "ld.global.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%d1]; st.global.b32 [%d1], %r8; ret; }\n"
)


def test_device_memory_is_aligned_wherever_the_array_lies():
    raw = np.arange(64, dtype=np.int32)
    for start in range(1, 9):  # owners of their memory, 4 bytes apart, one of them at a multiple of 32
        owner = np.frombuffer(memoryview(raw)[start : start + 16], np.int32)
        cute_emulator.run(VECTOR, "k", 1, 1, [owner])
        assert owner[0] == owner[7]
    with pytest.raises(MemoryFault, match="not a multiple of 32"):  # a view begins where it begins
        cute_emulator.run(VECTOR, "k", 1, 1, [np.arange(64, dtype=np.int32)[1:]])


def test_views_of_one_array_share_their_copy():
    x = np.arange(96, dtype=np.int32)
    cute_emulator.run(TWICE, "twice", 1, 64, [x, x[32:], 64])
    assert x.tolist() == [*range(32), *(2 * n for n in range(64))]


def test_results_are_copied_back_where_a_kernel_breaks_off():
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    with pytest.raises(EmulatorError):
        cute_emulator.run(TWICE.replace("\nret;\n}", "\ntrap;\n}"), "twice", 1, 64, [x, y, 64])
    assert y[63] == 126


KINDS = HEAD.format("sm_90a") + (
    ".visible .entry k(.param .f32 a, .param .f64 b, .param .u8 c, .param .s16 d, .param .u64 e, "
    ".param .align 2 .b8 f[2], .param .align 4 .b8 g[8], .param .b32 h) { ret; }\n"
)
FINE = [1.5, 2, True, -2, None, ml_dtypes.bfloat16(1), bytes(range(8)), 0.5]


def test_numbers_become_what_parameters_are():
    blobs = parameters(entry_of(KINDS, "k"), [("", a) for a in FINE])
    want = ["0000c03f", "0000000000000040", "01", "feff", "00" * 8, "803f", "0001020304050607", "0000003f"]
    assert [blob.hex() for blob in blobs] == want
    (one,) = parameters(entry_of(KINDS, "k"), [("", np.float32(1)), *[("", a) for a in FINE[1:]]])[:1]
    assert one.hex() == "0000803f"


@pytest.mark.parametrize(
    ("place", "value", "error", "match"),
    [
        (2, 256, ValueError, "x: parameter c is .u8, got 256: it has no more than 8 bits"),
        (3, 0.5, TypeError, "x: parameter d is .s16, got 0.5"),
        (4, "y", TypeError, "x: parameter e is .u64, got str"),
        (5, 1.5, TypeError, "x: parameter f is 2 bytes, got 1.5"),
        (6, bytes(4), ValueError, "x: parameter g is 8 bytes, got 4 bytes"),
        (7, np.zeros(2), TypeError, "x: parameter h is 4 bytes, not a pointer"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(place, value, error, match):
    args = {"a": 1.5, **{str(n): a for n, a in enumerate(FINE[1:], 1)}}
    args = {("x" if n == place else name): a for n, (name, a) in enumerate(args.items())}
    with pytest.raises(error, match=match):
        cute_emulator.run(KINDS, "k", 1, 1, {**args, "x": value})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"entry": "once"}, "no kernel 'once' in this PTX module; its kernels: twice"),
        ({"args": [1, 2]}, r"twice takes 3 arguments \(.u64, .u64, .u32\), got 2"),
        ({"grid": (1, 1, 1, 1)}, "extents along x"),
        ({"args": [np.zeros(4)[::-1], None, 0]}, "argument 0: an array must be writable"),
        ({"args": [np.broadcast_to(np.zeros(1), 4), None, 0]}, "argument 0: an array must be writable"),
    ],
)
def test_a_launch_that_cannot_run_is_refused(change, match):
    launch = {"entry": "twice", "grid": 1, "block": 64, "args": [None, None, 0]}
    with pytest.raises(ValueError, match=match):
        cute_emulator.run(TWICE, **{**launch, **change})


def test_a_kernel_has_the_cluster_that_it_was_compiled_for():
    text = HEAD.format("sm_90") + (
        ".visible .entry k(.param .u64 x) .reqnctapercluster 2, 1, 1\n{ .reg .b64 %d<2>; .reg .b32 %r<2>;"
        "ld.param.u64 %d1, [x]; mov.u32 %r1, %cluster_nctarank; st.global.b32 [%d1], %r1; ret; }\n"
    )
    for cluster, want in ((None, 2), (4, 4)):
        out = np.zeros(1, np.int32)
        cute_emulator.run(text, "k", 4, 1, [out], cluster=cluster)
        assert out[0] == want


def test_the_device_is_that_of_the_target():
    targets = {"sm_75": "sm_90a", "sm_90": "sm_90a", "sm_100f": "sm_100a", "sm_103a": "sm_103a"}
    assert {t: device_of(HEAD.format(t)) for t in (*targets, "sm_120")} == {**targets, "sm_120": "sm_120a"}


# --- launch files

LAUNCH = {
    "grid": 2,
    "block": 64,
    "args": {
        "x": {"shape": [8, 16], "dtype": "int32", "fill": "arange"},
        "y": {"shape": 128, "dtype": "int32", "save": "y.npy"},
        "n": 100,
    },
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.ptx").write_text(TWICE)
    (tmp_path / "race.ptx").write_text(RACE)
    (tmp_path / "launch.json").write_text(json.dumps(LAUNCH))
    return tmp_path


def test_the_command_runs_a_launch_file_and_saves_what_it_names(folder):
    done = emulator_command("run", "k.ptx", "launch.json")
    assert done.returncode == 0, done.stderr
    assert "warp instructions" in done.stderr
    assert np.load("y.npy").tolist() == [2 * n for n in range(100)] + 28 * [-1]
    again = {**LAUNCH, "args": [{"file": "y.npy", "dtype": "uint32"}, {"shape": 128, "save": "z.npy"}, 100]}
    (folder / "again.json").write_text(json.dumps(again))
    assert emulator_command("k.ptx", "again.json").returncode == 0
    assert np.load("z.npy").view(np.int32)[99] == 4 * 99


def test_commands_judge_the_kernel_of_a_launch_file(folder):
    done = emulator_command("race.ptx", "launch.json")
    assert done.returncode == 1 and "[shared-race]" in done.stderr and "Called from" not in done.stderr
    done = emulator_command("check", "race.ptx", "launch.json")
    assert done.returncode == 1 and "13 of 13 runs are not clean" in done.stdout
    (folder / "wide.ptx").write_text(NEIGHBOUR)
    done = emulator_command("mutate", "--seeds", "1", "wide.ptx", "launch.json")
    assert done.returncode == 0 and "1 detected" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"gird": 1}, "launch.json: must be an object with keys among entry, grid,"),
        ({"args": [{"shape": 1, "fill": "ones"}, None, 1]}, "launch.json: argument 0: fill must be a number"),
        ({"args": [{"dtype": "int32"}, None, 1]}, "argument 0: an array has either file or shape"),
        ({"args": ["x", None, 1]}, "argument 0: must be an object"),
        ({"block": 2048}, "2048 threads"),
    ],
)
def test_a_launch_file_that_cannot_run_is_one_line_and_exit_code_2(folder, change, match):
    (folder / "launch.json").write_text(json.dumps({**LAUNCH, **change}))
    done = emulator_command("k.ptx", "launch.json")
    assert done.returncode == 2 and match in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_kernel_without_a_launch_is_refused(folder):
    done = emulator_command("k.ptx")
    assert done.returncode == 2 and "takes one argument, its launch in JSON" in done.stderr


# --- lines of the source


def test_inline_assembly_comes_from_the_line_where_it_begins():
    asm = (
        "// begin inline asm\n.loc 1 9 24\nmov.b32 %r5, 0xFFFFF0;\n.loc 1 10 24\nst.shared.b32 [%r5], %r4;\n"
        "// end inline asm\nadd.u32 %r4, %r4, 1;\n.loc 1 11 1\n"
    )
    text = f'.file 1 "k.py"\n.loc 1 9 24\n{asm}ret;'
    found = {line: place(text, line) for line in (5, 7, 9, 11)}
    assert found == {5: "5 (k.py:9)", 7: "7 (k.py:9)", 9: "9 (k.py:9)", 11: "11 (k.py:11)"}
    kernel = TWICE.replace("bar.sync 0;", f".loc 1 9 24\n{asm}bar.sync 0;") + '.file 1 "k.py"\n'
    with pytest.raises(MemoryFault, match=r"k\.py:9\)"):
        cute_emulator.run(kernel, "twice", 1, 64, [np.zeros(64, np.int32), np.zeros(64, np.int32), 64])
