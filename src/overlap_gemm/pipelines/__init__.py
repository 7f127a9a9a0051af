"""Pipelines between an epilogue and a communicating warp, for any CuTe DSL kernel; no torch.

- :class:`EpilogueRing`: epilogue warps fill shared-memory stages, one lane of a comm warp empties them as a
  :class:`TileSender` says; :class:`LaggedPublication`: when a tile whose stores still drain may be announced.
- :class:`PipelineTmaStoreAsync`: the TMA store stays in the epilogue warp; a comm warp gets what is written.
- For the comm warp: :func:`bulk_store` and :func:`global_pointer` reach any rank's memory by its address,
  :func:`release_flag` announces (to several peers: :func:`raise_flag` after one :func:`release_fence`),
  :func:`wait_flag` waits within a :class:`WaitBound`. A wait that expires leaves ``RECORD_WORDS`` words,
  which :func:`read_record` reads as a :class:`Failure`.
"""

from overlap_gemm.device.failure import RECORD_WORDS, Failure, FailureSite, read_record
from overlap_gemm.device.flags import WaitBound, raise_flag, release_fence, release_flag, wait_flag
from overlap_gemm.device.memory import bulk_store, global_pointer
from overlap_gemm.pipelines.publication import LaggedPublication
from overlap_gemm.pipelines.ring import EpilogueRing, TileSender
from overlap_gemm.pipelines.tma_store import PipelineTmaStoreAsync

__all__ = [
    "RECORD_WORDS",
    "EpilogueRing",
    "Failure",
    "FailureSite",
    "LaggedPublication",
    "PipelineTmaStoreAsync",
    "TileSender",
    "WaitBound",
    "bulk_store",
    "global_pointer",
    "raise_flag",
    "read_record",
    "release_fence",
    "release_flag",
    "wait_flag",
]
