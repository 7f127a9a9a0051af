"""Pipelines between an epilogue and a communicating warp, for any CuTe DSL kernel.

- :class:`EpilogueRing`: epilogue warps fill shared-memory stages, one lane of a comm warp empties them.
- :class:`LaggedPublication`: when a tile whose stores are still draining may be announced.
- :class:`PipelineTmaStoreAsync`: the TMA store stays in the epilogue warp; a comm warp consumes finished
  tiles.
"""

from overlap_gemm.pipelines.publication import LaggedPublication
from overlap_gemm.pipelines.ring import EpilogueRing
from overlap_gemm.pipelines.tma_store import PipelineTmaStoreAsync

__all__ = ["EpilogueRing", "LaggedPublication", "PipelineTmaStoreAsync"]
