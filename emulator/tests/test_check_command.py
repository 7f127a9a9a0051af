"""`check`, `--schedule` and the pytest plugin: kernels of other people, in every mode, with one verdict."""

import json
import shlex
import subprocess
import sys
import textwrap

import pytest

from cute_emulator.machine.asyncq import MODES
from cute_emulator.pytest_plugin import settings_of
from cute_emulator.settings import Setting, settings
from cute_emulator.source import place
from cute_emulator.testing import emulator_command as run

pytest_plugins = ["pytester"]

KERNEL = """
    import cutlass, cutlass.cute as cute, torch
    from cutlass.cute.runtime import from_dlpack
    import cuda.bindings.driver as cuda

    @cute.kernel
    def reverse(src: cute.Tensor, dst: cute.Tensor, meets: cutlass.Constexpr):
        tid, _, _ = cute.arch.thread_idx()
        held = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(128), 16)
        held[tid] = src[tid]
        if cutlass.const_expr(meets):
            cute.arch.sync_threads()
        dst[tid] = held[127 - tid]  # the read

    @cute.jit
    def go(src: cute.Tensor, dst: cute.Tensor, meets: cutlass.Constexpr, stream: cuda.CUstream):
        reverse(src, dst, meets).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

    def check(meets):
        src, dst = torch.randn(128, device="cuda"), torch.empty(128, device="cuda")
        go(from_dlpack(src), from_dlpack(dst), meets, cuda.CUstream(0))
        torch.testing.assert_close(dst, src.flip(0))
"""
SCRIPT = textwrap.dedent(KERNEL) + "import sys\ncheck(sys.argv[1] == 'meets')\n"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "reverse.py"
    path.write_text(SCRIPT)
    return path


def test_a_missing_barrier_is_found_in_every_mode_with_its_source_line(script, tmp_path):
    outcomes = tmp_path / "outcomes.json"
    words = ["check", "--seeds", "1", "--roles", "0-3=turns round", "--json", outcomes, script, "races"]
    command = [sys.executable, "-m", "cute_emulator", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(outcomes.read_text())
    assert {outcome["verdict"] for outcome in found} == {"findings"}
    assert {outcome["setting"].split()[0] for outcome in found} == set(MODES)
    line = SCRIPT.splitlines().index("    dst[tid] = held[127 - tid]  # the read") + 1
    assert f"(reverse.py:{line})" in done.stdout and "shared-race" in done.stdout
    assert f"reverse.py:{line}: dst[tid] = held[127 - tid]  # the read\n" in done.stdout
    assert f"{len(found)} of {len(found)} runs are not clean" in done.stdout
    repeat = shlex.split(next(text for text in done.stdout.splitlines() if "repeat: " in text))
    again = run(*repeat[repeat.index("cute_emulator") + 1 :])
    assert again.returncode == 1 and "shared-race" in again.stderr
    assert found[0]["messages"][0].splitlines()[0] in again.stderr and "(turns round)" in again.stderr


def test_a_run_that_does_not_end_is_broken_off_and_so_is_its_repetition(script):
    done = run("check", "--seeds", 0, "--limit", 20, script, "meets")
    assert done.returncode == 1 and "more than the limit" in done.stdout
    repeat = shlex.split(next(text for text in done.stdout.splitlines() if "repeat: " in text))
    again = run(*repeat[repeat.index("cute_emulator") + 1 :])
    assert again.returncode == 1 and "more than the limit" in again.stderr


def test_a_right_kernel_is_clean(script):
    done = run("check", "--seeds", 1, script, "meets")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all clean" in done.stdout
    (idle,) = [
        line for line in done.stdout.splitlines() if line.startswith("nothing that ran is judged by: ")
    ]
    assert "wgmma-fence" in idle and "alias-fence" in idle and "race" not in idle.split(": ")[1].split(", ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--arch", "sm_90"), "(sm_90a?)"),
        (("--schedule", "shufled"), "schedule 'shufled' must be one of"),
        (("--mode", "eager"), "mode 'eager' must be one of immediate"),
    ],
)
def test_a_wrong_option_is_one_line(script, words, says):
    done = run(*words, script, "meets")
    assert done.returncode == 2 and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_ptx_that_runs_is_kept(script, tmp_path):
    assert run("--keep-ptx", tmp_path / "ptx", "--schedule", "starve:warp:1", script, "meets").returncode == 0
    (kept,) = (tmp_path / "ptx").iterdir()
    assert ".entry" in kept.read_text() and "bar.sync" in kept.read_text()


def test_every_setting_has_a_schedule_that_names_it():
    for setting in settings(seeds=2, ranks=2, warps=2):
        assert Setting.of(setting.mode, setting.seed, setting.schedule) == setting


def test_places_in_the_source():
    ptx = '.entry k() {\nmov.b32 %r0, 1;\n.loc 1 12 3\nmov.b32 %r1, 1;\n}\n.file 1 "/a/b/gemm.py"\n'
    assert [place(ptx, n) for n in (2, 4, 6)] == ["2", "4 (gemm.py:12)", "6"]
    assert place("mov.b32 %r0, 1;", 1) == "1"


# --- the pytest plugin ---


def test_what_a_mark_asks_for():
    assert [(s.mode, s.schedule) for s in settings_of(modes="lazy")] == [
        ("lazy", "round_robin"), ("lazy", "shuffled"),
    ]  # fmt: skip
    assert len(settings_of(seeds=2)) == 11, "immediate in round robin has no random choices"
    with pytest.raises(ValueError, match="schedule 'fast'"):
        settings_of(schedules=("fast",))


def test_marked_tests_run_in_every_mode(pytester):
    pytester.makepyfile(
        textwrap.dedent(KERNEL)
        + textwrap.dedent("""
        import pytest

        @pytest.mark.emulated(arch="sm_90a", modes=("immediate", "lazy"))
        @pytest.mark.parametrize("meets", [True, False])
        def test_reverse(emulator, meets):
            assert emulator.device.arch == "sm_90a"
            check(meets)

        @pytest.mark.emulated(ranks=2, modes="random", schedules="round_robin", num_sms=5)
        def test_ranks(emulator):
            assert emulator.ranks == 2 and emulator.device.num_sms == 5
        """)
    )
    done = pytester.runpytest_subprocess("-p", "cute_emulator.pytest_plugin", "-q")
    done.assert_outcomes(passed=5, failed=4)
    done.stdout.fnmatch_lines(["*test_reverse*immediate-0-round_robin*"])


def test_a_warning_of_every_run_is_shown_once(tmp_path):
    script = tmp_path / "warns.py"
    script.write_text("import warnings\nwarnings.warn('slow path')\nwarnings.warn('another')\n")
    done = run("check", "--seeds", 1, script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning: slow path") == done.stderr.count("UserWarning: another") == 1
