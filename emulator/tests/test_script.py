"""``python -m cute_emulator``: scripts written for GPUs run unchanged."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cute_emulator.testing import emulator_command

ONE_GPU = """
    import argparse, sys
    import cuda.bindings.driver as cuda
    import cutlass, cutlass.cute as cute, torch
    from cutlass import testing
    from cutlass.cute.runtime import from_dlpack
    from cutlass.utils import HardwareInfo
    from kernels_simple import scale

    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=10)
    n = parser.parse_args().n
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == (9, 0), torch.cuda.get_device_capability()
    side = torch.cuda.Stream()
    src = torch.randn(n, device="cuda")
    dst = torch.empty_like(src)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        arguments = [from_dlpack(t).mark_layout_dynamic() for t in (src, dst)] + [3.0, n, stream]
        compiled = cute.compile(scale, *arguments)
        begin.record()
        compiled(*arguments)
        end.record()
    torch.cuda.synchronize()
    torch.testing.assert_close(dst, src * 3)
    torch.testing.assert_close(dst.cpu(), src.cpu() * 3)
    assert begin.elapsed_time(end) > 0
    us = testing.benchmark(
        compiled, workspace_generator=lambda: testing.JitArguments(*arguments), workspace_count=4,
        warmup_iterations=2, iterations=100, stream=stream)
    assert us > 0
    assert HardwareInfo().get_max_active_clusters(1) == 132
    print("PASS", n)
"""

SEVERAL = """
    import os
    import cuda.bindings.driver as cuda
    import cutlass, cutlass.cute as cute, torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem
    from cutlass.cute.runtime import from_dlpack
    from kernels_simple import send_left

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, ranks)

    class Storage:  # as a struct of the DSL is stated
        stages: cutlass.Int32

    assert Storage.__annotations__ == {"stages": cutlass.Int32}, "evaluated, unless the script says otherwise"
    inbox = symm_mem.empty(4, dtype=torch.int32, device="cuda")
    flag = symm_mem.empty(1, dtype=torch.int32, device="cuda")
    flag.zero_()
    boxes, flags = (symm_mem.rendezvous(t, dist.group.WORLD) for t in (inbox, flag))
    dist.barrier(device_ids=[rank])
    left = (rank - 1) % ranks
    table = torch.tensor([boxes.buffer_ptrs[left], flags.buffer_ptrs[left]], device="cuda")
    out = torch.empty(4, dtype=torch.int32, device="cuda")
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    arguments = [*map(from_dlpack, (table, inbox, flag, out)), cutlass.Int32(100 + rank), stream]
    compiled = cute.compile(send_left, *arguments)
    compiled(*arguments)
    torch.cuda.synchronize()
    assert out.tolist() == [100 + (rank + 1) % ranks] * 4, out
    total = torch.tensor([float(rank)], device="cuda")
    dist.all_reduce(total)
    assert total.item() == ranks * (ranks - 1) / 2
    everyone = [None] * ranks
    dist.all_gather_object(everyone, rank)
    assert everyone == list(range(ranks))
    print(f"rank {rank} done")
    dist.destroy_process_group()
"""


def emulate(tmp_path, text, *options, arguments=()):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return emulator_command(*options, script, *arguments, env={"PYTHONPATH": path})


@pytest.mark.parametrize("mode", ["immediate", "lazy"])
def test_a_script_for_one_gpu(tmp_path, mode):
    result = emulate(tmp_path, ONE_GPU, "--arch", "sm_90a", "--mode", mode, arguments=["--n", "300"])
    assert (result.returncode, result.stdout) == (0, "PASS 300\n"), result.stderr
    assert "warp instructions" in result.stderr


def test_a_script_for_several_ranks(tmp_path):
    result = emulate(tmp_path, SEVERAL, "--ranks", "3", "--mode", "random", "--seed", "5")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"rank {r} done" for r in range(3)]


def test_each_rank_has_a_current_stream_of_its_own(tmp_path):
    text = """
    import torch
    import torch.distributed as dist
    dist.init_process_group("nccl")
    rank, default = dist.get_rank(), torch.cuda.default_stream()
    assert default.device.index == rank
    own = torch.cuda.Stream()
    with torch.cuda.stream(own if rank == 0 else None):
        dist.barrier()  # rank 1 comes here while rank 0 is inside
        assert torch.cuda.current_stream() == (own if rank == 0 else default)
        with torch.cuda.stream(own):
            dist.barrier()
            assert torch.cuda.current_stream() == own
    dist.barrier()
    assert torch.cuda.current_stream() == default
    """
    result = emulate(tmp_path, text, "--ranks", "2")
    assert result.returncode == 0, result.stderr


def test_a_failing_check_of_a_script_fails_the_command(tmp_path):
    result = emulate(tmp_path, ONE_GPU.replace("src * 3)", "src * 4)"), "--arch", "sm_90a")
    assert result.returncode == 1
    assert "Tensor-likes are not close" in result.stderr


def test_a_failing_rank_fails_the_command(tmp_path):
    result = emulate(tmp_path, SEVERAL.replace("100 + rank)", "90 + rank)"), "--ranks", "2")
    assert result.returncode == 1
    assert "\nAssertionError: tensor([9" in result.stderr


def test_a_fault_on_purpose_is_done_and_counted(tmp_path):
    result = emulate(tmp_path, SEVERAL, "--ranks", "2", "--fault", "drop:flag:source=0", "--limit", "100000")
    assert result.returncode == 1
    assert "kind='flag') acted on 1 stores" in result.stderr
    wrong = emulate(tmp_path, SEVERAL, "--ranks", "2", "--fault", "lose")
    assert wrong.returncode == 2 and "must read drop|delay|duplicate" in wrong.stderr


def test_exit_codes_pass_through(tmp_path):
    assert emulate(tmp_path, "import sys; sys.exit(5)").returncode == 5
    assert emulate(tmp_path, "import sys; sys.exit(6)", "--ranks", "2").returncode == 6


def test_a_missing_script_is_named(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "cute_emulator", "nowhere.py"], capture_output=True, text=True
    )
    assert result.returncode != 0 and "no script nowhere.py" in result.stderr


@pytest.mark.parametrize("command", [(), ("check",)])
def test_a_kind_that_is_not_found_cannot_be_ignored(tmp_path, command):
    script = tmp_path / "empty.py"
    script.write_text("")
    done = emulator_command(*command, "--ignore", "exit-pendign", script)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("emulator: no findings are of kind 'exit-pendign'; kinds: ") and "exit-tx" in line
