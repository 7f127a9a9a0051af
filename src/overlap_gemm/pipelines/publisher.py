"""The publisher: a warp that raises the flags of written tiles, so that the comm lane stands in no fence.

    comm lane (issues the stores)                    publisher (a warp; lane i has tiles i, i + S, ...)
    -----------------------------                    --------------------------------------------------
    full wait_group: tile t is written               wait for the oldest tile that is not published
    wait for empty[t % S]    <- empty[t % S] ----    each lane tests its own tile's barrier
    arrive on full[t % S]    -- full[t % S] ---->    who finds it written: fence, flag; arrive on empty

A release at system scope waits for whatever the SM has under way on the link, not for the tile's own stores
alone: several microseconds where the link is busy, in which a comm lane that releases starts no store. Only
it may wait for its bulk groups; but what it has waited for may be released by anybody who comes after it:

- the bulk stores have written -> the comm lane: full ``cp.async.bulk.wait_group`` by the lane that issued
  them, which makes the writes visible to it, also to its ordinary accesses;
- the comm lane -> a lane of the publisher: ``mbarrier.arrive`` releases, ``test_wait`` acquires (CTA scope);
- that lane -> the peer: ``st.release.sys`` (or a fence and ``st.relaxed.sys``) is cumulative: it releases
  what the lane has acquired, too.

Lanes that find their tiles written fence together, in one instruction: so a fence that takes longer than a
tile holds nobody up, as long as the comm lane is not ``S`` tiles ahead. Tiles are written in their order, so
those that are found are the oldest.

The publisher waits for the comm lane alone, which waits for the publisher only ``S`` tiles later: no circle,
as long as what the warp does after the last tile is waited for by neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Uint32, cute, pipeline

from overlap_gemm.device.traced import Scalar


@dataclass(frozen=True)
class Publisher:
    """Tiles on their way from the lane that has written them to the warp that publishes them.

    Attributes:
        pipe: the mbarriers: one arrival each, of the comm lane on full, of a lane of the publisher on empty.
        num_stages: tiles that may be written and not published, at most 32.
    """

    pipe: pipeline.PipelineAsync
    num_stages: int

    @staticmethod
    def create(*, num_stages: int = 4, barrier_storage: Any = None, defer_sync: bool = False) -> Publisher:
        """Initialises the mbarriers; arguments as for `EpilogueRing.create`.

        Raises:
            ValueError: if ``num_stages`` is not in ``[1, 32]``: a lane has one tile at a time.
        """
        if not 1 <= num_stages <= 32:
            raise ValueError(f"num_stages={num_stages} must be in [1, 32], the lanes of a warp")
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread, 1)
        pipe = pipeline.PipelineAsync.create(
            barrier_storage=barrier_storage,
            num_stages=num_stages,
            producer_group=one,
            consumer_group=one,
            defer_sync=defer_sync,
        )
        return Publisher(pipe, num_stages)

    def hand_over(self, tile: Scalar) -> None:
        """The lane that has waited for all stores of ``tile``, in the tiles' order."""
        stage, phase = self._stage(tile)
        self.pipe.sync_object_empty.wait(stage, phase ^ 1)
        self.pipe.sync_object_full.arrive(stage, None)

    @cute.jit
    def publish_all(self, sender: Any) -> None:
        """All lanes of the publisher's warp: publishes every tile, each when it is written.

        ``sender`` is a :class:`~overlap_gemm.pipelines.ring.TileSender`, of which several lanes ask at once.
        """
        if sender.has(Int32(0)):
            self._publish_all(sender)

    @cute.jit
    def _publish_all(self, sender: Any) -> None:
        """`publish_all` of one tile at least."""
        lane = cute.arch.lane_idx()
        tile, oldest = Int32(lane), Int32(0)
        mine = self._has(sender, tile)
        place = sender.locate(cutlass.select_(mine, tile, Int32(0)))
        while sender.has(oldest):
            self.pipe.sync_object_full.wait(*self._stage(oldest))
            written = Boolean(False)
            if mine:
                written = self.pipe.sync_object_full.test_wait(*self._stage(tile))
            if written:
                sender.publish(tile, place)
                self.pipe.sync_object_empty.arrive(lane, None)
                tile += self.num_stages
            oldest += cute.arch.popc(cute.arch.vote_ballot_sync(written))
            # In front of the next wait: little is left to do after it.
            mine = self._has(sender, tile)
            place = sender.locate(cutlass.select_(mine, tile, Int32(0)))

    def _stage(self, tile: Scalar) -> tuple[Any, Any]:
        """A tile's stage, and the phase of its barriers."""
        number = Uint32(tile)
        return Int32(number % self.num_stages), Int32(number // self.num_stages & 1)

    @cute.jit
    def _has(self, sender: Any, tile: Int32) -> Boolean:
        """Whether the calling lane has this tile."""
        mine = Boolean(False)
        if cute.arch.lane_idx() < self.num_stages:
            mine = Boolean(sender.has(tile))
        return mine
