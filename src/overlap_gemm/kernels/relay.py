"""The relay kernel: puts staged tiles to peers that loads and stores do not reach, beside an sm_90 GEMM.

The GEMM kernel (transport ``staged``) leaves each such tile in local memory and releases a local flag; one
warp of this kernel waits for the flag and puts tile and signal. So no NVSHMEM call is linked into the GEMM,
which keeps ``setmaxnreg`` and its wgmma unserialised.

Launch one beside every GEMM on the workspace, on a stream of its own; it waits for what that GEMM does and
needs no other order between the two. The GEMM must leave it room: its persistent CTAs fill an SM's registers,
so give the GEMM a grid that leaves as many SMs as this kernel has CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from overlap_gemm.device.failure import FailureSite, Op, Role
from overlap_gemm.device.flags import wait_flag
from overlap_gemm.device.memory import global_pointer
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.geometry import (
    ENTERED_OFFSET,
    FLAG_BYTES,
    RELAY_EPOCH_OFFSET,
    RELAY_TICKET_OFFSET,
)
from overlap_gemm.kernels.reduce_scatter import Context, make_context, route_of
from overlap_gemm.schedules import RotatedShards, TileGrid, ceil_div, num_owners


@dataclass(frozen=True)
class Relay:
    """One warp per CTA; the warps share the foreign tiles in the GEMM's order.

    Attributes:
        config: the GEMM kernel's configuration.
        transport: puts a staged tile (``relay``) and signals a peer (``signal``), by NVSHMEM.
    """

    config: GemmConfig
    transport: Any

    @cute.jit
    def __call__(
        self, rows: Int32, cols: Int32, exchange: Exchange, num_ctas: Int32, stream: CUstream
    ) -> None:
        """Launches ``num_ctas`` warps for a product of global ``rows`` x ``cols``."""
        self.kernel(rows, cols, exchange).launch(grid=(num_ctas, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, rows: Int32, cols: Int32, exchange: Exchange) -> None:
        """Per tile for a peer beyond reach: waits for the local flag, puts."""
        cfg, order = self.config, RotatedShards(self.config.raster_group)
        first, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        owners = num_owners(rows, exchange.shard_rows)
        grid = TileGrid(
            ceil_div(exchange.shard_rows, cfg.cluster_tile[0]), ceil_div(cols, cfg.cluster_tile[1])
        )
        context = make_context(cfg, None, exchange, grid, RELAY_EPOCH_OFFSET)
        if first == 0 and exchange.rank < owners and cute.arch.lane_idx() == 0:
            self._announce(context, owners)
        total = Int32(order.num_foreign(grid, exchange.rank, owners))
        for t in cutlass.range(first, total, stride, unroll=1):
            place = order.place(t, grid, exchange.rank, owners)
            if exchange.peers[place.shard] < 0:
                for cta in cutlass.range(cfg.cluster_size, unroll=1):
                    self._relay(context, place.index * cfg.cluster_size + cta, place.shard)
        self._close(context)

    @cute.jit
    def _announce(self, context: Context, owners: Int32) -> None:
        """Once the GEMM has entered the call, tells the ranks beyond reach that own nothing."""
        exchange = context.exchange
        offset = ENTERED_OFFSET + FLAG_BYTES * Int64(exchange.rank)
        for peer in cutlass.range(owners, exchange.world, unroll=1):
            if exchange.peers[peer] < 0:
                op, role = int(Op.GEMM_REDUCE_SCATTER), int(Role.COMM_ENTERED)
                site = FailureSite(exchange.rank, op, role, 0, exchange.rank, exchange.rank)
                wait_flag(context.base + offset, context.epoch, context.bound, site)
                self.transport.signal(exchange.peers, exchange.rank, peer, offset, context.epoch)

    @cute.jit
    def _relay(self, context: Context, index: Int32, owner: Int32) -> None:
        cfg = self.config
        route = route_of(cfg, context, index, owner)
        if cute.arch.lane_idx() == 0:
            rank = context.exchange.rank
            op, role = int(Op.GEMM_REDUCE_SCATTER), int(Role.RELAY_STAGED)
            site = FailureSite(rank, op, role, index, owner, index * context.exchange.world + owner)
            wait_flag(route.staged, context.epoch, context.bound, site)
        cute.arch.sync_warp()
        self.transport.relay(route, cfg.subtiles * cfg.slot_subtile_bytes, context.epoch)

    @cute.jit
    def _close(self, context: Context) -> None:
        """The last CTA stores the epoch; puts may still be under way (see the transport)."""
        if cute.arch.lane_idx() == 0:
            blocks, _, _ = cute.arch.grid_dim()
            ticket = global_pointer(Uint32, context.base + RELAY_TICKET_OFFSET, 4)
            if Int32(cute.arch.atomic_add(ticket, Uint32(1), sem="acq_rel", scope="gpu")) == blocks - 1:
                cute.arch.store(ticket, Uint32(0))
                epoch = global_pointer(Uint32, context.base + RELAY_EPOCH_OFFSET, 4)
                cute.arch.store(epoch, context.epoch)
