"""What a launch takes of the device, as the report says."""

import pytest

from cute_emulator.testing import emulator_command

from .handwritten import launch, machine, module
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


def test_a_command_prints_it(tmp_path):
    (script,) = blocks("Run a kernel", "python")
    (tmp_path / "mirror.py").write_text(script)
    done = emulator_command("--usage", tmp_path / "mirror.py")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "1 x " in line]
    assert "block (64, 1, 1)" in line and "256 bytes of shared memory, registers unknown" in line
    assert "32 CTAs on an SM, bound by the CTAs an SM holds" in line
