"""Names of configurations: of kernels in profiles, files of the cache, and records."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overlap_gemm.config.gemm_config import GemmConfig
    from overlap_gemm.config.scale_blocks import Blocks


def name_of(config: GemmConfig) -> str:
    """Returns the name of a configuration (`GemmConfig.name`).

    Of a visitor the name has only the function's name. So configurations have the same name if they differ
    only in the dtypes of visitors' operands, or in functions of equal names.
    """
    types = config.in_dtype + (config.b_dtype or "")
    parts = [config.arch, config.mma, by(config.tile), "c" + by(config.cluster), types]
    parts += [f"o{config.out_dtype}"] if config.out_dtype != config.in_dtype else []
    parts += [f"s{config.slot_dtype}"] if config.slot_dtype != config.in_dtype else []
    parts += [f"a{config.a_major}b{config.b_major}"] if (config.a_major, config.b_major) != ("k", "k") else []
    parts += [visitor.name for visitor in config.epilogue]
    ring = (config.ring_stages, config.inflight)
    parts += ["r{}q{}".format(*ring)] if ring != (4, 2) else []
    parts += ["fast"] if config.fast_accum else []
    parts += [config.launch] if config.launch != "ordered" else []
    parts += [blocks_name(config.blocks)] if config.blocks else []
    parts += [f"k{config.k_split}"] if config.k_split != 1 else []
    parts += [f"l{config.leaves}"] if config.leaves else []
    parts += [f"w{config.weights}"] if config.weights != 1 else []
    parts += [f"g{config.raster_group}"] if config.raster_group != 8 else []
    return "_".join(parts)


def blocks_name(blocks: Blocks) -> str:
    """Returns the name of blocks that share a scale: b1x128x128."""
    return "b" + "x".join(map(str, blocks))


def by(pair: tuple[int, int]) -> str:
    """Returns the extents of two dimensions as text: 128x64."""
    return f"{pair[0]}x{pair[1]}"
