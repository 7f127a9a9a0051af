"""A call's signature stands for one layout of what ranks exchange: over all configurations."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from overlap_gemm.backends.fused import exchange_plans
from overlap_gemm.backends.fused import gather_plans as gather
from overlap_gemm.backends.fused import plan_cache as plans
from overlap_gemm.backends.scales.product_types import ProductTypes
from overlap_gemm.backends.scales.scale_layouts import LAYOUTS
from overlap_gemm.config.arch import ARCHS
from overlap_gemm.config.gemm_config import DTYPE_BYTES, GemmConfig
from overlap_gemm.config.orders import WorkList
from overlap_gemm.config.scale_blocks import BLOCKS, OperandTypes
from overlap_gemm.device.memory import CHUNK_BYTES
from overlap_gemm.exchange import geometry
from overlap_gemm.exchange.copies import Results
from overlap_gemm.exchange.geometry import ExchangeShape
from overlap_gemm.kernel.stages import StageChunks
from overlap_gemm.spec import PATTERNS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.tuning.space import every_config

WORLD = 3
SIZES = (130, 3 * 264)
"""Rows and columns: more than one tile of each, the last of which is ragged."""

TILES = [pattern.name for pattern in PATTERNS.values() if not pattern.spec.operand_is_sent]


def configurations(arch):
    """Every configuration that a call on an architecture may have, of all types of operands and slots."""
    for dtype in ("bf16", "f16", "e4m3", "e5m2"):
        kinds = [(False, None)] if DTYPE_BYTES[dtype] > 1 else [
            *product((False, True), (None,)), *((False, blocks) for blocks in BLOCKS)
        ]  # fmt: skip
        for fast_accum, blocks in kinds:
            for config in every_config(arch, dtype, fast_accum=fast_accum, blocks=blocks):
                for slot, out in product(("bf16", "f16", "f32"), repeat=2):
                    for group in (1, 8):
                        try:
                            yield replace(config, slot_dtype=slot, out_dtype=out, raster_group=group)
                        except ValueError:
                            continue


@cache
def elements(epi_tile, epi_columns, subtiles, slot_dtype):
    """(row, column) in a CTA tile of each chunk of its slot."""
    fields = {"epi_tile": epi_tile, "epi_columns": epi_columns, "slot_dtype": slot_dtype}
    chunks = StageChunks(SimpleNamespace(**fields))
    return tuple(chunks.locate(chunk) for chunk in range(chunks.per_subtile * subtiles))


@cache
def places(order, grid):
    """(m, n) of each tile of a shard."""
    work = WorkList(grid, 0, WORLD)
    return tuple(order.tile(index, work) for index in range(grid.rows * grid.cols))


def layout(config: GemmConfig, shape: ExchangeShape):
    """The places of everything that ranks exchange in a call, by the kernel's own functions."""
    module, _, name = PATTERNS[shape.pattern].kernel.partition(":")
    order = getattr(import_module(module), name)(config, None).order
    tiles = shape.cta_tiles(config)
    found = [
        elements(config.epi_tile, config.epi_columns, config.subtiles, config.slot_dtype),
        (config.slot_dtype, config.out_dtype, config.cta_tile, config.cluster),
        places(order, shape.grid(config)),
        (tiles, config.tile_bytes, config.slot_subtile_bytes),
        # Of a ragged tile a sender sends the units that exist, and a receiver awaits these.
        (config.units, config.lane_chunks * 32 * CHUNK_BYTES),
    ]
    if shape.spec.returns:
        results, work = Results(config, None), SimpleNamespace(slots=tiles)
        found.append(tuple(results.flag(work, tiles - 1, unit) for unit in range(config.units)))
        found.append((config.result_bytes, results.chunk_bytes, shape.shard))
    return tuple(found)


def layouts_by_signature(arch, pattern):
    found = defaultdict(set)
    for config in configurations(arch):
        if pattern in ("output_gather", "column_exchange") and config.slot_dtype != config.out_dtype:
            continue
        shape = ExchangeShape.even(*SIZES, WORLD, pattern, OperandTypes("e4m3", config.blocks).column_unit)
        found[plans.signature_of(config, shape, "peer_bulk")].add(layout(config, shape))
    return found


@pytest.mark.parametrize("pattern", TILES)
@pytest.mark.parametrize("arch", [name for name in ARCHS if name != "sm_103a"])
def test_equal_signatures_mean_equal_layouts(arch, pattern):
    found = layouts_by_signature(arch, pattern)
    assert len(found) > 20 and all(len(layouts) == 1 for layouts in found.values())


@pytest.mark.parametrize("fact", ["unit_bytes", "raster_group", "epi_tile", "cluster"])
def test_a_signature_without_a_fact_stands_for_several_layouts(fact, monkeypatch):
    monkeypatch.setattr(plans, "tile_layout", lambda *call: {**geometry.tile_layout(*call), fact: None})
    if fact == "unit_bytes":
        assert any(len(layouts) > 1 for layouts in layouts_by_signature("sm_90a", "reduce_scatter").values())
    else:
        found = (layouts_by_signature(arch, "reduce_scatter") for arch in ("sm_90a", "sm_100a"))
        assert any(len(layouts) > 1 for each in found for layouts in each.values())


def test_gathered_shards_with_scales_of_different_blocks_have_different_signatures():
    """One float32 of 128 elements takes as many bytes as four e8m0 of 32."""
    shards, dtype = Shards(256, 2, 128), torch.float8_e4m3fn
    layouts = {
        blocks: gather.BufferLayout.with_scales(shards, 512, LAYOUTS[blocks], False) for blocks in BLOCKS
    }
    assert len(set(layouts.values())) < len(BLOCKS)
    kinds = {
        gather.signature_of(ProductTypes(dtype, blocks=blocks), layout, shards)
        for blocks, layout in layouts.items()
    }
    assert len(kinds) == len(BLOCKS)


def test_gathered_rows_in_different_layouts_have_different_signatures():
    shards, dtype = Shards(128, 2, 64), torch.float8_e4m3fn
    layouts = [gather.BufferLayout.with_scales(shards, 256, LAYOUTS[None], puts) for puts in (False, True)]
    layouts += [gather.BufferLayout.of(shards, 256, 1)]
    assert len({gather.signature_of(ProductTypes(dtype), layout, shards) for layout in layouts}) == 3


@pytest.mark.parametrize("puts", [False, True])
@pytest.mark.parametrize("blocks", [None, *BLOCKS])
@pytest.mark.parametrize(("rows", "ranks"), [(1, 1), (7, 2), (8, 2), (4096, 3), (3, 4)])
def test_rows_and_scales_of_gathered_shards_do_not_overlap(rows, ranks, blocks, puts):
    shards = Shards.even(rows, ranks)
    layout = gather.BufferLayout.with_scales(shards, 256, LAYOUTS[blocks], puts)
    of_scales = LAYOUTS[blocks].num_bytes(shards.chunk, 256) if blocks else 4 * shards.chunk
    parts = [(rank * layout.shard, shards.chunk * layout.row) for rank in range(ranks)]
    parts += [(layout.scales + rank * layout.next_scales, of_scales) for rank in range(ranks)]
    parts.sort()
    assert all(start + size <= after for (start, size), (after, _) in pairwise([*parts, (layout.size, 0)]))
    assert not any(start % 16 for start, _ in parts)


def test_exchanged_rows_in_different_chunks_have_different_signatures():
    """Compares with gathered shards of as many bytes, too, which are in the same buffer."""
    shards = Shards(1024, 2, 512)
    rows = gather.BufferLayout.of(shards, 128, 2)
    types = ProductTypes(torch.bfloat16)
    kinds = {exchange_plans.signature_of(types, (256,), shards, chunk) for chunk in (128, 256, 512)}
    kinds |= {exchange_plans.signature_of(ProductTypes(torch.float16), (256,), shards, 128)}
    assert len(kinds | {gather.signature_of(types, rows, shards)}) == 5


def test_chunks_are_whole_tiles_cover_all_rows_and_have_flags():
    for rows, row_bytes in product((1, 127, 128, 1000, 4096, 16384, 100_001), (128, 8192, 1 << 16)):
        chunk = geometry.chunk_rows(rows, row_bytes, 4 << 20)
        number = -(-rows // chunk)
        assert chunk % geometry.CHUNK_ROWS == 0 and number <= geometry.SHARD_PIECES
        assert number == 1 or chunk * row_bytes >= 4 << 20
