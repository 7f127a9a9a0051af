"""Instructions that touch the machine: memory, synchronisation, async copies, tensor cores, control.

Each module registers factories; a factory reads an instruction once and returns the `Op` that executes it.
"""

from overlap_gemm.emulator.ops import bulk, control, convergence, memory, sync, tensor, warpgroup
from overlap_gemm.emulator.ops.control import make_call
from overlap_gemm.emulator.ops.registry import make, unsupported

__all__ = [
    "bulk",
    "control",
    "convergence",
    "make",
    "make_call",
    "memory",
    "sync",
    "tensor",
    "unsupported",
    "warpgroup",
]
