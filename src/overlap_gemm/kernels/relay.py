"""The relay kernel: puts staged tiles to peers that loads and stores do not reach, beside an sm_90 GEMM.

The GEMM kernel (transport ``staged``) leaves each such tile in local memory and releases a local flag; one
warp of this kernel waits for the flag and puts tile and signal. So no NVSHMEM call is linked into the GEMM,
which keeps ``setmaxnreg`` and its wgmma unserialised.

Launch one per GEMM on the workspace, on another stream, neither behind the other. Progress:

- Of the GEMM only the receive role waits for peers, and nothing waits for that but the call's end. So every
  tile gets staged.
- This kernel waits for staged tiles and for nothing else. So once both are resident, every tile is put
  without any wait for a peer, and arrives.
- Both become resident, in either order, if the GEMM has one cluster less than fit: this kernel is one CTA,
  which takes the place of one cluster at most, on whatever SM it lies. (They cannot share an SM: the GEMM
  takes all its registers.) If this kernel starts later, tiles lie staged until then.

The stream goes on behind both, so the next GEMM finds this kernel ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from overlap_gemm.device.failure import Op, Role
from overlap_gemm.device.flags import wait_flag
from overlap_gemm.device.memory import global_pointer
from overlap_gemm.kernels.call import Call
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.geometry import ENTERED_OFFSET, FLAG_BYTES, RELAY_EPOCH_OFFSET
from overlap_gemm.kernels.send import route_of
from overlap_gemm.kernels.work import shard_tiles, work_list
from overlap_gemm.schedules import DealtShards

WARPS = 8
"""Puts under way at once: a warp waits for its put to be handed over."""


@dataclass(frozen=True)
class Relay:
    """One CTA, whose warps share the foreign tiles in the GEMM's order.

    Attributes:
        config: the GEMM kernel's configuration.
        transport: puts a staged tile (``relay``) and signals a peer (``signal``), by NVSHMEM.
    """

    config: GemmConfig
    transport: Any

    @cute.jit
    def __call__(self, rows: Int32, cols: Int32, exchange: Exchange, stream: CUstream) -> None:
        """Launches the kernel for a product of global ``rows`` x ``cols``."""
        self.kernel(rows, cols, exchange).launch(grid=(1, 1, 1), block=(32 * WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, rows: Int32, cols: Int32, exchange: Exchange) -> None:
        """Per tile for a peer beyond reach: waits for the local flag, puts."""
        cfg, order = self.config, DealtShards(self.config.raster_group)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        work = work_list(cfg, rows, cols, exchange.rank, exchange.shard_rows)
        call = Call.begin(exchange, RELAY_EPOCH_OFFSET)
        if warp == 0 and cute.arch.lane_idx() == 0:
            self._announce(call)
        tiles = shard_tiles(cfg, work)
        total = Int32(order.num_tiles(work))
        for t in cutlass.range(warp, total, WARPS, unroll=1):
            place = order.place(t, work)
            if exchange.peers[place.shard] < 0:
                for cta in cutlass.range(cfg.cluster_size, unroll=1):
                    self._relay(call, tiles, place.index * cfg.cluster_size + cta, place.shard)
        cute.arch.sync_threads()  # all warps have read the epoch
        if warp == 0 and cute.arch.lane_idx() == 0:
            # Puts may still be under way: `kernels.call` says when their staging is used again.
            cute.arch.store(global_pointer(Uint32, call.base + RELAY_EPOCH_OFFSET, 4), call.epoch)

    @cute.jit
    def _announce(self, call: Call) -> None:
        """Once the GEMM has entered the call, tells the ranks beyond reach."""
        exchange = call.exchange
        offset = ENTERED_OFFSET + FLAG_BYTES * Int64(exchange.rank)
        for peer in cutlass.range(exchange.world, unroll=1):
            if exchange.peers[peer] < 0:
                site = call.site(Op.GEMM_REDUCE_SCATTER, Role.CALL_ENTERED, 0, exchange.rank, exchange.rank)
                wait_flag(call.base + offset, call.epoch, call.bound, site, self.transport.flag)
                self.transport.signal(exchange.peers, exchange.rank, peer, offset, call.epoch)

    @cute.jit
    def _relay(self, call: Call, tiles: Int32, index: Int32, owner: Int32) -> None:
        cfg = self.config
        route = route_of(cfg, call, tiles, index, owner)
        if cute.arch.lane_idx() == 0:
            flag = index * call.exchange.world + owner
            site = call.site(Op.GEMM_REDUCE_SCATTER, Role.RELAY_STAGED, index, owner, flag)
            wait_flag(route.staged, call.epoch, call.bound, site, self.transport.flag)
        cute.arch.sync_warp()
        self.transport.relay(route, cfg.tile_bytes, call.epoch)
