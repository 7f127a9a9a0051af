"""What a launch takes of the device, as the report says."""

import pytest

from cute_emulator.testing import emulator_command

from .handwritten import aligned, launch, machine, module
from .test_front_door import blocks

SMEM = ".shared .align 16 .b8 room[{}];"
CASES = {
    "few threads": ((32, 1, 1), 0, "", 0, 32, "the CTAs an SM holds"),
    "threads": ((33, 16, 1), 16, "", 0, 2048 // 544, "threads"),
    "shared memory": ((32, 1, 1), 40_000, "", 0, 233_472 // 41_024, "shared memory"),
    "registers": ((128, 1, 1), 64, ".maxnreg 200", 200, 65_536 // (128 * 200), "registers"),
}


@pytest.mark.parametrize("name", CASES)
def test_usage(name):
    block, smem, directive, registers, per_sm, bound = CASES[name]
    text = module("", 0, SMEM.format(smem) if smem else "").replace("k()", f"k() {directive}")
    run = machine([])
    for _ in range(2):
        run.submit(launch(text, [], block=block, grid=(4, 1, 1), cluster=(2, 1, 1)))
    run.run()
    ((usage, times),) = run.report.usage.items()
    assert times == 2 and (usage.entry, usage.grid, usage.cluster) == ("k", (4, 1, 1), (2, 1, 1))
    assert usage.block == block
    assert (usage.smem, usage.registers, usage.per_sm, usage.bound) == (smem, registers, per_sm, bound)


def test_coverage_of_instructions_and_of_rules():
    body = "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 64; @%p0 bra SHORT; bar.sync 0; SHORT: {}"
    store = "st.global.b32 [%d0], %r0;"
    for more, kinds in (("", {}), (store, {"race": 1, "lane-race": 1})):
        out = aligned(8)
        m = machine([out])
        m.submit(launch(module(body.format(more), 1), [out]))
        m.run()
        (found,) = m.report.coverage
        assert found.instructions - found.ran == 1 and "bar" not in str(found)
        assert {kind: n for kind, n in found.judged.items() if n} == kinds
        m.submit(launch(module(body.format(more), 1), [out], block=(96, 1, 1)))
        m.run()
        (found,) = m.report.coverage  # of both launches
        assert found.instructions == found.ran and found.judged["barrier-exit"] == 1


def test_a_command_prints_it(tmp_path):
    (script,) = blocks("Run a kernel", "python")
    (tmp_path / "mirror.py").write_text(script)
    done = emulator_command("--usage", tmp_path / "mirror.py")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "1 x " in line]
    assert "block (64, 1, 1)" in line and "256 bytes of shared memory, registers unknown" in line
    assert "32 CTAs on an SM, bound by the CTAs an SM holds" in line
    (line,) = [line for line in done.stderr.splitlines() if "instructions ran" in line]
    ran, _, every, *_ = line.split(": ")[2].split()
    assert ran == every
    judged = "barrier-divergent 1, barrier-exit 1, lane-race 4, race 2, shared-race 2"
    assert f"instructions judged by rules: {judged}" in line


def test_python_lines_that_no_warp_came_to_are_named(tmp_path):
    (script,) = blocks("Run a kernel", "python")
    text = script.replace(
        "    cute.arch.sync_threads()\n",
        "    cute.arch.sync_threads()\n    if x[0] > 1.0:\n        y[0] = x[1]\n",
    )
    (tmp_path / "mirror.py").write_text(text)
    done = emulator_command("--usage", tmp_path / "mirror.py")
    (line,) = [line for line in done.stderr.splitlines() if "instructions ran" in line]
    missed = next(n for n, line in enumerate(text.splitlines(), 1) if line.endswith("y[0] = x[1]"))
    assert f"Python lines that did not run: mirror.py:{missed};" in line
