"""A pipeline whose producer issues TMA stores, and whose consumer waits until a store is written.

It is for kernels in which an epilogue warp stores by TMA, and another warp sends the stored data
(NVIDIA/cutlass issue #2900). The sending overlaps the computation and stores of the next tile. A TMA store
cannot complete on an mbarrier, only on the bulk groups of the thread that issued it. So that thread arrives
on the mbarrier itself, after a full wait.

    issuing lane of the epilogue                      comm warp
    ----------------------------                      ---------
    producer_acquire(state)  <- empty[stage] --       consumer_release(state): it has been sent
    TMA store
    producer_commit(state): commit a bulk group,
        full wait_group Q, so that store g - Q
        is written           -- full[g - Q] ->        consumer_wait(state): written, and visible here
    state.advance()                                   read it, send it, release, state.advance()
    ...
    producer_tail(state): full wait_group 0
                             -- the last Q stages ->

State of a stage (``num_stages`` of them, used in order; one TMA store each, however many make a tile):

    | state   | used by       | ends when                                                                    |
    |---------|---------------|------------------------------------------------------------------------------|
    | empty   | issuing lane  | it has issued and committed a store                                          |
    | storing | TMA           | a full wait_group of the issuing lane retired the store; the lane arrives    |
    | full    | comm warp     | every consumer thread has arrived on empty                                   |

A stage is the memory that a store writes and the comm warp reads, for example a staging buffer. If that
memory is never overwritten, ``num_stages`` only limits by how many stores the epilogue is ahead.

Q is ``inflight``. The stores read from ``Q + 1`` other buffers, in shared memory: after ``producer_commit``
of store ``g`` the buffer of store ``g - Q`` is free.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import cutlass
from cutlass import cute, pipeline


@dataclass(frozen=True)
class PipelineTmaStoreAsync(pipeline.PipelineAsync):
    """The DSL's ``PipelineAsync`` (its names, its participants) whose producer issues TMA stores.

    The producer is one thread: the same lane issues, commits and ends with the tail. Its state, or its
    ``PipelineProducer``, counts the stores and is never reset. All else is inherited.

    Attributes:
        inflight: Number of bulk groups left pending after a commit.
    """

    inflight: int

    @staticmethod
    def create(
        *,
        num_stages: int,
        inflight: int,
        consumer_group: pipeline.CooperativeGroup,
        barrier_storage: Any = None,
        defer_sync: bool = False,
    ) -> PipelineTmaStoreAsync:
        """Initialises the mbarriers.

        Args:
            num_stages: Number of stores by which the epilogue may be ahead of the communication. A consumer
                that waits for ``n`` stages before it releases the first of them needs ``inflight + n``.
            inflight: Number of bulk groups left in flight; the epilogue uses ``inflight + 1`` shared-memory
                buffers.
            consumer_group: Threads that release, each once a stage.
            barrier_storage: Shared-memory pointer to ``2 * num_stages`` 8-byte barriers; None takes reserved
                shared memory, as the DSL's pipelines do.
            defer_sync: Whether the caller fences the initialisation and synchronises the CTA.

        Raises:
            ValueError: ``inflight`` is not in ``[0, num_stages)``: the producer would wait for a stage that
                it has not signalled.
        """
        if not 0 <= inflight < num_stages:
            raise ValueError(f"inflight={inflight} must be in [0, num_stages={num_stages})")
        pipe = pipeline.PipelineAsync.create(
            num_stages=num_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=consumer_group,
            barrier_storage=barrier_storage,
            defer_sync=defer_sync,
        )
        inherited = {field.name: getattr(pipe, field.name) for field in fields(pipe)}
        return PipelineTmaStoreAsync(**inherited, inflight=inflight)

    @cute.jit
    def producer_commit(self, state: pipeline.PipelineState, *, loc: Any = None, ip: Any = None) -> None:
        """Commits a stage's store, and signals the store now known to be written; issuing lane.

        After the call the shared-memory buffer of the store ``inflight`` ago may be overwritten.
        """
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(self.inflight, read=False)
        if state.count >= self.inflight:
            self._hand_over(state, self.inflight)

    @cute.jit
    def producer_tail(self, state: pipeline.PipelineState, *, loc: Any = None, ip: Any = None) -> None:
        """Waits for all stores and signals the remaining ones; issuing lane, at the end.

        ``state`` is after the last store. Without this call the consumer waits for ever.
        """
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        for ago in cutlass.range_constexpr(self.inflight, 0, -1):
            if state.count >= ago:
                self._hand_over(state, ago)

    def _hand_over(self, state: pipeline.PipelineState, ago: int) -> None:
        """Signals that the store ``ago`` before ``state``'s is written."""
        stage = (state.index + (self.num_stages - ago)) % self.num_stages
        self.sync_object_full.arrive(stage, self.producer_mask)
