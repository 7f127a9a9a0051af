"""Rules of a kernel's configuration, each with its reason.

| field | legal values |
|---|---|
| mma, tile, cluster | those of `arch.ARCHS` |
| out_dtype, slot_dtype | the operands' type (8-bit operands: bf16 or f16), or f32; swap_ab: not f32 |
| out_dtype | the type of the last epilogue's result, if it has one |
| tile | multiples of 128 result columns, not swap_ab, if the last epilogue's result has scales of blocks |
| a_major, b_major | any; 8-bit operands on sm_90a: "k" |
| k_split | 1; 2 and 4 for swap_ab with tiles of at most 64 rows |
| leaves | 0; 1, 2, 4, 8 with slot_dtype f32, not swap_ab; 8-bit operands: with blocks |
| weights | 1 to `MOST_WEIGHTS`; more than 1 without pairs, leaves and blocks |
| launch | "ordered", "dependent"; "dependent_weights" for swap_ab |
| inflight | 1 to ring_stages - 1 (`EpilogueRing` itself also takes 0) |
| ring_stages | at most 63 ring and A/B stages together (`BARRIER_BYTES`); at least 2 A/B stages fit |
| blocks | `scale_blocks.check_blocks` |

Sums are promoted for 8-bit operands on sm_90a without fast_accum. Then a thread has at most 64 accumulators,
or 128 in cooperative kernels in clusters of two.

Imports neither the DSL nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from overlap_gemm.config.arch import MmaKind
from overlap_gemm.config.naming import by
from overlap_gemm.config.scale_blocks import check_blocks
from overlap_gemm.config.visitors import block_of
from overlap_gemm.epilogues import PAIR

if TYPE_CHECKING:
    from overlap_gemm.config.gemm_config import GemmConfig

InDtype = Literal["bf16", "f16", "e4m3", "e5m2"]
OutDtype = Literal["bf16", "f16", "f32", "e4m3"]
Launch = Literal["ordered", "dependent", "dependent_weights"]

BARRIER_BYTES = 2048
"""Bytes before the stages in shared memory: mbarriers, table of ranks' addresses, `CONTROL_WORDS`."""

CONTROL_WORDS = 16
"""Limit of the other 8-byte words in `BARRIER_BYTES`: `shared_words.CtaCounters`, turns, TMEM.

Each A/B stage and each ring stage has two words (full, empty); the ranks' addresses have `MAX_WORLD` + 1."""

MOST_WEIGHTS = 8
"""Largest number of matrices B of a kernel, each with up to three TMA descriptors.

Descriptors are kernel parameters of 128 bytes, of 4 KiB in all."""

MAX_WORLD = 112
"""Largest number of ranks of a workspace, and of a kernel's table of addresses."""

PROMOTED_VALUES = 64
"""Accumulators of a thread that one instruction sums, if sums are promoted: they need registers, too."""

MOST_IN_REGISTERS = 128
"""Most values of a tile's sums, and of nodes of its tree, that a thread's registers hold."""

LEAVES = (0, 1, 2, 4, 8)
"""Numbers of parts of a rank's K that a tree may have; 0: there is no tree."""

K_SPLITS = (1, 2, 4)
"""Numbers of parts into which K may be cut if `may_split`."""


def may_split(mma: MmaKind, tile: tuple[int, int]) -> bool:
    """Returns whether K may be split: shared memory must hold the parts' sums and at least two stages."""
    return mma == "swap_ab" and tile[0] <= 64


def check(config: GemmConfig) -> None:
    """Raises ValueError, naming the rule, for a configuration no kernel exists for."""
    _require_in(f"mma on {config.arch}", config.mma, tuple(config.on.mma))
    _require_in(f"tile for mma={config.mma!r}", config.tile, config.kind.tiles)
    _require_in(f"cluster for mma={config.mma!r}", config.cluster, config.kind.clusters)
    _require_in("in_dtype", config.in_dtype, get_args(InDtype))
    others = tuple(t for t in ("e4m3", "e5m2") if config.has_bytes and t != config.in_dtype)
    _require_in(f"b_dtype where in_dtype={config.in_dtype!r}", config.b_dtype, (None, *others))
    halves = ("bf16", "f16") if config.has_bytes else (config.in_dtype,)
    result = config.epilogue[-1].epilogue.sums_result if config.epilogue else None
    for name in ("out_dtype", "slot_dtype"):
        wide = halves if config.is_swap_ab else (*halves, "f32")
        types = (result,) if result is not None and name == "out_dtype" else wide
        _require_in(f"{name} for mma={config.mma!r}", getattr(config, name), types)
    majors = ("k",) if config.has_bytes and config.on.bytes_k_major else ("k", "m", "n")
    launches = get_args(Launch) if config.is_swap_ab else get_args(Launch)[:2]
    _require_in(f"launch for mma={config.mma!r}", config.launch, launches)
    for name, other in (("a_major", "n"), ("b_major", "m")):
        _require_in(name, getattr(config, name), tuple(major for major in majors if major != other))
    if config.fast_accum and not config.has_bytes:
        raise ValueError(f"fast_accum is for 8-bit types; got in_dtype={config.in_dtype!r}")
    if config.promotes and config.accumulators > PROMOTED_VALUES and not _by_halves(config):
        raise ValueError(
            f"tile {by(config.tile)} of mma={config.mma!r} in clusters of {by(config.cluster)} has "
            f"{config.accumulators} accumulators a thread; where sums are promoted to fp32 there is room for "
            f"{PROMOTED_VALUES}, or for {2 * PROMOTED_VALUES} of cooperative kernels in clusters of two, by "
            "halves (fast_accum=True does not promote)"
        )
    check_blocks(config)
    if config.has_pairs and (config.is_swap_ab or not config.epilogue[-1].epilogue.pairs):
        raise ValueError(
            f"an epilogue of pairs is the last one, in kernels whose subtiles are {PAIR} columns wide, not "
            f"mma={config.mma!r} with epilogues {', '.join(visitor.name for visitor in config.epilogue)}"
        )
    block = block_of(config.epilogue)
    if block and (config.is_swap_ab or config.tile[1] // config.subtile_step % block):
        raise ValueError(
            f"scales of {block} columns of a result are for tiles with a multiple of {block} of its "
            f"columns, not swapped; got tile={by(config.tile)}, mma={config.mma!r}, and "
            f"{config.subtile_step} columns of the product for a column of the result"
        )
    splits = K_SPLITS if may_split(config.mma, config.tile) else (1,)
    _require_in(f"k_split for mma={config.mma!r}, tile={config.tile}", config.k_split, splits)
    _check_leaves(config)
    if not 1 <= config.weights <= MOST_WEIGHTS:
        raise ValueError(f"weights must be 1 to {MOST_WEIGHTS} in one kernel, got {config.weights}")
    if config.weights > 1 and (config.has_pairs or config.leaves or config.blocks):
        raise ValueError(
            f"weights={config.weights} is for kernels without pairs of columns, leaves and scales of blocks; "
            f"got leaves={config.leaves}, blocks={config.blocks}"
        )
    if not 0 < config.inflight < config.ring_stages:
        raise ValueError(
            f"inflight={config.inflight} bulk groups must be at least 1 and fewer than "
            f"ring_stages={config.ring_stages}, or the epilogue waits for a stage that is never freed"
        )
    if config.raster_group < 1:
        raise ValueError(f"raster_group={config.raster_group} must be at least 1")
    words = 2 * (config.ab_stages + config.ring_stages) + CONTROL_WORDS + MAX_WORLD + 1
    if 8 * words > BARRIER_BYTES:
        raise ValueError(
            f"{config.ring_stages} ring stages and {config.ab_stages} A/B stages have, with addresses and "
            f"control words, {8 * words} bytes of barriers; there is room for {BARRIER_BYTES}"
        )
    if config.ab_stages < 2:
        raise ValueError(
            f"{config.ring_stages} ring stages of {config.stage_bytes} bytes leave room for "
            f"{config.ab_stages} A/B stages of {config.ab_stage_bytes} bytes; at least 2 are needed"
        )


def _check_leaves(config: GemmConfig) -> None:
    """Raises ValueError for leaves unless sums stay float32 on the wire, and scales belong to one leaf."""
    if not config.leaves:
        return
    _require_in("leaves", config.leaves, LEAVES)
    has_scales_of_rows = config.has_bytes and config.blocks is None
    if config.is_swap_ab or has_scales_of_rows or config.slot_dtype != "f32":
        raise ValueError(
            f"leaves={config.leaves} are summed in float32, of operands of 16 bits or with scales of blocks, "
            f"in kernels with float32 partial sums; got mma={config.mma!r}, in_dtype={config.in_dtype!r}, "
            f"blocks={config.blocks}, slot_dtype={config.slot_dtype!r}"
        )


def _by_halves(config: GemmConfig) -> bool:
    """Returns whether 128 accumulators a thread may be promoted, by halves of the columns.

    They may in cooperative kernels in clusters. Without a cluster such a kernel spills.
    """
    return config.epilogue_groups == 1 and config.cluster_size > 1


def _require_in(what: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(map(str, allowed))}; got {value}")
