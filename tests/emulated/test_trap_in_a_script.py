"""The failure record of a kernel of a script is named by another process."""

import textwrap

from cute_emulator.testing import emulator_command

MISSING_PEER = """
    import time, torch, overlap_gemm

    world = overlap_gemm.init()
    x, weight = torch.ones(2, 64, 64, dtype=torch.bfloat16, device=world.device)
    for _ in range(2 - world.rank):
        out = overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")
    try:
        torch.cuda.synchronize()
    finally:
        time.sleep(0.5)
"""
"""Program of each rank, of which the second makes one call less."""


def test_a_missing_peer_is_named_on_stderr_by_another_process(tmp_path):
    file, env = tmp_path / "script.py", {"OVERLAP_GEMM_TIMEOUT": "0.2", "OVERLAP_GEMM_WATCH": "1"}
    file.write_text(textwrap.dedent(MISSING_PEER))
    done = emulator_command("--arch", "sm_90a", "--ranks", 2, file, env=env)
    assert done.returncode
    named = [line for line in done.stderr.splitlines() if line.startswith("overlap_gemm: ")]
    assert len(named) == 1, done.stderr
    assert "CommTimeoutError: gemm_reduce_scatter: rank 0 " in named[0] and "gave up on rank 1" in named[0]
