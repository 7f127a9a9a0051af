"""The relay kernel: puts staged data of a GEMM to peers without P2P access, while the GEMM runs.

The GEMM kernel (transport ``staged``) stores data for such a peer in the local workspace and releases a local
flag. One warp of this kernel waits for the flag and puts bytes and signal. So no NVSHMEM call is linked into
the GEMM: on sm_90 such a call would disable ``setmaxnreg`` and serialise wgmma.

The puts are arguments of the launch, as lists of equal pieces (`geometry.Puts`). So one compiled relay serves
every op, shape and configuration. The kernel is one CTA of 9 warps. 8 warps put (`WARPS`). The ninth forwards
two signals of the GEMM: that it has entered the call, and (all-gather GEMM) that it has read its gathered
shards. All waits are for local words, which the GEMM stores. Since the GEMM may itself wait for every peer,
they have ``world + 1`` times the limit.

There is one launch per call on the workspace, on another stream than the GEMM, with no order between the two.
Progress:

- Everything but sums and the "has read" signal of a GEMM is staged without waiting for a peer, and put by a
  warp that waits for nothing else. So all of it arrives.
- A sum waits for partials, which are in the first list; a warp takes nothing from the second before its share
  of the first is put. So every sum is made, staged, put, and arrives.
- The "has read" signal waits for a GEMM that has all its shards; it has a separate warp.
- Both kernels become resident, in either order, if the GEMM has one cluster less than fit. This kernel is one
  CTA, which occupies at most the SM of one cluster. (They cannot share an SM: the GEMM uses all registers.)
  If this kernel starts later, staged data remains until then.

The GEMM's stream then waits for this kernel, so the next GEMM runs after both have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint64, cute

from overlap_gemm.device.failure import FailureSite, Role
from overlap_gemm.device.flags import wait_flag, wait_identity
from overlap_gemm.device.memory import global_pointer
from overlap_gemm.device.remote import Ref
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.call import Call
from overlap_gemm.exchange.geometry import FLAG_BYTES, READ, RELAY_EPOCH_OFFSET, Puts, Region
from overlap_gemm.spec import ALL_GATHER_GEMM
from overlap_gemm.spec.sharding import ceil_div

WARPS = 8
"""Number of puts in flight: a warp waits until its put is issued."""


@dataclass(frozen=True)
class Relay:
    """Relay kernel of one CTA, whose warps share the pieces.

    Attributes:
        transport: Transport that puts staged data (``relay``) and signals a peer (``signal``), by NVSHMEM.
    """

    transport: Any

    @cute.jit
    def __call__(self, op: Int32, puts: tuple[Puts, Puts], exchange: Exchange, stream: CUstream) -> None:
        """Launches the kernel for a call of ``op`` (`OpSpec.code`)."""
        self.kernel(op, puts, exchange).launch(grid=(1, 1, 1), block=(32 * (WARPS + 1), 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, op: Int32, puts: tuple[Puts, Puts], exchange: Exchange) -> None:
        """Puts both lists, and forwards the GEMM's signals."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        call = Call.begin(exchange, RELAY_EPOCH_OFFSET)
        # The signals that this kernel waits for may wait for every peer.
        timeout_ns = call.bound.timeout_ns * (exchange.world + 1)
        call = call._replace(bound=call.bound._replace(timeout_ns=timeout_ns))
        if warp < WARPS:
            for each in puts:
                self._put_all(call, op, each, warp)
        elif cute.arch.lane_idx() == 0:
            self._forward(call, op)
        cute.arch.sync_threads()  # all warps have read the epoch
        if warp == 0 and cute.arch.lane_idx() == 0:
            # Puts may still be in flight: `transports.nvshmem` defines when their source is used again.
            cute.arch.store(global_pointer(Uint64, call.last, 8), call.epoch)

    @cute.jit
    def _forward(self, call: Call, op: Int32) -> None:
        """Forwards the GEMM's signals of entry and of reading to the ranks without P2P access."""
        rank = call.exchange.rank
        site = FailureSite(rank, op, int(Role.RELAY_STAGED), 0, rank, rank)
        if self._needs_relay(call) != 0:
            entered, has_read = call.memory.local.at[call.entered(rank)], call.memory.local.at[READ[rank]]
            wait_identity(entered.address, call.identity, call.bound, site)
            self._signal_remote(entered, call.identity)
            if op == ALL_GATHER_GEMM.code:
                wait_flag(has_read.address, call.epoch, call.bound, site)
                self._signal_remote(has_read, call.epoch)

    @cute.jit
    def _needs_relay(self, call: Call) -> Int32:
        """Returns 1 if a rank has no P2P access (negative entry of the table), else 0."""
        needs_relay = Int32(0)
        for peer in cutlass.range(call.exchange.world, unroll=1):
            if not call.memory.remote(peer).has_p2p:
                needs_relay = Int32(1)
        return needs_relay

    @cute.jit
    def _signal_remote(self, place: Ref, word: Uint64) -> None:
        """Signals to every rank without P2P access, in the same place as on this rank."""
        for peer in cutlass.range(place.memory.world, unroll=1):
            if not place.remote(peer).has_p2p:
                self.transport.signal(place.remote(peer), word)

    @cute.jit
    def _put_all(self, call: Call, op: Int32, puts: Puts, warp: Int32) -> None:
        """Puts this warp's pieces of a list: each to its ranks in turn, beginning with the next rank."""
        exchange, ranks = call.exchange, Int32(puts.ranks)
        total = Int32(ceil_div(puts.nbytes, puts.piece)) * ranks
        for t in cutlass.range(warp, total, WARPS, unroll=1):
            to, piece = (exchange.rank + 1 + t) % ranks, t // ranks
            if not call.memory.remote(to).has_p2p:
                self._put(call, op, puts, piece, to)

    @cute.jit
    def _put(self, call: Call, op: Int32, puts: Puts, piece: Int32, to: Int32) -> None:
        """Puts one piece to one rank after the GEMM has staged it; a full warp."""
        exchange = call.exchange
        start = piece * puts.piece
        num_bytes = Int64(cutlass.min(puts.piece, puts.nbytes - start))
        flag = Int32(puts.flag) + piece
        flags = Region(puts.staged + puts.staged_pitch * to, FLAG_BYTES, exchange.world)
        memory, staged = call.memory, call.memory.local.at[flags[piece, 0]]
        if puts.staged != 0:
            if cute.arch.lane_idx() == 0:
                site = FailureSite(exchange.rank, op, int(Role.RELAY_STAGED), piece, to, flag)
                wait_flag(staged.address, call.epoch, call.bound, site)
            cute.arch.sync_warp()
            num_bytes = self.transport.staged_bytes(staged)
        source = memory.local.at[call.buffer + puts.source + puts.source_pitch * to + start]
        target = memory.remote(to).at[call.buffer + puts.target + start].staged(source)
        arrived = memory.remote(to).at[call.flags[flag, exchange.rank]]
        self.transport.relay(target, arrived, num_bytes, call.epoch)
