"""Raw addresses: typed pointers to any rank's memory, loads and stores of full chunks, bulk stores.

A peer's memory has a 64-bit address in this process (from the host). So one kernel serves any number of peers
without a tensor map for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import cpasync

from overlap_gemm.device.traced import Address, Fragment, Scalar

CHUNK_BYTES = 16
"""Bytes of the widest load or store of one thread."""

WORD_BYTES = 4
"""Bytes of a register."""

CHUNK_WORDS = CHUNK_BYTES // WORD_BYTES
"""Number of 32-bit registers of a chunk."""

LANES = 32
"""Number of threads of a warp."""

DTYPES: dict[str, Any] = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}
"""The DSL's numeric type for a configuration's dtype name."""


def global_pointer(dtype: Any, address: Address, align: int) -> Any:
    """Returns a pointer to ``dtype`` in global memory at ``address``, a multiple of ``align`` bytes."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def bulk_store(stage: Any, address: Address, num_bytes: Scalar = None) -> None:
    """Starts one non-tensor bulk copy of a contiguous shared-memory tensor to global ``address``.

    One thread calls it, which must also commit and wait (bulk groups belong to the thread, PTX ISA
    ``cp.async.bulk.commit_group``). Size and both addresses are multiples of 16 bytes.

    Args:
        stage: 1-D shared-memory tensor of static size.
        address: ``Int64`` destination.
        num_bytes: Bytes of the stage to copy, a multiple of 16; None for all of it.
    """
    if num_bytes is not None:
        cute.arch.inline_ptx(
            "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
            read_only_args=[Int64(address), stage.iterator.toint(), Int32(num_bytes)],
        )
        return
    dtype, size = stage.element_type, cute.size(stage)
    # num_bits_per_copy is the size of the stage: a smaller value would split it into several instructions.
    atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), dtype, num_bits_per_copy=size * dtype.width)
    cute.copy(
        atom, stage, cute.make_tensor(global_pointer(dtype, address, CHUNK_BYTES), cute.make_layout(size))
    )


def load_chunk(instruction: str, address: Int64, words: cute.Tensor) -> None:
    """Loads a chunk's four words by one instruction, ``ld.relaxed.sys.global.v4.b32`` for example.

    Args:
        instruction: Name of the load.
        address: Source, a multiple of 16.
        words: Registers of 32 bits.
    """
    loaded = cute.arch.inline_ptx(
        instruction + " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * CHUNK_WORDS,
        read_only_args=[address],
    )
    for i in range(CHUNK_WORDS):
        words[i] = loaded[i]


def store_chunk(instruction: str, address: Int64, words: Sequence[Any]) -> None:
    """Stores a chunk's four words by one instruction; arguments as in `load_chunk`."""
    cute.arch.inline_ptx(
        instruction + " [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )


def order_async_writes() -> None:
    """Orders the calling thread's later bulk stores after what it has observed by ordinary accesses."""
    cute.arch.fence_proxy("async.global")


def load_run(address: Address, values: Fragment) -> None:
    """Starts to load a chunk of registers from the ``Int64`` ``address``; arguments as in `store_run`."""
    dtype, number = values.element_type, cute.size(values)
    source = global_pointer(dtype, address, min(CHUNK_BYTES, number * dtype.width // 8))
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(number)), values)


def store_run(address: Address, values: Fragment) -> None:
    """Stores a chunk of registers at the ``Int64`` ``address``, in as few stores as its bytes allow.

    Args:
        address: Destination, a multiple of the chunk's bytes, or of `CHUNK_BYTES` if it has more.
        values: Register tensor, contiguous.
    """
    dtype, number = values.element_type, cute.size(values)
    target = global_pointer(dtype, address, min(CHUNK_BYTES, number * dtype.width // 8))
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(number)))
