"""Pipelines between an epilogue and a communicating warp, for any CuTe DSL kernel; no torch.

- :class:`EpilogueRing`: epilogue warps fill shared-memory stages; one lane of a comm warp empties them
  through a :class:`TileSender`. :class:`LaggedPublication`: the commit after which a tile may be signalled.
- :class:`PipelineTmaStoreAsync`: an epilogue warp issues TMA stores; a comm warp waits for their writes.
- For the comm warp: :func:`bulk_store` and :func:`global_pointer` access any rank's memory by its address.
  :func:`release_flag` signals (to several peers: :func:`raise_flag` after one :func:`release_fence`), and
  :func:`wait_flag` waits within a :class:`WaitBound`. A wait that expires writes ``RECORD_WORDS`` words,
  which :func:`read_record` returns as a :class:`Failure`.
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
