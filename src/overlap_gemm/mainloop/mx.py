"""MX scales, multiplied by the MMA itself: e8m0, one per row and 32 elements of K, of A and of B.

An *atom* has the scales of 128 rows and 128 elements of K: 512 bytes. The 4 scales of row ``r`` are at byte
``16 * (r % 32) + 4 * (r // 32)`` (PTX ISA, tcgen05.mma, scale factors; torch's ``SWIZZLE_32_4_4``). Atoms of
the same 128 rows are adjacent along K.

- Load warp, per k tile: acquires the stage, starts TMA loads of A, B and their atoms. The bytes of the atoms
  are part of the transaction count of ab.full.
- MMA warp, per k tile: waits on ab.full, issues tcgen05.cp of the atoms to tensor memory (after the
  accumulators), then 4 block-scaled MMAs of 32 elements of K, then the commit that releases the stage.

The tensor core executes copies and MMAs in issue order (PTX ISA, tcgen05, pipelined instructions). With 2
CTAs the leader issues them for both. So one copy of the scales in tensor memory is enough: a copy overwrites
it only after the MMAs before. The commit arrives after both have read the stage.

Global memory: the first two tensors of the kernel's ``extras``, Int16
``(atoms of rows, 256 * ceil(K / 128))``, K contiguous. If tiles begin at each owner's shard, the atoms of a
shard begin there, too (`MxScales.of_shard`). No MMA reads scales after the end of K in the last atom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute, utils
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_tensor
from cutlass.utils import blockscaled_layout as layouts

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import ATOM_BYTES, ATOM_ROWS, MX
from overlap_gemm.device.memory import DTYPES
from overlap_gemm.device.traced import Scalar
from overlap_gemm.kernel.loads import JointLoads, OperandLoads
from overlap_gemm.spec.sharding import ceil_div

SCALE = cutlass.Float8E8M0FNU
WORD = cutlass.Int16  # type of the TMA copies of scales: a TMA box has at most 256 elements per dimension
ATOM_WORDS = ATOM_BYTES // 2


class MxScales(NamedTuple):
    """TMA sources of the scales of A and of B.

    Attributes:
        tma_a: TMA load atom; box: the scale atoms of the CTA's rows, for one k tile.
        a: Coordinate tensor (atoms of rows, Int16 words along K, ...) of A's scales.
        tma_b: TMA load atom; box: the scale atoms of the tile's columns, for one k tile.
        b: Coordinate tensor (atoms of rows, Int16 words along K) of B's scales.
        padding: Number of padding rows of A's and of B's scales before the tile's shard.
        k_tiles: Number of k tiles in ``b`` before the first one that is loaded.
    """

    tma_a: Any
    a: Any
    tma_b: Any
    b: Any
    padding: tuple[Any, Any] = (0, 0)
    k_tiles: Any = 0

    def of_shard(self, shard: Scalar, work: Any) -> MxScales:
        """Returns the scales for tiles of shard ``shard``; each shard before it is padded to full atoms."""
        steps = (work.shards.row_step, work.shards.col_step)
        padding = tuple(shard * (ceil_div(step, ATOM_ROWS) * ATOM_ROWS - step) for step in steps)
        return self._replace(padding=padding)

    def with_gathered(self, scales: tuple[Any, Any]) -> MxScales:
        """Returns the scales with gathered ones of A, (TMA atom, coordinate tensor); those of B are local."""
        tma, tensor = scales
        return self._replace(tma_a=tma, a=tensor)

    def of_local_slice(self, config: GemmConfig, rank: Scalar, rows: Scalar, k_tiles: Scalar) -> MxScales:
        """Returns the scales for the local slice of K; arguments as in `BlockScales.of_local_slice`."""
        padding = rank * (ceil_div(rows, ATOM_ROWS) * ATOM_ROWS - rows)
        return self._replace(padding=(padding, 0), k_tiles=rank * k_tiles)

    def of_slice(self, scales: tuple[Any, Any], source: Scalar, number: Scalar, k_tiles: Scalar) -> MxScales:
        """Returns the scales for the slice of a peer; arguments as in `BlockScales.of_slice`."""
        return self.with_gathered(scales)._replace(k_tiles=source * k_tiles)

    def joined(
        self, config: GemmConfig, a: OperandLoads, b: OperandLoads, stages: Any, row: Scalar, column: Scalar
    ) -> tuple[JointLoads, JointLoads]:
        """Returns the loads of A and of B, each together with its scale atoms.

        Args:
            config: The kernel's configuration.
            a: Loads of A's tile.
            b: Loads of B's tile.
            stages: Stages of the scales (`MxStages`).
            row: First row of A in the CTA tile, without padding.
            column: First row of B in the tile, without padding.
        """
        loads = []
        for which, (operand, atom, tensor, first, word, stage) in enumerate(
            (
                (a, self.tma_a, self.a, row, 0, stages.a),
                (b, self.tma_b, self.b, column, self.k_tiles * ATOM_WORDS, stages.b),
            )
        ):
            atoms = config.scale_atoms[which]
            begin = (first + self.padding[which]) // ATOM_ROWS, word
            tiles = cute.local_tile(cute.domain_offset(begin, tensor), (atoms, ATOM_WORDS), (0, None))
            words = cute.make_tensor(
                cute.recast_ptr(stage.iterator, dtype=WORD),
                cute.make_layout(
                    (atoms, ATOM_WORDS, config.ab_stages), stride=(ATOM_WORDS, 1, atoms * ATOM_WORDS)
                ),
            )
            loads.append(JointLoads((operand, OperandLoads.shared(atom, 0, 1, words, tiles, None))))
        return loads[0], loads[1]


class MxStages(NamedTuple):
    """Stages of the scales in shared memory, in the layouts of the MMA; the last mode is the stage.

    Attributes:
        a: Scales of A, e8m0.
        b: Scales of B, e8m0.
    """

    a: Any
    b: Any


# -- host side of the launch


def cta_group(config: GemmConfig) -> Any:
    """Returns the CTA group (1 or 2 CTAs) of the MMA, and of its copies and commits."""
    return tcgen05.CtaGroup.TWO if config.cta_group == 2 else tcgen05.CtaGroup.ONE


def tiled_mma(config: GemmConfig, a_major: Any, b_major: Any) -> cute.TiledMma:
    """Returns the block-scaled tiled MMA; one instruction covers the tile."""
    a_dtype, b_dtype = (DTYPES[dtype] for dtype in config.in_dtypes)
    return utils.sm100.make_blockscaled_trivial_tiled_mma(
        a_dtype, b_dtype, a_major, b_major, SCALE, MX[2], cta_group(config), config.tile
    )


def scales_of(config: GemmConfig, a: Any, b: Any) -> MxScales:
    """Returns the TMA sources of A's and B's scales, two Int16 matrices as the module describes."""
    of_a, of_b = config.scale_atoms
    return MxScales(*tma_of(config, a, of_a), *tma_of(config, b, of_b))


def tma_of(config: GemmConfig, scales: Any, atoms: int) -> tuple[Any, Any]:
    """Returns the TMA load atom of ``atoms`` x 1 scale atoms and the coordinate tensor of ``scales``.

    ``scales`` may have modes after (atoms of rows, words), for example shards; the caller slices them.
    """
    layout = cute.make_layout((atoms, ATOM_WORDS), stride=(ATOM_WORDS, 1))
    op = cpasync.CopyBulkTensorTileG2SOp(cta_group(config))
    return cpasync.make_tiled_tma_atom(op, scales, layout, (atoms, ATOM_WORDS))


def fake_scales() -> Any:
    """Returns a symbolic Int16 matrix of scale atoms for compilation."""
    extents, pitch = (cute.sym_int32(), cute.sym_int32(ATOM_WORDS)), cute.sym_int64(divisibility=ATOM_WORDS)
    return make_fake_tensor(WORD, extents, stride=(pitch, 1), assumed_align=16)


def fake_gathered() -> Any:
    """Returns a symbolic Int16 tensor (atoms of rows, words, shards) in a gather buffer, for compilation."""
    extents = cute.sym_int32(), cute.sym_int32(ATOM_WORDS), cute.sym_int32()
    pitch, shard = cute.sym_int64(divisibility=ATOM_WORDS), cute.sym_int64(divisibility=8)
    return make_fake_tensor(WORD, extents, stride=(pitch, 1, shard), assumed_align=16)


# -- MMA role


def setup(config: GemmConfig, mma: cute.TiledMma, smem: Any) -> MxStages:
    """Allocates the stages of the scales in shared memory, as many as stages of A and B."""
    return MxStages(
        *(
            smem.allocate_tensor(SCALE, layout, byte_alignment=128)
            for layout in _smem_layouts(config, mma, config.ab_stages)
        )
    )


@dataclass(frozen=True)
class TmemScales:
    """Scales of one k tile in tensor memory, and the copies that fill them; for the MMA warp.

    Attributes:
        a: Scales of A; the last mode is the MMA's number in the k tile.
        b: Scales of B; the last mode is the MMA's number in the k tile.
        copies: For A and for B: (tiled copy, shared-memory descriptors of the stages, destination).
    """

    a: Any
    b: Any
    copies: Any

    def copy(self, stage: Scalar) -> None:
        """Issues the copies of a full stage's scales. MMAs issued after this read them, without a wait."""
        for copy, source, target in self.copies:
            cute.copy(copy, source[(None, None, None, None, stage)], target)

    def scaled(self, a: Any, b: Any, block: int) -> tuple[list[Any], list[Any]]:
        """Returns ``[a, its scales]`` and ``[b, their scales]`` for the `block`-th MMA of a k tile."""
        at = (None, None, block)
        return [a, self.a[at]], [b, self.b[at]]


def in_tmem(config: GemmConfig, mma: cute.TiledMma, stages: MxStages, first: Any) -> TmemScales:
    """Returns the scales in tensor memory from column pointer ``first`` on: A's columns, then B's."""
    tiler = (*config.tile, config.tile_k)
    one_a, one_b = (cute.slice_(stage.layout, (None, None, None, 0)) for stage in stages)
    layout_a = layouts.make_tmem_layout_sfa(mma, tiler, MX[2], one_a)
    layout_b = layouts.make_tmem_layout_sfb(mma, tiler, MX[2], one_b)
    columns = config.scale_atoms[0] * ATOM_BYTES // 128
    a = cute.make_tensor(cute.recast_ptr(first, dtype=SCALE), layout_a)
    b = cute.make_tensor(cute.recast_ptr(first + columns, dtype=SCALE), layout_b)
    return TmemScales(a, b, [_copy(config, stages.a, a), _copy(config, stages.b, b)])


def _copy(config: GemmConfig, stages: Any, target: Any) -> tuple[Any, Any, Any]:
    """Returns the tcgen05.cp of one operand's scales, with its sources and destination.

    ``Cp4x32x128b`` writes the same 32 lanes' data to the lanes of each of the 4 warps.
    """
    source, target = cute.filter_zeros(stages), cute.filter_zeros(target)
    copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(cta_group(config)), SCALE), target)
    part = copy.get_slice(0)
    return (
        copy,
        tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(source)),
        part.partition_D(target),
    )


def _smem_layouts(config: GemmConfig, mma: cute.TiledMma, stages: int) -> tuple[Any, Any]:
    tiler = (*config.tile, config.tile_k)
    return (
        layouts.make_smem_layout_sfa(mma, tiler, MX[2], stages),
        layouts.make_smem_layout_sfb(mma, tiler, MX[2], stages),
    )
