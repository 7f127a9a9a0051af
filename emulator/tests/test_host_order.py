"""The host and its streams as parties: each hazard is found, its twin is silent."""

import pytest
import torch
from cuda.bindings import runtime

from cute_emulator import Emulator, FindingsError
from cute_emulator.host.script import one_device
from cute_emulator.testing import emulator_command

COPY = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 out, .param .u64 in)
{
    .reg .b64 %d<8>; .reg .b32 %r<4>;
    ld.param.u64 %d1, [out]; ld.param.u64 %d2, [in]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4;
    add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3; ld.global.b32 %r2, [%d2]; st.global.b32 [%d1], %r2;
    ret;
}
"""
N = 64


def copy(out, source, stream=None):
    """A kernel that copies `source` to `out`, in a stream, the current one by default."""
    handle = (stream or torch.cuda.current_stream()).cuda_stream
    Emulator.current().launch(COPY, "copy", (1, 1, 1), (N, 1, 1), [out, source], stream=handle)


def device(fill=1.0):
    return torch.full((N,), fill, device="cuda")


def two_streams(x, y, z, side, mended):
    copy(y, x)
    if mended:
        side.wait_stream(torch.cuda.current_stream())
    copy(z, y, side)


def event_too_early(x, y, z, side, mended):
    event = torch.cuda.Event()
    if not mended:
        event.record()
    copy(y, x)
    if mended:
        event.record()
    side.wait_event(event)
    copy(z, y, side)


def event_never_recorded(x, y, z, side, mended):
    event = torch.cuda.Event()
    copy(y, x)
    if mended:
        event.record()
    event.wait(side)
    copy(z, y, side)


def wrong_way_round(x, y, z, side, mended):
    copy(y, x, side)
    if mended:
        torch.cuda.current_stream().wait_stream(side)
    else:
        side.wait_stream(torch.cuda.current_stream())
    copy(z, y)


def wrong_stream_awaited(x, y, z, side, mended):
    other = torch.cuda.Stream()
    copy(y, x, side)
    (side if mended else other).synchronize()
    copy(z, y)


def torch_beside_a_kernel(x, y, z, side, mended):
    copy(y, x, side)
    if mended:
        torch.cuda.current_stream().wait_stream(side)
    y.add_(1)


def kernel_beside_torch(x, y, z, side, mended):
    with torch.cuda.stream(side):
        if mended:
            side.wait_stream(torch.cuda.default_stream())
        w = y * 2
    if mended:
        torch.cuda.current_stream().wait_stream(side)
    copy(y, x)
    return w


def one_of_two_readers_awaited(x, y, z, side, mended):
    other, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for stream in (side, other):
        stream.wait_stream(main)
        copy(z if stream is side else torch.empty_like(z), x, stream)
    main.wait_stream(other)
    if mended:
        main.wait_stream(side)
    copy(x, y)


def captured(x, y):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy(y, x)
    return graph


def replay_beside_a_kernel(x, y, z, side, mended):
    graph = captured(x, y)
    graph.replay()
    if mended:
        side.wait_stream(torch.cuda.current_stream())
    copy(z, y, side)


def input_changed_under_a_replay(x, y, z, side, mended):
    graph = captured(x, y)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    if mended:
        torch.cuda.current_stream().wait_stream(side)
    x.copy_(z)


def two_graphs(x, y, z, side, mended):
    first, second = captured(x, y), captured(y, z)
    first.replay()
    with torch.cuda.stream(side):
        if mended:
            side.wait_stream(torch.cuda.default_stream())
        second.replay()


def pinned_read_too_early(x, y, z, side, mended):
    host = torch.zeros(N, pin_memory=True)
    copy(y, x)
    host.copy_(y, non_blocking=True)
    if mended:
        torch.cuda.synchronize()
    return host.sum().item()


def to_cpu_read_too_early(x, y, z, side, mended):
    host = x.to("cpu", non_blocking=True)
    if mended:
        torch.cuda.current_stream().synchronize()
    return host.tolist()


def kernel_writes_pinned(x, y, z, side, mended):
    host = torch.zeros(N, pin_memory=True)
    copy(host, x)
    if mended:
        torch.cuda.synchronize()
    return float(host[3])


def pinned_source_overwritten(x, y, z, side, mended):
    host = torch.ones(N).pin_memory()
    y.copy_(host, non_blocking=True)
    if mended:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    host.zero_()


def freed_under_a_kernel(x, y, z, side, mended):
    t = device()
    side.wait_stream(torch.cuda.current_stream())
    copy(z, t, side)
    if mended:
        torch.cuda.current_stream().wait_stream(side)
    del t
    device(2.0)


def reuse_without_record_stream(x, y, z, side, mended):
    t = x * 2
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z.copy_(t)
    if mended:
        t.record_stream(side)
    del t
    u = torch.empty(N, device="cuda")
    copy(u, y)


def pinned_freed_under_a_kernel(x, y, z, side, mended):
    host = torch.ones(N, pin_memory=True)
    copy(y, host)
    if mended:
        torch.cuda.synchronize()
    del host
    torch.empty(N, pin_memory=True).zero_()


def graph_of_freed_memory(x, y, z, side, mended):
    t = x * 3
    graph = captured(t, y)
    torch.cuda.synchronize()
    if not mended:
        del t
    graph.replay()


def launch_in_the_default_stream(x, y, z, side, mended):
    """A kernel that is given no stream, among torch's operations in another one."""
    side.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(side):
        y.mul_(2)
        copy(z, y, side if mended else torch.cuda.default_stream())


def non_blocking_stream(x, y, z, side, mended):
    (status, handle) = runtime.cudaStreamCreateWithFlags(0 if mended else 1)
    assert status == runtime.cudaError_t.cudaSuccess
    y.mul_(2)
    copy(z, y, torch.cuda.ExternalStream(int(handle)))


def neighbouring_columns(x, y, z, side, mended):
    half = x.view(8, 8)
    side.wait_stream(torch.cuda.current_stream())
    half[:, :4].add_(1)
    with torch.cuda.stream(side):
        half[:, 4 if mended else 3 :].add_(1)


HAZARDS = {
    "stream-race": (
        torch_beside_a_kernel, kernel_beside_torch, wrong_stream_awaited,
        replay_beside_a_kernel, input_changed_under_a_replay, two_graphs, launch_in_the_default_stream,
        non_blocking_stream, neighbouring_columns,
    ),
    "race": (two_streams, event_too_early, event_never_recorded, wrong_way_round, one_of_two_readers_awaited),
    "host-race": (
        pinned_read_too_early, to_cpu_read_too_early, kernel_writes_pinned, pinned_source_overwritten,
    ),
    "reuse-race": (freed_under_a_kernel, reuse_without_record_stream, pinned_freed_under_a_kernel,
                   graph_of_freed_memory),
}  # fmt: skip
CASES = [(kind, hazard) for kind, hazards in HAZARDS.items() for hazard in hazards]


def run(hazard, mended, **options):
    with Emulator("sm_90a", **options) as emulator, one_device(emulator):
        side = torch.cuda.Stream()
        x, y, z = device(1.0), device(2.0), device(3.0)
        torch.cuda.synchronize()
        hazard(x, y, z, side, mended)
    return emulator.report


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
if "mended" in sys.argv:
    two.wait_stream(one)
copy(z, y, two)
torch.cuda.synchronize()
"""


def test_check_finds_a_race_of_two_streams(tmp_path):
    (tmp_path / "two.py").write_text(SCRIPT)
    done = emulator_command("check", "--seeds", "0", tmp_path / "two.py")
    assert done.returncode == 1 and "[race] no event, wait_stream, or release" in done.stdout, done.stderr
    assert "launched by two.py" in done.stdout
    done = emulator_command("check", "--seeds", "0", tmp_path / "two.py", "mended")
    assert done.returncode == 0 and "all clean" in done.stdout


@pytest.mark.parametrize(("kind", "hazard"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_hazard_of_the_host_is_found_and_its_twin_is_not(kind, hazard):
    with pytest.raises(FindingsError) as found:
        run(hazard, mended=False)
    assert {finding.kind for finding in found.value.report.findings} == {kind}
    assert "test_host_order.py:" in str(found.value)
    assert run(hazard, mended=True).findings == []
