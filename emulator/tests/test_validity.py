"""The list of what the ISA leaves undefined: each line does what it says."""

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from cute_emulator.conformance import CASES, Kernel
from cute_emulator.errors import EmulatorError, KernelTrap, UnsupportedInstruction
from cute_emulator.instructions.warpgroup import POISON
from cute_emulator.rules import KINDS, ptx

from .handwritten import aligned, run

FOLDER = Path(__file__).parents[1]
PAGE = (FOLDER / "docs" / "validity.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.split("|---|---|---|\n")[1].splitlines()
    if line.startswith("|")
]
WORDS = ("error", "refused", "poison", "value", "deadlock", "not judged")
SMEM = ".shared .align 1024 .b8 buf[4096]; .shared .align 8 .b8 bar[64];"
SETUP = "mov.u32 %r0, %tid.x; mov.b32 %r10, buf; mov.b32 %r11, bar; setp.eq.b32 %p0, %r0, 0;\n"
TEXTS = json.loads((FOLDER / "tests" / "data" / "validity.json").read_text())
"""Clause -> PTX that breaks it, or the file of its test."""
WITH_PTX = [(clause, here, TEXTS[clause]) for _, clause, here in ROWS if ";" in TEXTS.get(clause, "")]


def test_each_line_names_a_rule_or_what_becomes_of_it():
    assert len(ROWS) > 110 and TEXTS.keys() <= {clause for _, clause, _ in ROWS}
    for section, clause, here in ROWS:
        assert re.fullmatch(r"9\.7(\.\d+)+", section), section
        kinds = re.findall(r"`([a-z-]+)`", here)
        assert set(kinds) <= set(KINDS) and (kinds or here in WORDS), (clause, here)
        test = TEXTS.get(clause, "")
        assert ";" in test or (FOLDER / "tests" / test).exists(), clause
        assert kinds or (here == "not judged") != bool(test), clause


def test_rules_of_the_list_have_pairs_or_tests():
    """A rule without a pair in the suite is planted in a test of its own."""
    named = {kind for _, _, here in ROWS for kind in re.findall(r"`([a-z-]+)`", here)}
    paired = {kind for case in CASES for kind in case.kinds}
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert [kind for kind in named - paired if f'"{kind}"' not in tests] == []


@pytest.mark.parametrize(("clause", "here", "ptx"), WITH_PTX, ids=[row[0][:50] for row in WITH_PTX])
def test_a_line_does_what_it_says(clause, here, ptx):
    def go():
        return run(SETUP + ptx, [aligned(64)], smem=SMEM, cluster=(1, 1, 1))

    if here == "value":
        assert go().report.findings == []
        return
    with pytest.raises(EmulatorError) as found:
        go()
    assert isinstance(found.value, UnsupportedInstruction) == (here == "refused"), found.value
    assert found.value.line or re.search(r"lines? \d", str(found.value)), found.value


@pytest.mark.parametrize("waits", [False, True])
def test_d_of_a_wgmma_in_flight_is_poison(waits):
    before, after = ("", ptx.WAIT) if not waits else (ptx.WAIT, "")
    body = f"""
    {ptx.READY} {ptx.WGMMA_FENCE} {ptx.SS.replace("|S|", "0")} {ptx.END}
    {before} mov.b32 %r50, %f0; setp.eq.b32 %p20, %r50, {POISON}; @%p20 trap; {after}
    """
    trapped = contextlib.nullcontext() if waits else pytest.raises(KernelTrap)
    with trapped:
        Kernel((body,), **ptx.SM90).run()


def test_an_operand_beyond_shared_memory_ends_the_run_with_its_bytes():
    start = 0x37000 >> 4
    body = f"""
    mov.b64 %d20, {0x4000400800010000 | start}; mov.b32 %r21, 0x4080490; setp.ne.b32 %p14, %r0, %r0;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 32;
    @%p0 tcgen05.mma.cta_group::1.kind::f16 [0], %d20, %d20, %r21, %p14;
    """
    with pytest.raises(EmulatorError, match=r"an operand occupies bytes 0x37000 to .* ends at 0x\w+"):
        run(SETUP + body, [np.zeros(1, np.uint32)], smem=SMEM)
