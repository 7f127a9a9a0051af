"""The ring from epilogue to communication in a small kernel: each rank adds the previous rank's squares.

- Four epilogue warps square x and fill shared-memory stages.
- One lane of a fifth warp, the comm lane, sends each stage to the next rank with a bulk store. It releases a
  flag for each tile when the tile is written there.
- While a tile is sent, the epilogue warps compute the next one. At the end they wait for the previous rank's
  flags and add its tiles.

Runs on a CPU, in the emulator: ``python examples/epilogue_ring.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute, memory
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator
from overlap_gemm.pipelines import EpilogueRing, FailureSite, WaitBound, bulk_store, release_flag, wait_flag

NUM_EPILOGUE_WARPS = 4
VALUES = 8  # fp32 values per thread and subtile
SUBTILE = 32 * NUM_EPILOGUE_WARPS * VALUES  # one ring stage, 4 KiB
SUBTILES = 4  # stages per tile
NUM_STAGES, INFLIGHT = 4, 2
TIMEOUT_NS = 10**9


class Addresses(NamedTuple):
    """Addresses in a rank's symmetric memory.

    Attributes:
        inbox: Tiles that the previous rank sends.
        flags: A flag for each tile of the inbox.
        claim: Word that the first failing wait claims.
        record: Failure record.
    """

    inbox: Int64
    flags: Int64
    claim: Int64
    record: Int64


@dataclass(frozen=True)
class PushToPeer:
    """Sender of this CTA's tiles to the next rank, called by the comm lane (a ``TileSender``).

    Attributes:
        stages: Stages of the ring.
        inbox: Address of the next rank's inbox.
        flags: Address of the next rank's flags.
        first: First tile of this CTA.
        stride: Distance between tiles of this CTA.
        num_tiles: Number of tiles of this CTA.
    """

    stages: Any
    inbox: Any
    flags: Any
    first: Any
    stride: Any
    num_tiles: Any

    def has(self, tile):
        """Returns whether this CTA has a tile of this number."""
        return tile < self.num_tiles

    def locate(self, tile):
        """Returns the address of the tile in the next rank's inbox."""
        return self.inbox + Int64(self.first + tile * self.stride) * (SUBTILES * SUBTILE * 4)

    def send(self, place, subtile, stage):
        """Starts the bulk store of one subtile; the ring commits it and waits for it."""
        bulk_store(self.stages[(None, stage)], place + subtile * (SUBTILE * 4))

    def publish(self, tile, place):
        """Releases the tile's flag at the next rank; the ring calls it when the tile is written."""
        release_flag(self.flags + 8 * Int64(self.first + tile * self.stride), 1)


@cute.kernel
def square_and_push(x: cute.Tensor, inbox: cute.Tensor, out: cute.Tensor, peer: Addresses, local: Addresses):
    """Computes ``out = x + (x of the previous rank) ** 2``; shapes are (values, threads, subtiles, tiles)."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    num_tiles = (cute.size(x, mode=[3]) - first + stride - 1) // stride

    smem = memory.SmemAllocator()
    stages = smem.allocate_tensor(Float32, cute.make_layout((SUBTILE, NUM_STAGES)), byte_alignment=128)
    by_thread = cute.make_tensor(
        stages.iterator, cute.make_layout((VALUES, 32 * NUM_EPILOGUE_WARPS, NUM_STAGES))
    )
    ring = EpilogueRing.create(num_stages=NUM_STAGES, inflight=INFLIGHT, num_warps=NUM_EPILOGUE_WARPS)

    if warp < NUM_EPILOGUE_WARPS:
        state = ring.producer_state()
        for tile in cutlass.range(num_tiles, unroll=1):
            for subtile in cutlass.range(SUBTILES, unroll=1):
                values = cute.make_rmem_tensor(VALUES, Float32)
                cute.autovec_copy(x[(None, thread, subtile, first + tile * stride)], values)
                squares = values.load() * values.load()
                ring.acquire(state)
                values.store(squares)
                cute.autovec_copy(values, by_thread[(None, thread, state.index)])
                ring.commit(state)
                state.advance()
        # The previous rank signals each tile of the inbox separately.
        bound = WaitBound(Int64(TIMEOUT_NS), local.record, local.claim)
        for tile in cutlass.range(num_tiles, unroll=1):
            index = first + tile * stride
            if cute.arch.lane_idx() == 0:
                wait_flag(local.flags + 8 * Int64(index), 1, bound, FailureSite(tile=index, index=index))
            cute.arch.sync_warp()
            for subtile in cutlass.range(SUBTILES, unroll=1):
                at = (None, thread, subtile, index)
                received, values = (
                    cute.make_rmem_tensor(VALUES, Float32),
                    cute.make_rmem_tensor(VALUES, Float32),
                )
                cute.autovec_copy(inbox[at], received)
                cute.autovec_copy(x[at], values)
                values.store(values.load() + received.load())
                cute.autovec_copy(values, out[at])
    elif cute.arch.lane_idx() == 0:
        sender = PushToPeer(stages, peer.inbox, peer.flags, first, stride, num_tiles)
        ring.drain(ring.consumer_state(), SUBTILES, sender)


@cute.jit
def launch(
    x: cute.Tensor,
    inbox: cute.Tensor,
    out: cute.Tensor,
    peer: Addresses,
    local: Addresses,
    num_ctas: Int32,
    stream: CUstream,
):
    """Launches the kernel of one rank."""
    square_and_push(x, inbox, out, peer, local).launch(
        grid=(num_ctas, 1, 1), block=(32 * (NUM_EPILOGUE_WARPS + 1), 1, 1), stream=stream
    )


def main(ranks: int = 2, tiles: int = 5, num_ctas: int = 2, **options: Any) -> None:
    """Runs ``ranks`` emulated GPUs and checks every rank's result."""
    with Emulator("sm_90a", ranks, **options) as emulator:
        shape = (tiles, SUBTILES, 32 * NUM_EPILOGUE_WARPS, VALUES)
        inboxes = emulator.symmetric(shape, torch.float32)
        # A flag per tile, the claim, the failure record.
        words = emulator.symmetric((tiles + 8,), torch.int64)
        for tensor in words.tensors:
            tensor.zero_()
        xs = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
        outs = [emulator.empty(shape, torch.float32, rank) for rank in range(ranks)]

        def addresses(rank: int) -> Addresses:
            flags = words[rank].data_ptr()
            places = (inboxes[rank].data_ptr(), flags, flags + 8 * tiles, flags + 8 * (tiles + 1))
            return Addresses(*map(Int64, places))

        for rank in range(ranks):
            tensors = (
                from_dlpack(t.permute(3, 2, 1, 0), assumed_align=16)
                for t in (xs[rank], inboxes[rank], outs[rank])
            )
            with emulator.rank(rank):
                launch(*tensors, addresses((rank + 1) % ranks), addresses(rank), num_ctas, CUstream(0))
        emulator.run()
        for rank in range(ranks):
            expected = xs[rank] + xs[(rank - 1) % ranks] ** 2
            torch.testing.assert_close(outs[rank], expected, rtol=0, atol=0)


if __name__ == "__main__":
    main()
    print("every rank has added the squares of the previous rank")
