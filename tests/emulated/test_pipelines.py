"""What a kernel author takes from overlap_gemm.pipelines, in kernels of a few lines."""

from typing import NamedTuple

import cutlass
import pytest
import torch
from cutlass import Float32, Int32, Int64, Uint64, cute, memory, pipeline
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator, EmulatorError
from overlap_gemm.device.failure import Role
from overlap_gemm.pipelines import (
    RECORD_WORDS,
    EpilogueRing,
    Failure,
    FailureSite,
    PipelineTmaStoreAsync,
    WaitBound,
    bulk_store,
    read_record,
    wait_flag,
)
from tests.support.chosen import in_turn

MOST = 9  # stores of one launch, at most


class Shape(NamedTuple):
    stages: int
    inflight: int
    held: int  # stages the consumer waits for before it releases them


@cute.kernel
def hand_over(
    x: cute.Tensor,
    staging: cute.Tensor,
    out: cute.Tensor,
    address: Int64,
    stores: Int32,
    stages: cutlass.Constexpr[int],
    inflight: cutlass.Constexpr[int],
    held: cutlass.Constexpr[int],
):
    """Warp 0 stores rows of 2 x to a staging buffer, a row per stage; warp 1 copies them out."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    smem = memory.SmemAllocator()
    rows = smem.allocate_tensor(Float32, cute.make_layout((32, inflight + 1)), byte_alignment=128)
    barriers = smem.allocate_array(Int64, 2 * stages, byte_alignment=8)
    pipe = PipelineTmaStoreAsync.create(
        num_stages=stages,
        inflight=inflight,
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
        barrier_storage=barriers,
        defer_sync=True,
    )
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == 0:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
        for i in cutlass.range(stores, unroll=1):
            rows[lane, i % (inflight + 1)] = 2 * x[i, lane]
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if lane == 0:
                pipe.producer_acquire(state)
                bulk_store(rows[(None, i % (inflight + 1))], address + Int64(state.index) * 128)
                pipe.producer_commit(state)
            cute.arch.sync_warp()
            state.advance()
        if lane == 0:
            pipe.producer_tail(state)
    else:
        waiting = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
        releasing = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
        for i in cutlass.range(stores, unroll=1):
            pipe.consumer_wait(waiting)
            out[i, lane] = staging[waiting.index, lane]
            waiting.advance()
            if (i + 1) % held == 0:
                for _ in cutlass.range(held, unroll=1):
                    pipe.consumer_release(releasing)
                    releasing.advance()


@cute.jit
def launch(
    x: cute.Tensor,
    staging: cute.Tensor,
    out: cute.Tensor,
    address: Int64,
    stores: Int32,
    shape: cutlass.Constexpr[Shape],
):
    hand_over(x, staging, out, address, stores, *shape).launch(grid=(1, 1, 1), block=(64, 1, 1))


def run(shape, counts, **options):
    with Emulator("sm_90a", **options) as emulator:
        x = torch.randn(MOST, 32, generator=torch.Generator().manual_seed(0))
        for stores in counts:
            staging = emulator.empty((shape.stages, 32), torch.float32)
            out = emulator.empty((MOST, 32), torch.float32)
            tensors = (from_dlpack(t, assumed_align=16) for t in (x, staging, out))
            launch(*tensors, staging.data_ptr(), stores, shape)
            torch.testing.assert_close(out[:stores], 2 * x[:stores], rtol=0, atol=0)
            assert out[stores:].isnan().all()


@pytest.mark.parametrize(("number", "mode"), in_turn(range(4), ["lazy", "random"]))
def test_every_store_is_handed_over_once_and_no_earlier(number, mode):
    shape = (Shape(1, 0, 1), Shape(2, 1, 1), Shape(3, 2, 1), Shape(4, 1, 3))[number]
    run(shape, range(0, MOST + 1, shape.held), mode=mode, seed=2)


def test_a_consumer_that_holds_stages_needs_as_many_more():
    with pytest.raises(EmulatorError, match="(?i)deadlock"):
        run(Shape(3, 1, 3), [6])


@pytest.mark.parametrize(("stages", "inflight"), [(2, 2), (1, -1)])
def test_a_store_never_waits_for_the_stage_it_would_free(stages, inflight):
    counts = {"num_stages": stages, "inflight": inflight}
    with pytest.raises(ValueError, match=rf"inflight={inflight} .*num_stages={stages}"):
        PipelineTmaStoreAsync.create(**counts, consumer_group=None)
    with pytest.raises(ValueError, match=rf"inflight={inflight} .*num_stages={stages}"):
        EpilogueRing.create(**counts, num_warps=4)


@cute.kernel
def wait_in_vain(flag: Int64, epoch: Uint64, bound: WaitBound, site: cutlass.Constexpr):
    wait_flag(flag, epoch, bound, site)


@cute.jit
def launch_wait(flag: Int64, epoch: Uint64, bound: WaitBound, site: cutlass.Constexpr):
    wait_in_vain(flag, epoch, bound, site).launch(grid=(1, 1, 1), block=(1, 1, 1))


@pytest.mark.parametrize(
    ("site", "epoch", "seen", "record"),
    [
        (FailureSite(tile=5, index=3), 7, 6, Failure(0, 0, Role.OTHER, 5, 0, 3, 7, 6)),
        (FailureSite(rank=2, op=70, role=90), 1, -3, Failure(2, 70, 90, 0, 0, 0, 1, 2**48 - 3)),
    ],
)
def test_a_wait_of_a_kernel_of_ones_own_is_bounded_and_leaves_its_record(site, epoch, seen, record):
    """Also where the kernel numbers its own roles, and the host has the words as int32."""
    words = torch.zeros(4 + RECORD_WORDS, dtype=torch.int32)
    flag = words.data_ptr()
    words[:2].view(torch.int64)[0] = seen
    with Emulator("sm_90a") as emulator:
        emulator.register(words)
        with pytest.raises(EmulatorError, match="(?i)trap"):
            launch_wait(flag, epoch, WaitBound(Int64(1000), Int64(flag + 12), Int64(flag + 8)), site)
    assert read_record(words[3:].tolist()) == record
