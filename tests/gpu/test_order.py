"""One order of a device's fused launches: streams, captures, replays, graphs that outlive workspaces."""

from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.runtime.failures import CommTimeoutError, OverlappingCallsError
from overlap_gemm.runtime.memory.workspace import raise_if_failed, workspaces
from overlap_gemm.runtime.order import CaptureError
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from overlap_gemm.testing.emulated import judge
from overlap_gemm.tuning.settings import configured
from tests.support.ranks import Ranks

WORLDS = [size for size in (2, 4) if size <= torch.cuda.device_count()]
pytestmark = pytest.mark.parametrize("world", WORLDS)

SMALL = Case("gemm_reduce_scatter", 256, 256, 256, torch.bfloat16, bias=False)
LARGE = Case("gemm_reduce_scatter", 4096, 4096, 2048, torch.bfloat16, bias=False, seed=1)
"""Of two size classes; the large one fills the device."""


class Call:
    """This rank's part of a case in a group: its operands, and its result's judgement among all ranks."""

    def __init__(self, case, group=None):
        rank, size, layout = dist.get_rank(group), dist.get_world_size(group), LAYOUTS[case.op]
        self.case, self.group = case, group
        self.given = operands(case).to(torch.device("cuda", torch.cuda.current_device()))
        self.x = layout.part(self.given.x, layout.x, rank, size).contiguous()
        self.weight = layout.part(self.given.weight, layout.weight, rank, size).contiguous()

    def __call__(self):
        return overlap_gemm.gemm_reduce_scatter(self.x, self.weight, group=self.group, backend="fused")

    def assert_right(self, out):
        outs = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(outs, out.cpu(), group=self.group)
        verdict = judge(self.case, self.given, [part.to(out.device) for part in outs], torch.bfloat16)
        assert verdict.holds, verdict


def calls(group=None):
    """A small and a large call, compiled and allocated."""
    made = [Call(case, group) for case in (SMALL, LARGE)]
    for call in made:
        call.assert_right(call())
    assert len(workspaces(group)) >= 2
    return made


def captured(body):
    """A graph of `body`, and what it returned."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = body()
    return graph, out


def streams_and_classes(rank, size, pairs):
    """Calls of two size classes on two streams, of which no rank waits for the other stream.

    Args:
        rank: of this process.
        size: of the world.
        pairs: whether every second call is one of a pair of ranks, and not of the world.
    """
    groups = [dist.new_group([first, first + 1]) for first in range(0, size, 2)] if pairs else []
    both = [calls(), calls(groups[rank // 2])] if pairs else [calls()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    queued = []
    for turn in range(24):
        call = both[turn // 2 % len(both)][turn % 2]
        with torch.cuda.stream(streams[turn // 2 % 2 if rank % 2 else turn % 2]):
            if turn % 5 == rank:
                torch.cuda._sleep(3_000_000)
            queued.append((call, call()))
    torch.cuda.synchronize()
    right = {}
    for call, out in queued:
        if call not in right:
            call.assert_right(out)
        assert torch.equal(out, right.setdefault(call, out))
    overlap_gemm.close_workspaces()


def branches(rank, size):
    """Two branches of one graph hold a call each."""
    small, large = calls()
    side = torch.cuda.Stream()

    def fork():
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            first = large()
        second = small()
        with torch.cuda.stream(side):
            third = small()
        main.wait_stream(side)
        return first, second, third

    graph, outs = captured(fork)
    for _ in range(8):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for call, out in zip((large, small, small), outs, strict=True):
            call.assert_right(out)
    # After the graph, on its stream and on another one that waits for it.
    graph.replay()
    small.assert_right(small())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = large()
    torch.cuda.synchronize()
    large.assert_right(out)
    del graph
    overlap_gemm.close_workspaces()


def replay_beside_a_call(rank, size):
    """Both leave the other room, so that they do run at once; returns the error's name.

    The replay is on another stream than the last call: a call's stream would wait for that one's.
    """
    with configured(reserve_sms=torch.cuda.get_device_properties(rank).multi_processor_count - 16):
        small, large = calls()
        graph, _ = captured(lambda: [large() for _ in range(8)])
        side = torch.cuda.Stream()
        dist.barrier()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.replay()
        small()
    with suppress(RuntimeError):  # the kernel's trap
        torch.cuda.synchronize()
    try:
        raise_if_failed()
    except (OverlappingCallsError, CommTimeoutError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def graph_that_outlives_its_workspace(rank, size):
    small, large = calls()
    larger = Call(Case("gemm_reduce_scatter", 16384, 4096, 64, torch.bfloat16, bias=False))
    larger.assert_right(larger())
    graph, out = captured(small)
    before = overlap_gemm.workspace_bytes()
    overlap_gemm.close_workspaces()
    kept = overlap_gemm.workspace_bytes()
    assert 0 < kept < before, "the one in the graph stays, the largest is freed"
    torch.cuda.empty_cache()
    others = torch.full((1 << 28,), 7, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        small.assert_right(out)
        small.assert_right(small())
    assert bool((others == 7).all())
    large.assert_right(large())
    del graph
    overlap_gemm.close_workspaces()


def unprepared_capture(rank, size):
    """Refused before anything is captured or exchanged, on every rank, and right once it is prepared."""
    call = Call(Case("gemm_reduce_scatter", 3000, 640, 128, torch.bfloat16, bias=False))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except CaptureError as error:
        assert "overlap_gemm.warmup" in str(error)
    else:
        raise AssertionError("it compiled or allocated during capture")
    call.assert_right(call())
    graph, out = captured(call)
    graph.replay()
    torch.cuda.synchronize()
    call.assert_right(out)
    del graph
    overlap_gemm.close_workspaces()


def capture_after_a_call(rank, size):
    """Replays have no host time, so "auto" may capture another backend than it ran; returns such backends."""
    torch.manual_seed(rank)
    others = set()
    for rows, n, k in ((64, 4096, 4096), (512, 6144, 4096), (512, 4096, 14336)):
        shapes = (rows // size, k), (n // size, k)
        made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        call = partial(overlap_gemm.all_gather_gemm, *made, rows=rows, columns=n)
        explain = partial(overlap_gemm.explain, "all_gather_gemm", *made, rows=rows, columns=n)
        eager = call()
        graph, (out, choice) = captured(lambda call=call, explain=explain: (call(), explain()))
        others |= {choice.backend.name} - {explain().backend.name}
        graph.replay()
        torch.cuda.synchronize()
        assert (out.float() - eager.float()).norm() < 5e-3 * eager.float().norm()
        del graph
    overlap_gemm.close_workspaces()
    return others


@pytest.mark.parametrize("pairs", [False, True], ids=["world", "world-and-pairs"])
def test_two_streams_and_two_size_classes(ranks, world, pairs):
    ranks(world).run(streams_and_classes, pairs)


def test_branches_of_a_graph(ranks, world):
    ranks(world).run(branches)


def test_a_graph_may_outlive_its_workspace(ranks, world):
    ranks(world).run(graph_that_outlives_its_workspace)


def test_a_capture_of_what_is_not_prepared_says_so(world):
    with Ranks(world, device="cuda", timeout=20) as fresh:
        fresh.run(unprepared_capture)


def test_a_call_is_enough_before_a_capture(world):
    with Ranks(world, device="cuda", timeout=20) as fresh:
        others = fresh.run(capture_after_a_call)
    assert all(others), "no captured call took another backend"


def test_a_replay_beside_a_call_is_an_error_by_name(world):
    """It costs the processes their CUDA contexts."""
    with Ranks(world, device="cuda", timeout=20) as throwaway:
        found = throwaway.run(replay_beside_a_call)
    names = [name for name, _ in found]
    # A rank whose peer has given up in time sees no overlap, but a peer that does not answer.
    assert "OverlappingCallsError" in names and set(names) <= {"OverlappingCallsError", "CommTimeoutError"}
    assert all("wait_stream" in words for name, words in found if name == "OverlappingCallsError")
