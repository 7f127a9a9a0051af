"""The ring: epilogue warps -> shared-memory stages -> one lane of the comm warp.

    | epilogue warps (all threads), subtile g     | comm lane (one thread), subtile g                    |
    |---------------------------------------------|------------------------------------------------------|
    | acquire(state): wait for empty[stage]       | wait for full[stage]                                 |
    | write the subtile into the stage            | start bulk stores, commit bulk group g               |
    | commit(state)           -- full[stage] ->   | full wait_group Q: stores of group g - Q are written |
    | state.advance()         <- empty --         | release the stage of group g - Q                     |

Q is ``inflight``. `drain` frees the last Q stages at its end.

States of a stage (there are ``num_stages``, used in order):

    | state    | accessed by    | ends when                                                             |
    |----------|----------------|-----------------------------------------------------------------------|
    | empty    | epilogue warps | every epilogue warp has committed (one arrival per warp on full)      |
    | full     | comm lane      | the comm lane has started and committed its store                     |
    | draining | bulk engine    | a full wait_group has retired the store; the comm lane arrives on empty |

One lane sends because bulk async-groups belong to the thread that commits them: only the thread that started
a store can wait for it. The wait is full, not ``.read``, because it then also permits the publication of the
tile (:mod:`overlap_gemm.pipelines.publication`). The full wait takes no longer: on sm_90 and sm_100 both
forms compile to the same hardware wait. The epilogue never waits for global memory and needs no named
barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Int32, cute, pipeline

from overlap_gemm.device.traced import Scalar
from overlap_gemm.pipelines.publication import LaggedPublication


class TileSender(Protocol):
    """Interface by which the comm lane sends tiles, numbered from 0; methods are traced into kernels."""

    def has(self, tile: Scalar) -> Any:
        """Returns whether there is a tile of this number; called for each number until there is none.

        So the number of tiles need not be known before the last one.
        """

    def locate(self, tile: Scalar) -> Any:
        """Returns the values that the subtiles of ``tile`` share: a run-time value, or a tuple of them.

        It may wait for a peer, but not for a peer's answer to one of the last `LaggedPublication.lag` tiles.
        These are not published yet, so that wait would not end. `has` and `locate` may be called twice for
        tile 0; they change nothing.
        """

    def send(self, place: Any, subtile: Scalar, stage: Any) -> None:
        """Starts the bulk stores of one subtile from ring stage ``stage``; neither commits nor waits."""

    def publish(self, tile: Scalar, place: Any) -> None:
        """Signals that all stores of ``tile`` are written and visible to the calling thread.

        ``place`` is the result of `locate` for the tile: nothing is computed between the wait and the flag.
        """


@dataclass(frozen=True)
class EpilogueRing:
    """A ``PipelineAsync`` whose producers are epilogue warps and whose consumer is one lane of a comm warp.

    Attributes:
        pipe: The mbarriers. Full counts one arrival per epilogue warp (its lane 0), empty one arrival of the
            comm lane.
        num_stages: Number of stages.
        inflight: Number of bulk groups that the comm lane leaves in flight, ``0 <= inflight < num_stages``.
    """

    pipe: pipeline.PipelineAsync
    num_stages: int
    inflight: int

    @staticmethod
    def create(
        *,
        num_stages: int,
        inflight: int,
        num_warps: int,
        barrier_storage: Any = None,
        defer_sync: bool = False,
    ) -> EpilogueRing:
        """Initialises the mbarriers.

        Args:
            num_stages: Number of stages.
            inflight: Number of bulk groups left in flight. With ``inflight == num_stages`` the producer would
                wait for a stage that is never freed.
            num_warps: Number of epilogue warps that fill each stage together.
            barrier_storage: Shared-memory pointer to ``2 * num_stages`` 8-byte barriers; None takes reserved
                shared memory, as the DSL's pipelines do.
            defer_sync: Whether the caller fences the initialisation and synchronises the CTA.

        Raises:
            ValueError: ``inflight`` is not in ``[0, num_stages)``.
        """
        if not 0 <= inflight < num_stages:
            raise ValueError(f"inflight={inflight} must be in [0, num_stages={num_stages})")
        pipe = pipeline.PipelineAsync.create(
            barrier_storage=barrier_storage,
            num_stages=num_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, num_warps),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            defer_sync=defer_sync,
        )
        return EpilogueRing(pipe, num_stages, inflight)

    def producer_state(self) -> pipeline.PipelineState:
        """Returns the initial state of an epilogue thread: all stages empty."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)

    def consumer_state(self) -> pipeline.PipelineState:
        """Returns the initial state of the comm lane."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)

    def acquire(self, state: pipeline.PipelineState) -> None:
        """Waits until ``state``'s stage is empty; all epilogue threads, before they write it."""
        self.pipe.producer_acquire(state)

    @cute.jit
    def commit(self, state: pipeline.PipelineState) -> None:
        """Signals to the comm lane that the stage is written. All epilogue threads call it, then advance.

        Each thread fences its writes toward the async proxy (``fence.proxy.async.shared::cta``). A warp
        barrier follows, then lane 0 arrives on full. Without a lane's call, its writes are not fenced, and
        the bulk store may read what the stage had before.
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.pipe.producer_commit(state)

    @cute.jit
    def drain(
        self, state: pipeline.PipelineState, subtiles: cutlass.Constexpr[int], sender: Any
    ) -> pipeline.PipelineState:
        """Runs the comm lane's loop over tiles: wait, send, commit, free written stages, publish due tiles.

        One thread calls it. After the last tile it waits for all stores, publishes the last tiles, and frees
        the last stages. So on return every store has been written, every tile published, every stage freed.

        Args:
            state: Consumer state of the first subtile.
            subtiles: Stages per tile.
            sender: A :class:`TileSender`.

        Returns:
            The consumer state after the last subtile. The caller must rebind it.
        """
        if sender.has(Int32(0)):
            state = self._drain(state, subtiles, sender)
        return state

    @cute.jit
    def _drain(
        self, state: pipeline.PipelineState, subtiles: cutlass.Constexpr[int], sender: Any
    ) -> pipeline.PipelineState:
        """Runs `drain` for one tile at least."""
        due = LaggedPublication(subtiles, self.inflight)
        # Places of the preceding tiles, the last one's last; the initial values are never published.
        sent = (sender.locate(Int32(0)),) * due.lag
        tile = Int32(0)
        while sender.has(tile):
            place = sender.locate(tile)
            for subtile in cutlass.range(subtiles, unroll=1):
                self.pipe.consumer_wait(state)
                sender.send(place, subtile, state.index)
                cute.arch.cp_async_bulk_commit_group()
                state.advance()
                cute.arch.cp_async_bulk_wait_group(self.inflight, read=False)
                if tile * subtiles + subtile >= self.inflight:
                    self._release_earlier(state, self.inflight + 1)
                if subtile == due.subtile and tile >= due.lag:
                    sender.publish(tile - due.lag, (*sent, place)[0])
            sent = (*sent, place)[1:]
            tile += 1
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        for ago in cutlass.range_constexpr(due.lag, 0, -1):
            if tile >= ago:
                sender.publish(tile - ago, sent[due.lag - ago])
        for ago in cutlass.range_constexpr(self.inflight, 0, -1):
            if tile * subtiles >= ago:
                self._release_earlier(state, ago)
        return state

    @cute.jit
    def drain_by_warp(
        self, state: pipeline.PipelineState, subtiles: cutlass.Constexpr[int], sender: Any
    ) -> pipeline.PipelineState:
        """Runs the loop of a full comm warp that stores by itself: wait, send, free. Nothing is published.

        All lanes call it, and the sender's ``has``, ``locate`` and ``send``. A lane has read its part of the
        stage when ``send`` returns. After a warp barrier lane 0 frees the stage, although stores to peers may
        still be in flight. ``publish`` and ``inflight`` are unused: the sender makes its stores visible to
        peers. Arguments and result are `drain`'s.
        """
        tile = Int32(0)
        while sender.has(tile):
            place = sender.locate(tile)
            for subtile in cutlass.range(subtiles, unroll=1):
                self.pipe.consumer_wait(state)
                sender.send(place, subtile, state.index)
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    self.pipe.consumer_release(state)
                state.advance()
            tile += 1
        return state

    def _release_earlier(self, state: pipeline.PipelineState, ago: int) -> None:
        """Frees the stage used ``ago`` subtiles before ``state``'s."""
        stage = (state.index + (self.num_stages - ago)) % self.num_stages
        self.pipe.sync_object_empty.arrive(stage, None)
