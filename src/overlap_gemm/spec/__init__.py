"""Ops, communication patterns and transports: the single source of truth about each. Standard library only.

A new op is an entry of `OPS` (`overlap_gemm.register`), a new pattern one of `PATTERNS`, a new transport one
of `TRANSPORTS`.
"""

from .op import ARGUMENTS, Axis, Move, OpSpec
from .ops import (
    ALL_GATHER_GEMM,
    ALL_TO_ALL_GEMM,
    COLUMN_PARALLEL_GEMM,
    GEMM_ALL_GATHER,
    GEMM_ALL_REDUCE,
    GEMM_ALL_TO_ALL,
    GEMM_REDUCE_SCATTER,
    OPS,
    add_op,
    op_coded,
    op_named,
)
from .pattern import PATTERNS, PatternSpec, check_patterns, patterns_of
from .transport import EMPTY_BYTE, TRANSPORTS, TransportSpec, add_transport, transports_of

__all__ = [
    "ALL_GATHER_GEMM",
    "ALL_TO_ALL_GEMM",
    "ARGUMENTS",
    "COLUMN_PARALLEL_GEMM",
    "EMPTY_BYTE",
    "GEMM_ALL_GATHER",
    "GEMM_ALL_REDUCE",
    "GEMM_ALL_TO_ALL",
    "GEMM_REDUCE_SCATTER",
    "OPS",
    "PATTERNS",
    "TRANSPORTS",
    "Axis",
    "Move",
    "OpSpec",
    "PatternSpec",
    "TransportSpec",
    "add_op",
    "add_transport",
    "check_patterns",
    "op_coded",
    "op_named",
    "patterns_of",
    "transports_of",
]
