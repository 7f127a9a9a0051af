"""A TMA store by an epilogue warp, followed by a comm warp: the structure that NVIDIA/cutlass #2900 requests.

- Epilogue warps square a subtile in shared memory. One of their lanes stores it to local memory with TMA. It
  signals the comm warp when the subtile is written.
- The comm warp reads the subtile back and copies it to the next rank, where it releases a flag after each
  tile. Meanwhile the epilogue computes the next subtiles.

Runs on a CPU, in the emulator: ``python examples/tma_store_pipeline.py``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute, memory, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator
from overlap_gemm.pipelines import PipelineTmaStoreAsync, global_pointer, release_flag

NUM_EPILOGUE_WARPS = 4
ROWS, COLUMNS = 32, 32  # a subtile, 4 KiB: one TMA store
SUBTILES = 4  # subtiles side by side in a tile
NUM_STAGES, INFLIGHT = 6, 2  # subtiles that the epilogue may be ahead; stores in flight
NUM_BUFFERS = INFLIGHT + 1
EPILOGUE_BARRIER = 1
VALUES = ROWS * COLUMNS // (32 * NUM_EPILOGUE_WARPS)  # fp32 values per epilogue thread and subtile


@cute.kernel
def square_store_send(
    x: cute.Tensor, tma: cute.CopyAtom, y_tma: cute.Tensor, y: cute.Tensor, peer: Int64, peer_flags: Int64
):
    """Computes ``y = x ** 2`` with TMA stores; then copies each 32 x 128 tile of ``y`` to ``peer``."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    num_tiles = (cute.size(x, mode=[0]) // ROWS - first + stride - 1) // stride

    smem = memory.SmemAllocator()
    layout = cute.make_layout((ROWS, COLUMNS, NUM_BUFFERS), stride=(COLUMNS, 1, ROWS * COLUMNS))
    buffers = smem.allocate_tensor(Float32, layout, byte_alignment=128)
    epilogue = pipeline.NamedBarrier(EPILOGUE_BARRIER, 32 * NUM_EPILOGUE_WARPS)
    one_lane = pipeline.CooperativeGroup(pipeline.Agent.Thread)  # one arrival for the comm warp
    producer, consumer = PipelineTmaStoreAsync.create(
        num_stages=NUM_STAGES, inflight=INFLIGHT, consumer_group=one_lane
    ).make_participants()

    if warp < NUM_EPILOGUE_WARPS:
        subtiles = cute.zipped_divide(y_tma, (ROWS, COLUMNS))
        source, target = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2), subtiles
        )
        row, column = thread * VALUES // COLUMNS, thread * VALUES % COLUMNS
        for tile in cutlass.range(num_tiles, unroll=1):
            index = first + tile * stride
            for subtile in cutlass.range(SUBTILES, unroll=1):
                buffer = (tile * SUBTILES + subtile) % NUM_BUFFERS
                for i in cutlass.range_constexpr(VALUES):
                    value = x[index * ROWS + row, subtile * COLUMNS + column + i]
                    buffers[row, column + i, buffer] = value * value
                cute.arch.fence_proxy("async.shared", space="cta")
                epilogue.arrive_and_wait()  # the subtile is complete
                if thread == 0:
                    store = producer.acquire_and_advance()
                    cute.copy(tma, source[(None, buffer)], target[(None, (index, subtile))])
                    store.commit()
                epilogue.arrive_and_wait()  # the next buffer is free
        if thread == 0:
            producer.tail()
    else:
        for tile in cutlass.range(num_tiles, unroll=1):
            index = first + tile * stride
            for subtile in cutlass.range(SUBTILES, unroll=1):
                written = consumer.wait_and_advance()
                for r in cutlass.range(0, ROWS, 4, unroll=1):  # four rows at a time, 16 bytes a lane
                    row, column = index * ROWS + r + lane // 8, subtile * COLUMNS + lane % 8 * 4
                    copy = peer + Int64(row * SUBTILES * COLUMNS + column) * 4
                    local = cute.domain_offset((row, column), y)
                    values = cute.make_rmem_tensor(4, Float32)
                    cute.autovec_copy(cute.make_tensor(local.iterator.align(16), cute.make_layout(4)), values)
                    cute.autovec_copy(
                        values, cute.make_tensor(global_pointer(Float32, copy, 16), cute.make_layout(4))
                    )
                cute.arch.sync_warp()
                if lane == 0:
                    written.release()
            if lane == 0:
                release_flag(peer_flags + 8 * Int64(index), 1)


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, peer: Int64, peer_flags: Int64, num_ctas: Int32, stream: CUstream):
    """Launches the kernel of one rank."""
    box = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    tma, y_tma = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, box, (ROWS, COLUMNS))
    square_store_send(x, tma, y_tma, y, peer, peer_flags).launch(
        grid=(num_ctas, 1, 1), block=(32 * (NUM_EPILOGUE_WARPS + 1), 1, 1), stream=stream
    )


def main(ranks: int = 2, tiles: int = 7, num_ctas: int = 2, **options: Any) -> None:
    """Runs ``ranks`` emulated GPUs and checks the computed and the received tensor of every rank."""
    with Emulator("sm_90a", ranks, **options) as emulator:
        shape = (tiles * ROWS, SUBTILES * COLUMNS)
        received = emulator.symmetric(shape, torch.float32)
        flags = emulator.symmetric((tiles,), torch.int64)
        xs = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
        ys = [emulator.empty(shape, torch.float32, rank) for rank in range(ranks)]
        for rank in range(ranks):
            peer = (rank + 1) % ranks
            x, y = (from_dlpack(t, assumed_align=16) for t in (xs[rank], ys[rank]))
            with emulator.rank(rank):
                launch(x, y, received[peer].data_ptr(), flags[peer].data_ptr(), num_ctas, CUstream(0))
        emulator.run()
        for rank in range(ranks):
            torch.testing.assert_close(ys[rank], xs[rank] ** 2, rtol=0, atol=0)
            torch.testing.assert_close(received[rank], xs[(rank - 1) % ranks] ** 2, rtol=0, atol=0)
            assert flags[rank].tolist() == [1] * tiles


if __name__ == "__main__":
    main()
    print("every rank has the squares of the previous rank")
