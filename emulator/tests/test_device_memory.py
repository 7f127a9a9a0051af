"""What a script finds on an emulated GPU: memory like a device's, CUDA graphs, cooperative launches."""

import textwrap

import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_emulator.testing import emulator_command

SCRIPT = """
import sys
import cuda.bindings.driver as cuda
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(src: cute.Tensor, dst: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    dst[tid] = src[tid] * 2 + dst[tid]

@cute.jit
def add(src: cute.Tensor, dst: cute.Tensor, n: cutlass.Int32, stream: cuda.CUstream):
    kernel(src, dst).launch(grid=(n, 1, 1), block=(128, 1, 1), stream=stream, cooperative=True)

def stream():
    return cuda.CUstream(torch.cuda.current_stream().cuda_stream)

def run(n=1):
    add(from_dlpack(src), from_dlpack(dst), n, stream())

src, dst = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
"""

GRAPH = """
side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    assert torch.cuda.is_current_stream_capturing()
    src.add_(1)
    run()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    out = dst * 10
assert not torch.cuda.is_current_stream_capturing()
assert (src == 1).all() and (dst == 0).all(), "a capture does nothing"
graph.replay()
torch.cuda.synchronize()
assert (src == 2).all() and (dst == 8).all() and (out == 80).all()
src.fill_(0)
graph.replay()
assert (src == 1).all() and (dst == 12).all() and (out == 120).all()
"""

BESIDE = """
@cute.kernel
def gated(flag: cute.Tensor, src: cute.Tensor, dst: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    if tid == 0:
        seen = cutlass.Int32(0)
        while seen == 0:
            seen = cute.arch.load(flag.iterator, cutlass.Int32, sem="acquire", scope="sys")
    cute.arch.sync_threads()
    dst[tid] = src[tid] + 1

@cute.jit
def consume(flag: cute.Tensor, src: cute.Tensor, dst: cute.Tensor, stream: cuda.CUstream):
    gated(flag, src, dst).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

flag, one = (torch.full((1,), n, dtype=torch.int32, device="cuda") for n in (0, 1))
first, inbox, late = (torch.full((128,), -7.0, device="cuda") for _ in range(3))
copies, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
begin, copied = torch.cuda.Event(), torch.cuda.Event()
with torch.cuda.graph(graph):
    flag.zero_()
    first.zero_()
    add(from_dlpack(src), from_dlpack(first), 1, stream())
    begin.record()
    consume(from_dlpack(flag), from_dlpack(inbox), from_dlpack(dst), stream())
    copies.wait_event(begin)
    for to, source, size in ((inbox, first, 512), (flag, one, 4), (late, first, 512)):
        cuda.cuMemcpyDtoDAsync(to.data_ptr(), source.data_ptr(), size, copies.cuda_stream)
    copied.record(copies)
    copied.wait()
    add(from_dlpack(late), from_dlpack(dst), 1, stream())
for n in (1, 5):
    src.fill_(n)
    graph.replay()
    assert (inbox == 2 * n).all() and (dst == 6 * n + 1).all() and (flag == 1).all()
"""

MEMORY = """
for extra in range(40):
    made = torch.randn(7 + extra, 9, device="cuda", requires_grad=bool(extra % 2))
    half, turned = made.to(torch.float16), (made * 2).t().contiguous()
    for tensor in (made, half, turned, *torch.sort(made, dim=0), torch.nn.Linear(3, 3).cuda().weight):
        assert tensor.is_cuda and tensor.data_ptr() % 256 == 0
    assert torch.split(made, 3)[0].data_ptr() == made.data_ptr()
    torch.testing.assert_close(half.float(), made.half().float())
    if made.requires_grad:
        turned.sum().backward()
        torch.testing.assert_close(made.grad.cpu(), torch.full((7 + extra, 9), 2.0))
empty = torch.empty(0, 4, device="cuda")
assert empty.is_cuda and from_dlpack(empty).shape == (0, 4)
assert str(from_dlpack(src).memspace) == str(cute.AddressSpace.gmem)
"""

PINNED = """
@cute.kernel
def record(address: cutlass.Int64):
    tid, _, _ = cute.arch.thread_idx()
    word = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=4) + tid
    cute.arch.store(word, cutlass.Int32(cute.arch.load(word, cutlass.Int32) + tid))

@cute.jit
def note(address: cutlass.Int64, stream: cuda.CUstream):
    record(address).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

host = torch.ones(32, dtype=torch.int32, pin_memory=sys.argv[1] == "pinned")
assert not host.is_cuda
note(host.data_ptr(), stream())
torch.cuda.synchronize()
assert host.tolist() == list(range(1, 33))
"""
"""A kernel that knows host memory by its address alone."""

COOPERATIVE = """
from cutlass.base_dsl.common import DSLCudaRuntimeError
run(32)
try:
    run(33)
except DSLCudaRuntimeError as error:
    assert error.error_code == 720 and "cooperative launch of 33 CTAs" in str(error)
else:
    raise AssertionError("more CTAs than 2 SMs hold, each 16 of 128 threads")
"""


BODIES = {"graph": GRAPH, "memory": MEMORY}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("graph", 2),
        ("memory", 1),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("graph", 1), ("memory", 2))),
    ],
)
def test_scripts_find_a_device(name, ranks, tmp_path):
    body = BODIES[name]
    copies = BESIDE if body is GRAPH and ranks == 2 else ""
    _run(body + copies, tmp_path, "--ranks", ranks)


def test_a_cooperative_launch_of_the_dsl_runs_or_is_refused(tmp_path):
    # Its CTAs add to the same elements, and are told that they race.
    _run(COOPERATIVE, tmp_path, "--num-sms", 2, "--collect", status=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_touch_pinned_host_memory(ranks, tmp_path):
    _run(PINNED, tmp_path, "--ranks", ranks, words=["pinned"])


def test_kernels_do_not_touch_other_host_memory(tmp_path):
    script = _script(PINNED, tmp_path)
    done = emulator_command(script, "pageable")
    assert done.returncode == 1 and "MemoryFault" in done.stderr, done.stdout + done.stderr


def _script(body, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT + body) + "\nprint('reached the end')\n")
    return script


def _run(body, tmp_path, *options, words=(), status=0):
    done = emulator_command(*options, _script(body, tmp_path), *words)
    assert done.returncode == status and "reached the end" in done.stdout, done.stdout + done.stderr


def test_a_tensor_given_to_the_dsl_lies_in_global_memory_while_an_emulator_is_open(emulate):
    tensor = torch.zeros(8)
    assert "generic" in str(from_dlpack(tensor))
    emulate("sm_90a")
    assert "gmem" in str(from_dlpack(tensor)) and tensor.device.type == "cpu"
