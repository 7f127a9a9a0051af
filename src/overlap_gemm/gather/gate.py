"""The gate kernel: lets a stream wait for a shard, before a kernel that multiplies the shard without waiting.

Copy engines send a rank's shard (:mod:`overlap_gemm.backends.by_shards`), and each shard is multiplied by a
separate kernel. This kernel, one CTA of one warp, is launched before each product, and once after the last
with ``source`` -1 (`geometry.END`). The driver's ``cuStreamWaitValue32`` has no time limit, and its value is
fixed when a graph is captured, while an epoch is not.

It uses the gather buffer of :mod:`overlap_gemm.gather.all_gather`, and calls of both may alternate. Protocol:

- waits on: ``source >= 0``: that rank's entry into the call, and the flag of its shard (acquire, system
  scope, bounded).
- produces: nothing. Kernels launched after it on the stream may read the shard, by any proxy: a kernel's end
  comes before everything in the next one.
- signals: at the call's first launch, to every peer, that this rank has entered the call. The launch with
  ``END`` repeats it. That launch, after all reads of the call, signals to every peer that this rank *has
  read*. Then it waits until each of them has entered and has read.
- freed by: the launch with ``END``, which ends the call: `exchange.call.finish`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda.bindings.driver import CUstream
from cutlass import Int32, cute

from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.call import (
    Call,
    await_entry,
    await_peers,
    await_readers,
    begin_warp,
    finish,
    signal_read,
)
from overlap_gemm.gather.gathering import await_piece
from overlap_gemm.spec import ALL_GATHER_GEMM


@dataclass(frozen=True)
class GateKernel:
    """One warp, launched before each shard's product and after the last.

    Attributes:
        transport: Transport that raises flags at peers.
    """

    transport: Any

    @cute.jit
    def __call__(self, source: Int32, is_first: Int32, exchange: Exchange, stream: CUstream) -> None:
        """Launches the kernel: waits for the shard of ``source``, or ends the call (`geometry.END`).

        ``is_first``: whether nothing of the call has been launched before it.
        """
        self.kernel(source, is_first, exchange).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: Int32, is_first: Int32, exchange: Exchange) -> None:
        """Waits for a shard, or ends the call, as described in the module; one warp."""
        call = Call.begin(exchange)
        begin_warp(call, ALL_GATHER_GEMM.code, self.transport, is_first != 0 or source < 0)
        if source >= 0:
            if cute.arch.lane_idx() == 0:
                await_entry(call, ALL_GATHER_GEMM.code, source)
                await_piece(call, source, 0)
        else:
            signal_read(call, self.transport)
            await_peers(call, ALL_GATHER_GEMM.code)
            await_readers(call, ALL_GATHER_GEMM.code)
            cute.arch.sync_warp()
            finish(call)
