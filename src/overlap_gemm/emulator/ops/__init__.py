"""Instructions that touch the machine: memory, synchronisation, async copies, tensor cores, control.

Each module registers factories; a factory reads an instruction once and returns the `Op` that executes it.
"""

from overlap_gemm.emulator.ops import (  # noqa: F401  their import registers their instructions
    bulk,
    control,
    convergence,
    cp_async,
    memory,
    remote,
    sync,
    tensor,
    tensor_copy,
    tensor_map,
    warpgroup,
)
from overlap_gemm.emulator.ops.control import make_call
from overlap_gemm.emulator.ops.registry import make, unsupported

__all__ = ["make", "make_call", "unsupported"]
