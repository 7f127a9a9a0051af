"""A TMA store in the epilogue warp, a comm warp behind it: the form NVIDIA/cutlass issue #2900 asks for.

Epilogue warps square a subtile in shared memory; one of their lanes stores it to this rank's memory with TMA
and tells the comm warp, tile by tile, once the tile is really written. The comm warp reads the tile back and
copies it to the next rank, while the epilogue is at the next tiles.

Runs on a CPU, in the emulator: ``python examples/tma_store_pipeline.py``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute, memory, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

from overlap_gemm.device.flags import release_flag
from overlap_gemm.device.memory import global_pointer
from overlap_gemm.emulator import Emulator
from overlap_gemm.pipelines import PipelineTmaStoreAsync

NUM_EPILOGUE_WARPS = 4
ROWS, COLUMNS = 32, 32  # a subtile, 4 KiB: what one TMA store moves
SUBTILES = 4  # subtiles side by side in a tile
NUM_SLOTS, INFLIGHT = 3, 2  # tiles the epilogue may be ahead; stores left in flight
NUM_BUFFERS = INFLIGHT + 1
EPILOGUE_BARRIER = 1
VALUES = ROWS * COLUMNS // (32 * NUM_EPILOGUE_WARPS)  # fp32 values per epilogue thread and subtile


@cute.kernel
def square_store_send(
    x: cute.Tensor, tma: cute.CopyAtom, y_tma: cute.Tensor, y: cute.Tensor, peer: Int64, peer_flags: Int64
):
    """``y = x ** 2`` with TMA stores; then each 32 x 128 tile of ``y`` goes to the same place at ``peer``."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    num_tiles = (cute.size(x, mode=[0]) // ROWS - first + stride - 1) // stride

    smem = memory.SmemAllocator()
    barriers = smem.allocate_array(Int64, 2 * NUM_SLOTS, byte_alignment=8)
    layout = cute.make_layout((ROWS, COLUMNS, NUM_BUFFERS), stride=(COLUMNS, 1, ROWS * COLUMNS))
    buffers = smem.allocate_tensor(Float32, layout, byte_alignment=128)
    stores = PipelineTmaStoreAsync.create(barriers, NUM_SLOTS, SUBTILES, INFLIGHT, num_consumers=1)
    epilogue = pipeline.NamedBarrier(EPILOGUE_BARRIER, 32 * NUM_EPILOGUE_WARPS)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    if warp < NUM_EPILOGUE_WARPS:
        state = stores.producer_state()
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
                if warp == 0 and lane == 0:
                    if subtile == 0:
                        stores.acquire(state)
                    cute.copy(tma, source[(None, buffer)], target[(None, (index, subtile))])
                    stores.commit(state, subtile)
                epilogue.arrive_and_wait()  # the next buffer is free
            state.advance()
        if warp == 0 and lane == 0:
            stores.tail(state)
    else:
        state = stores.consumer_state()
        for tile in cutlass.range(num_tiles, unroll=1):
            index = first + tile * stride
            stores.wait(state)
            columns = SUBTILES * COLUMNS
            for r in cutlass.range(ROWS, unroll=1):
                at = index * ROWS + r
                copy = global_pointer(Float32, peer + Int64(at * columns + lane * 4) * 4, 16)
                own = cute.local_tile(y, (1, 4), (at, lane))
                values = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(cute.make_tensor(own.iterator, cute.make_layout(4)), values)
                cute.autovec_copy(values, cute.make_tensor(copy, cute.make_layout(4)))
            cute.arch.sync_warp()
            if lane == 0:
                release_flag(peer_flags + 4 * Int64(index), Uint32(1))
                stores.release(state)
            state.advance()


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, peer: Int64, peer_flags: Int64, num_ctas: Int32, stream: CUstream):
    """One rank's launch."""
    box = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    tma, y_tma = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, box, (ROWS, COLUMNS))
    square_store_send(x, tma, y_tma, y, peer, peer_flags).launch(
        grid=(num_ctas, 1, 1), block=(32 * (NUM_EPILOGUE_WARPS + 1), 1, 1), stream=stream
    )


def main(ranks: int = 2, tiles: int = 7, num_ctas: int = 2, **options: Any) -> None:
    """Runs ``ranks`` emulated GPUs and checks what every rank computed and received."""
    with Emulator("sm_90a", ranks, **options) as emulator:
        shape = (tiles * ROWS, SUBTILES * COLUMNS)
        received = emulator.symmetric(shape, torch.float32)
        flags = emulator.symmetric((tiles,), torch.int32)
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
    print("every rank holds the squares of the rank before it")
