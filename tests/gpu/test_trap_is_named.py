"""The failure record of a kernel that traps is named by another process, whatever this one does."""

import os
import subprocess
import sys
import time

HOLDS_THE_LOCK = """
import ctypes, os, torch, overlap_gemm
from overlap_gemm.runtime.virtual import VirtualWorld

x, weight = (torch.randn(rows, 64, device="cuda").bfloat16() for rows in (256, 64))
world = VirtualWorld(2, device=torch.device("cuda", 0))
out = overlap_gemm.gemm_reduce_scatter(x, weight, group=world.names[0], backend="fused")  # rank 1 never calls
print("launched", flush=True)
ctypes.PyDLL(None).usleep(5_000_000)  # PyDLL: no thread of Python runs until then
os.abort()
"""


def test_a_trap_is_named_while_c_code_holds_the_interpreters_lock():
    env = os.environ | {"OVERLAP_GEMM_TIMEOUT": "1", "OVERLAP_GEMM_WATCH": "1"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLDS_THE_LOCK]
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "launched\n"
        launched = time.monotonic()
        named = next((line for line in process.stderr if line.startswith("overlap_gemm: ")), "")
        seconds, is_running = time.monotonic() - launched, process.poll() is None
        process.kill()
    assert "CommTimeoutError: gemm_reduce_scatter: rank 0 " in named and "gave up on rank 1" in named, named
    assert is_running and seconds < 1 + 1.5, seconds  # the kernel's limit, and a second
