"""The TMA store stays in the epilogue warp; a communicating warp gets each tile once it is really in memory.

For kernels that store with TMA from an epilogue warp and want another warp to send the finished tile on while
the next one is computed and stored (NVIDIA/cutlass issue #2900). A TMA store cannot complete on an mbarrier,
only on the bulk groups of the thread that issued it; so that thread arrives on the mbarrier itself, behind a
full wait.

    issuing lane of the epilogue                      comm warp
    ----------------------------                      ---------
    acquire(state)           <- empty[slot] --        release(state): the slot's tile has been sent
    per subtile:
        TMA store
        commit(state, subtile): commit a bulk group,
            full wait_group Q, and if that retired
            a tile's last group   -- full[slot] ->    wait(state): the tile is written and visible
    state.advance()                                   read it, send it

State of a slot (``num_slots`` tiles, used in order):

    | state   | whose it is   | leaves it when                                                         |
    |---------|---------------|------------------------------------------------------------------------|
    | empty   | issuing lane  | it has committed the tile's last store                                   |
    | storing | TMA           | a full wait_group of the issuing lane retired that store; the lane arrives |
    | full    | comm warp     | every consumer thread has arrived on empty                               |

A slot stands for what the comm warp reads: a staging buffer per slot, or merely how many tiles the epilogue
may be ahead. Shared memory needs ``inflight + 1`` subtile buffers: behind ``commit`` of subtile ``g`` the
buffer of ``g - inflight`` is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute, pipeline

from overlap_gemm.pipelines.publication import LaggedPublication


@dataclass(frozen=True)
class PipelineTmaStoreAsync:
    """Producer: the one lane that issues an epilogue's TMA stores. Consumer: threads of a communicating warp.

    Attributes:
        pipe: the mbarriers; full counts the issuing lane, empty the consumer threads.
        num_slots: tiles between the two.
        due: when a tile's stores are known to be written.
    """

    pipe: pipeline.PipelineAsync
    num_slots: int
    due: LaggedPublication

    @staticmethod
    def create(
        barrier_storage: Any, num_slots: int, subtiles: int, inflight: int, num_consumers: int
    ) -> PipelineTmaStoreAsync:
        """Initialises the mbarriers; the caller fences and synchronises the CTA afterwards.

        Args:
            barrier_storage: shared-memory pointer to ``2 * num_slots`` 8-byte barriers.
            num_slots: tiles the epilogue may be ahead of the communication, more than the publication's lag.
            subtiles: TMA stores (bulk groups) per tile.
            inflight: bulk groups left in flight; the epilogue uses ``inflight + 1`` shared-memory buffers.
            num_consumers: consumer threads that arrive on empty: 1 if one lane speaks for the comm warp.

        Raises:
            ValueError: if a tile would be published only behind a store that waits for its slot.
        """
        due = LaggedPublication(subtiles, inflight)
        if num_slots <= due.lag:
            raise ValueError(
                f"num_slots={num_slots} must exceed the publication lag of {due.lag} tiles "
                f"(inflight={inflight}, subtiles={subtiles}), or the producer waits for itself"
            )
        pipe = pipeline.PipelineAsync.create(
            barrier_storage=barrier_storage,
            num_stages=num_slots,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, num_consumers),
            defer_sync=True,
        )
        return PipelineTmaStoreAsync(pipe, num_slots, due)

    def producer_state(self) -> pipeline.PipelineState:
        """State of the issuing lane at the start: all slots empty."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_slots)

    def consumer_state(self) -> pipeline.PipelineState:
        """State of a consumer thread at the start."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_slots)

    def acquire(self, state: pipeline.PipelineState) -> None:
        """Issuing lane, before a tile's first store: waits until its slot is empty."""
        self.pipe.producer_acquire(state)

    @cute.jit
    def commit(self, state: pipeline.PipelineState, subtile: Any) -> None:
        """Issuing lane, behind each store: commits it; publishes the tile now known to be written.

        Behind the call the shared-memory buffer of the subtile ``inflight`` stores ago may be overwritten.

        Args:
            state: the tile's producer state; advance it behind the tile's last subtile.
            subtile: index of the store within the tile.
        """
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(self.due.inflight, read=False)
        if subtile == self.due.subtile and state.count >= self.due.lag:
            self._publish_behind(state, self.due.lag)

    @cute.jit
    def tail(self, state: pipeline.PipelineState) -> None:
        """Issuing lane, at the end: waits for all stores and publishes the tiles not yet published."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        for behind in cutlass.range_constexpr(self.due.lag, 0, -1):
            if state.count >= behind:
                self._publish_behind(state, behind)

    def wait(self, state: pipeline.PipelineState) -> None:
        """Consumer thread: waits until the next tile is in memory, visible to its ordinary loads."""
        self.pipe.consumer_wait(state)

    def release(self, state: pipeline.PipelineState) -> None:
        """Consumer thread: the tile has been sent; then advance ``state``."""
        self.pipe.consumer_release(state)

    def _publish_behind(self, state: pipeline.PipelineState, behind: int) -> None:
        slot = (state.index + (self.num_slots - behind)) % self.num_slots
        self.pipe.sync_object_full.arrive(slot, None)
