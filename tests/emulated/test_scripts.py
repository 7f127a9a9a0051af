"""Failures in a script of several ranks, written for GPUs: it is told what it would be told on them."""

import textwrap

import pytest

from cute_emulator.testing import emulator_command

SCRIPT = """
    import torch, overlap_gemm

    world = overlap_gemm.init()
    x, weight = torch.ones(2, 64, 64, dtype=torch.bfloat16, device=world.device)
    out = overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(world.rank, type(error).__name__)
        if world.rank == 0:  # the dead one has nothing to say
            overlap_gemm.gemm_reduce_scatter(x, weight, backend="fused")
    else:
        assert (out == 128).all()
        print("RIGHT", world.rank)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_it_runs(script):
    done = emulator_command("--arch", "sm_90a", "--ranks", 2, script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["RIGHT 0", "RIGHT 1"]


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_a_dead_rank_is_named_by_the_next_call(arch, script):
    """The kernel's record lies in pinned host memory."""
    done = emulator_command("--arch", arch, "--ranks", 2, "--fault", "kill:rank=1", script)
    assert done.returncode == 1 and "0 KernelTrap" in done.stdout, done.stdout + done.stderr
    assert "CommTimeoutError: gemm_reduce_scatter: rank 0" in done.stderr, done.stderr
    assert "Rank 1 has exited, is stalled" in done.stderr
