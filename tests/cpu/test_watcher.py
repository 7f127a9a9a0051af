"""A failure record is named on stderr although nobody calls again."""

import os
import subprocess
import sys

import pytest

CODE = """
import time, torch
from types import SimpleNamespace
from overlap_gemm.device.failure import RECORD_WORDS, Role
from overlap_gemm.runtime.memory.workspace import SizeClass, Workspace
record = torch.zeros(RECORD_WORDS, dtype=torch.int32)
for _ in range(2):  # workspaces of one executor share a record
    workspace = Workspace(None, SizeClass(64, 64, 1, 1), None, True, record)
    workspace.watch()
record[1:] = torch.tensor([3, 1, Role.CALL_ENTERED, 5, 2, 7, 9, 0, 8, 0])
time.sleep(0.3)
print("before", flush=True)
record[0] = 1
time.sleep(1)
"""


@pytest.mark.parametrize("switch", [None, "0"])
def test_a_record_is_named_once_although_no_call_follows(switch):
    env = {name: value for name, value in os.environ.items() if name != "OVERLAP_GEMM_WATCH"}
    env |= {} if switch is None else {"OVERLAP_GEMM_WATCH": switch}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("overlap_gemm: ")]
    assert len(lines) == (switch is None), done.stderr
    assert done.stdout == "before\n"
    if lines:
        assert "rank 3 (call_entered) gave up on rank 2" in lines[0], lines
