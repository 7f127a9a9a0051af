"""What happens to a subtile between the accumulator and the ring: sum, bias, rounding, layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute, utils
from cutlass.tensor_utils import LayoutEnum

from overlap_gemm.device.memory import CHUNK_BYTES, DTYPES, fragment_layout, global_pointer
from overlap_gemm.kernels.config import GemmConfig

SOURCES_IN_FLIGHT = 2
"""Partials of one subtile that an epilogue thread loads at once; more spill on sm_90, and gain nothing."""


class RingStages(NamedTuple):
    """The ring's shared memory, seen three ways; the last mode is the stage.

    Attributes:
        packed: ``((v, chunks), threads, stages)`` of the slot type: a partial in fragment order.
        flat: ``(elements, stages)`` of the slot type: the same bytes as one contiguous block.
        tiled: ``(epi_m, epi_n, stages)`` of the output type, swizzled for the TMA store.
    """

    packed: Any
    flat: Any
    tiled: Any


def output_stage_layout(config: GemmConfig) -> Any:
    """Swizzled layout of one output subtile in a stage, as the output's TMA descriptor is built with."""
    make = utils.sm90.make_smem_layout_epi if config.arch == "sm_90a" else utils.sm100.make_smem_layout_epi
    staged = make(DTYPES[config.out_dtype], LayoutEnum.ROW_MAJOR, config.epi_tile, 1)
    return cute.select(staged, mode=[0, 1])


def allocate_stages(config: GemmConfig, smem: Any) -> RingStages:
    """Allocates the ring's stages."""
    storage = smem.allocate_tensor(
        cutlass.Uint8, cute.make_layout(config.stage_bytes * config.ring_stages), byte_alignment=1024
    )
    slot, out = DTYPES[config.slot_dtype], DTYPES[config.out_dtype]
    slot_pitch, out_pitch = config.stage_bytes * 8 // slot.width, config.stage_bytes * 8 // out.width
    elements = config.epi_tile[0] * config.epi_tile[1]
    raw = cute.recast_ptr(storage.iterator, dtype=slot)

    def staged(layout: Any, pitch: int) -> Any:
        return cute.append(layout, cute.make_layout(config.ring_stages, stride=pitch))

    packed = fragment_layout(slot, elements // config.epilogue_threads, config.epilogue_threads)
    tiled = output_stage_layout(config)
    return RingStages(
        cute.make_tensor(raw, staged(packed, slot_pitch)),
        cute.make_tensor(raw, staged(cute.make_layout((elements,)), slot_pitch)),
        cute.make_tensor(
            cute.recast_ptr(storage.iterator, tiled.inner, dtype=out), staged(tiled.outer, out_pitch)
        ),
    )


def pack(fragment: Any, stage: Any) -> None:
    """Rounds this thread's values to the slot type and writes them in fragment order.

    Args:
        fragment: fp32 register tensor.
        stage: this thread's ``(v, chunks)`` of the stage.
    """
    converted = cute.make_rmem_tensor(stage.shape, stage.element_type)
    converted.store(fragment.load().to(stage.element_type).reshape(stage.shape))
    cute.autovec_copy(converted, stage)


@cute.jit
def add_sources(
    total: cute.Tensor,
    config: cutlass.Constexpr,
    address: Int64,
    source_bytes: Int64,
    begin: Int32,
    end: Int32,
) -> None:
    """Adds the partials of slots ``begin .. end - 1``, in this order, to ``total`` (fp32 registers).

    Args:
        total: this thread's values.
        config: the kernel's configuration.
        address: this thread's first chunk of the subtile in slot 0.
        source_bytes: bytes from one source's slot to the next.
        begin: first slot.
        end: one behind the last slot.
    """
    dtype = DTYPES[config.slot_dtype]
    values = cute.size(total)
    v = CHUNK_BYTES * 8 // dtype.width
    layout = cute.make_layout((v, values // v), stride=(1, v * config.epilogue_threads))
    # Unrolled so that the loads of several sources are on their way at once: each takes about a microsecond.
    for source in cutlass.range(begin, end, unroll=SOURCES_IN_FLIGHT):
        partial = cute.make_rmem_tensor((v, values // v), dtype)
        slot = global_pointer(dtype, address + source_bytes * source, CHUNK_BYTES)
        cute.autovec_copy(cute.make_tensor(slot, layout), partial)
        total.store(total.load() + partial.load().to(cutlass.Float32).reshape(total.shape))


def add_bias(fragment: Any, row: Any, first: Any, bias: Any) -> None:
    """Adds to each value the bias of its column, loaded once per run of neighbouring columns of this thread.

    Runs past the end read the last columns: their values are clipped by the output's store.

    Args:
        fragment: this thread's fp32 values of a subtile.
        row: this thread's part of a subtile that is one row, repeated: its layout says which columns the
            values have, counted from the thread's first.
        first: column of the output where the thread's first value lies.
        bias: 16-byte aligned; its size is a multiple of 8.
    """
    offsets = [row.layout(i) for i in range(cute.size(fragment))]
    columns = sorted(set(offsets))
    run = next(n for n in (8, 4, 2, 1) if all(c - columns[i - i % n] == i % n for i, c in enumerate(columns)))
    values: dict[int, Any] = {}
    for start in columns[::run]:
        n = cute.assume(cutlass.min(first + start, cute.size(bias) - run), divby=run)
        loaded = cute.make_rmem_tensor(run, bias.element_type)
        cute.autovec_copy(cute.make_tensor(bias.iterator + n, cute.make_layout(run)), loaded)
        wide = loaded.load().to(cutlass.Float32)
        values |= {start + i: wide[i] for i in range(run)}
    for i, offset in enumerate(offsets):
        fragment[i] = fragment[i] + values[offset]
