"""The gate kernel: what a stream waits with, between products of somebody else's kernels.

A rank's shard comes by copy engines (:mod:`overlap_gemm.backends.copies`); the product of each shard is a
kernel that knows nothing of it. So a launch of this one, a single warp, stands in front of each product, and
one behind them all. The driver's own way, ``cuStreamWaitValue32``, has no bound, and its value is fixed when
a graph is captured, while an epoch is not.

Protocol, in the gather buffer of :mod:`overlap_gemm.kernels.all_gather`, among whose calls it may stand:

    waits on    ``source >= 0``: the flag of that rank's shard (acquire, system scope, bounded)
    produces    nothing; what is launched behind it on the stream may read the shard, by any proxy, since a
                kernel's end comes before all that the next one does
    signals     `geometry.END`, behind all reads of the call: tells every peer that this rank *has read*, and
                waits until each of them has
    freed by    that last launch, which ends the call: `kernels.call.finish`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings.driver import CUstream
from cutlass import Int32, cute

from overlap_gemm.device.failure import Op, Role
from overlap_gemm.kernels.call import Call, announce, await_peers, enter, finish
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.gathering import await_piece


@dataclass(frozen=True)
class GateKernel:
    """One warp, launched in front of each shard's product and behind the last.

    Attributes:
        transport: raises flags at peers.
    """

    transport: Any

    @cute.jit
    def __call__(self, source: Int32, exchange: Exchange, stream: CUstream) -> None:
        """Launches the kernel: waits for the shard of ``source``, or ends the call (`geometry.END`)."""
        self.kernel(source, exchange).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: Int32, exchange: Exchange) -> None:
        """See the module."""
        call = Call.begin(exchange)
        if cute.arch.lane_idx() == 0:
            enter(call, Op.ALL_GATHER_GEMM)
        cute.arch.sync_warp()
        if source >= 0:
            if cute.arch.lane_idx() == 0:
                await_piece(call, source, 0, self.transport)
        else:
            announce(call, self.transport)
            await_peers(call, Op.ALL_GATHER_GEMM, Role.CALL_READ, self.transport.flag)
            cute.arch.sync_warp()
            finish(call)
