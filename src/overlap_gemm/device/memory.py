"""Raw addresses: typed pointers to the memory of any rank, 16-byte loads and stores, bulk stores.

The host passes a 64-bit address for each peer's memory, valid in this process. So a kernel needs no tensor
map per peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import cpasync

from overlap_gemm.device.traced import Address, Fragment, Scalar

CHUNK_BYTES = 16
"""Bytes of a chunk: the widest load or store of one thread."""

WORD_BYTES = 4
"""Bytes of a register."""

CHUNK_WORDS = CHUNK_BYTES // WORD_BYTES
"""Number of 32-bit words of a chunk."""

LANES = 32
"""Number of threads of a warp."""

DTYPES: dict[str, Any] = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}
"""The DSL's numeric types, by a configuration's dtype name."""


def global_pointer(dtype: Any, address: Address, align: int) -> Any:
    """Returns a pointer to ``dtype`` at the global ``address``, a multiple of ``align`` bytes."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def bulk_store(stage: Any, address: Address, num_bytes: Scalar = None) -> None:
    """Starts one bulk copy (``cp.async.bulk``) from shared to global memory; does not commit or wait.

    One thread calls it, and the same thread commits and waits: bulk groups belong to a thread (PTX ISA,
    ``cp.async.bulk.commit_group``). Size and both addresses are multiples of 16 bytes. Each thread that wrote
    the stage has fenced its writes toward the async proxy before, as `EpilogueRing.commit` does.

    Args:
        stage: Contiguous 1-D tensor of static size in shared memory.
        address: ``Int64`` destination, local or of a peer.
        num_bytes: Bytes of the stage to copy, from its start; None for all.
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
    """Loads the four words of a chunk by one instruction.

    Args:
        instruction: PTX opcode, for example ``ld.relaxed.sys.global.v4.b32``.
        address: Source, a multiple of 16.
        words: Four 32-bit registers, overwritten.
    """
    loaded = cute.arch.inline_ptx(
        instruction + " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * CHUNK_WORDS,
        read_only_args=[address],
    )
    for i in range(CHUNK_WORDS):
        words[i] = loaded[i]


def store_chunk(instruction: str, address: Int64, words: Sequence[Any]) -> None:
    """Stores the four words of a chunk by one instruction; arguments as in `load_chunk`."""
    cute.arch.inline_ptx(
        instruction + " [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )


def order_async_writes() -> None:
    """Executes ``fence.proxy.async.global``: orders ordinary accesses before later asynchronous ones.

    The thread executes it between an acquire and its bulk stores or TMA loads. It is necessary if these
    overwrite what ordinary loads have read, or read what ordinary stores have written, on any rank.
    """
    cute.arch.fence_proxy("async.global")


def load_run(address: Address, values: Fragment) -> None:
    """Loads registers from adjacent addresses; arguments as in `store_run`, ``values`` are overwritten."""
    dtype, number = values.element_type, cute.size(values)
    source = global_pointer(dtype, address, min(CHUNK_BYTES, number * dtype.width // 8))
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(number)), values)


def store_run(address: Address, values: Fragment) -> None:
    """Stores registers at adjacent addresses, in as few stores as alignment allows.

    Args:
        address: ``Int64`` destination, aligned to the bytes of ``values``, at most to 16 (`CHUNK_BYTES`).
        values: Contiguous register tensor.
    """
    dtype, number = values.element_type, cute.size(values)
    target = global_pointer(dtype, address, min(CHUNK_BYTES, number * dtype.width // 8))
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(number)))
