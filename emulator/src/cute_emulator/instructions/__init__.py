"""Semantics of all instructions.

They are arithmetic, memory, synchronisation, async copies, tensor cores and control. Each module registers
its instructions in `registry`.
"""

from cute_emulator.instructions import (  # noqa: F401  their import registers their instructions
    bulk,
    control,
    convergence,
    convert,
    cp_async,
    floats,
    memory,
    remote,
    scalar,
    sync,
    tensor,
    tensor_alloc,
    tensor_copy,
    tensor_map,
    warpgroup,
)
from cute_emulator.instructions.control import Call
from cute_emulator.instructions.registry import INLINE, MALFORMED, make, reason, unsupported

__all__ = ["INLINE", "MALFORMED", "Call", "make", "reason", "unsupported"]
