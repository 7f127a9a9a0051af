"""Multicast memory: one address for the same bytes on every rank, at which the NVLink switch sums and copies.

A load from it returns the sum of what the ranks have there, a store writes it on all of them (PTX ISA, data
movement instructions, ``multimem``). The ranks' values have 16 bits; the switch adds them in single precision
(``.acc::f32``), in an order of its own, and rounds the sum to their type.

**Aliases.** A multicast address and a rank's own address of the same bytes are two names of one location.
That an access through one name happens before an access through the other orders the two only if a proxy
fence lies on the way (PTX ISA, memory consistency model, "Causality Order": accesses to the same address need
none, others are in proxy-preserved base causality order only if a proxy fence links them; ``membar/fence``:
``fence.proxy.alias``, of virtual aliases). It holds for a read before a write as for a write before a read.
So a thread calls `alias_fence` after what it has seen by the ranks' own addresses and before its first
access here, and once more after its last one here and before it tells anybody.
"""

from __future__ import annotations

import cutlass
from cutlass import Int64, Uint32, cute

from overlap_gemm.device.memory import CHUNK_WORDS, load_chunk, store_chunk
from overlap_gemm.device.traced import Fragment


def alias_fence() -> None:
    """``fence.proxy.alias``: see the module. Orders nothing by itself: release and acquire do."""
    cute.arch.fence_proxy("alias")


@cute.jit
def load_sum(address: Int64, values: cute.Tensor) -> None:
    """Loads the ranks' sum of a chunk: ``multimem.ld_reduce.relaxed.sys``.

    Args:
        address: multicast, a multiple of 16.
        values: registers, 8 values of bfloat16 or float16.
    """
    load = f"multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.{_pair(values)}"
    load_chunk(load, address, cute.recast_tensor(values, Uint32))


@cute.jit
def store_everywhere(address: Int64, values: cute.Tensor) -> None:
    """Stores a chunk on every rank: ``multimem.st.relaxed.sys``; arguments as for `load_sum`."""
    words = cute.recast_tensor(values, Uint32)
    store = f"multimem.st.relaxed.sys.global.v4.{_pair(values)}"
    store_chunk(store, address, [words[i] for i in range(CHUNK_WORDS)])


def _pair(values: Fragment) -> str:
    """The PTX type of two of them in a word."""
    return {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[values.element_type]
