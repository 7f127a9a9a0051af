"""Findings about the host and its streams: they name lines of the script, and are no clean verdict."""

import pytest

from cute_emulator.conformance import CASES
from cute_emulator.conformance.script import COPY, Script
from cute_emulator.testing import emulator_command

SCRIPTS = [case for case in CASES if isinstance(case.broken, Script)]

SCRIPT = f"""
import sys, torch
from cute_emulator import Emulator
COPY = '''{COPY}'''
def copy(out, source, stream):
    handle = stream.cuda_stream
    Emulator.current().launch(COPY, "copy", (1, 1, 1), (64, 1, 1), [out, source], stream=handle)
x, y, z = (torch.ones(64, device="cuda") for _ in range(3))
one, two = torch.cuda.Stream(), torch.cuda.Stream()
torch.cuda.synchronize()
copy(y, x, one)
if "fixed" in sys.argv:
    two.wait_stream(one)
copy(z, y, two)
torch.cuda.synchronize()
"""


def test_check_finds_a_race_of_two_streams(tmp_path):
    (tmp_path / "two.py").write_text(SCRIPT)
    done = emulator_command("check", "--seeds", "0", tmp_path / "two.py")
    assert done.returncode == 1 and "[race] no event, wait_stream, or release" in done.stdout, done.stderr
    assert "launched by two.py" in done.stdout
    done = emulator_command("check", "--seeds", "0", tmp_path / "two.py", "fixed")
    assert done.returncode == 0 and "all clean" in done.stdout


@pytest.mark.parametrize("case", SCRIPTS, ids=lambda case: case.name)
def test_a_hazard_of_the_host_is_one_kind_and_names_the_scripts_line(case):
    findings = case.broken.run().report.findings
    assert {finding.kind for finding in findings} == set(case.kinds)
    assert all(f"{case.name}.py:" in str(finding) for finding in findings)


def test_there_are_pairs_of_the_host():
    assert len(SCRIPTS) >= 22
