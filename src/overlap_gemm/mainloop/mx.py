"""Scales that the MMA reads: e8m0, one for 32 elements of K of each row of A and of B.

They are stored in *atoms*: the scales of 128 rows and 128 elements of K, 512 bytes. Row ``r`` has
4 bytes at ``16 * (r % 32) + 4 * (r // 32)``. That is the MMA's order (PTX ISA, tcgen05.mma, scale factors;
torch's ``SWIZZLE_32_4_4``). Atoms of the same 128 rows follow each other along K.

- Load warp, per k tile: TMA of the atoms of this CTA's rows of A, and of the tile's columns, into the stage
  of A and B, counted with them on ab.full.
- MMA warp, per k tile: ab.wait; tcgen05.cp of the atoms to tensor memory, after the accumulators; 4
  block-scaled MMAs, one for 32 of K; ab.release.

Copies and MMAs of one CTA (2-CTA: of the leader, whose copies are made in both) run in the order in which
they are issued (PTX ISA, tcgen05, pipelined instructions). So one place in tensor memory is enough, and the
commit that frees a stage is after both.

Matrices, both the first of the kernel's ``extras``: Int16 ``(atoms of rows, 256 * ceil(K / 128))``, K
contiguous. If an op's tiles begin with each owner's shard, its atoms begin there, too
(`MxScales.of_shard`). No MMA reads the padding of the last atom of K.
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
        tma_a: TMA load atom of the scale atoms of a CTA's rows of A.
        a: Coordinate tensor (atoms of rows, words of K) of A's scales.
        tma_b: TMA load atom of the scale atoms of the tile's columns.
        b: Coordinate tensor (atoms of rows, words of K) of B's scales.
        padding: Rows of A and of B that were added to pad the shards before the tile's shard to full atoms.
    """

    tma_a: Any
    a: Any
    tma_b: Any
    b: Any
    padding: tuple[Any, Any] = (0, 0)

    def of_shard(self, shard: Scalar, work: Any) -> MxScales:
        """Returns the scales for a tile of an owner's shard: the shards before it have whole atoms."""
        steps = (work.shards.row_step, work.shards.col_step)
        padding = tuple(shard * (ceil_div(step, ATOM_ROWS) * ATOM_ROWS - step) for step in steps)
        return self._replace(padding=padding)

    def with_gathered(self, scales: tuple[Any, Any]) -> MxScales:
        """Returns scales of A gathered with a shard (TMA atom, coordinate tensor), and local ones of B."""
        tma, tensor = scales
        return self._replace(tma_a=tma, a=tensor)

    def joined(
        self, config: GemmConfig, a: OperandLoads, b: OperandLoads, stages: Any, row: Scalar, column: Scalar
    ) -> tuple[JointLoads, JointLoads]:
        """Returns the loads of A and B with their scales, from row `row` of A and row `column` of B on."""
        loads = []
        for which, (operand, atom, tensor, first, stage) in enumerate(
            ((a, self.tma_a, self.a, row, stages.a), (b, self.tma_b, self.b, column, stages.b))
        ):
            atoms = config.scale_atoms[which]
            begin = (first + self.padding[which]) // ATOM_ROWS
            tiles = cute.local_tile(cute.domain_offset((begin, 0), tensor), (atoms, ATOM_WORDS), (0, None))
            words = cute.make_tensor(
                cute.recast_ptr(stage.iterator, dtype=WORD),
                cute.make_layout(
                    (atoms, ATOM_WORDS, config.ab_stages), stride=(ATOM_WORDS, 1, atoms * ATOM_WORDS)
                ),
            )
            loads.append(JointLoads((operand, OperandLoads.shared(atom, 0, 1, words, tiles, None))))
        return loads[0], loads[1]


class MxStages(NamedTuple):
    """Stages of scales in shared memory, as the MMA reads them: the last mode is the stage.

    Attributes:
        a: Scales of A.
        b: Scales of B.
    """

    a: Any
    b: Any


# -- host side of the launch


def cta_group(config: GemmConfig) -> Any:
    """Returns the CTA group of the MMA, its copies and its commits."""
    return tcgen05.CtaGroup.TWO if config.cta_group == 2 else tcgen05.CtaGroup.ONE


def tiled_mma(config: GemmConfig, a_major: Any, b_major: Any) -> cute.TiledMma:
    """Returns the tiled MMA: one block-scaled instruction over the full tile."""
    a_dtype, b_dtype = (DTYPES[dtype] for dtype in config.in_dtypes)
    return utils.sm100.make_blockscaled_trivial_tiled_mma(
        a_dtype, b_dtype, a_major, b_major, SCALE, MX[2], cta_group(config), config.tile
    )


def scales_of(config: GemmConfig, a: Any, b: Any) -> MxScales:
    """Returns the TMA loads of the scales of A and B."""
    of_a, of_b = config.scale_atoms
    return MxScales(*tma_of(config, a, of_a), *tma_of(config, b, of_b))


def tma_of(config: GemmConfig, scales: Any, atoms: int) -> tuple[Any, Any]:
    """Returns the TMA load of `atoms` atoms, and the coordinate tensor, whose further modes others slice."""
    layout = cute.make_layout((atoms, ATOM_WORDS), stride=(ATOM_WORDS, 1))
    op = cpasync.CopyBulkTensorTileG2SOp(cta_group(config))
    return cpasync.make_tiled_tma_atom(op, scales, layout, (atoms, ATOM_WORDS))


def fake_scales() -> Any:
    """Returns a fake matrix of scales for compilation."""
    extents, pitch = (cute.sym_int32(), cute.sym_int32(ATOM_WORDS)), cute.sym_int64(divisibility=ATOM_WORDS)
    return make_fake_tensor(WORD, extents, stride=(pitch, 1), assumed_align=16)


def fake_gathered() -> Any:
    """Returns a fake tensor of the scales of all shards in a gather buffer."""
    extents = cute.sym_int32(), cute.sym_int32(ATOM_WORDS), cute.sym_int32()
    pitch, shard = cute.sym_int64(divisibility=ATOM_WORDS), cute.sym_int64(divisibility=8)
    return make_fake_tensor(WORD, extents, stride=(pitch, 1, shard), assumed_align=16)


# -- MMA role


def setup(config: GemmConfig, mma: cute.TiledMma, smem: Any) -> MxStages:
    """Allocates the stages."""
    return MxStages(
        *(
            smem.allocate_tensor(SCALE, layout, byte_alignment=128)
            for layout in _smem_layouts(config, mma, config.ab_stages)
        )
    )


@dataclass(frozen=True)
class TmemScales:
    """Scales of a k tile in tensor memory, and the copies that store them there.

    Attributes:
        a: Scales of A, the MMA's number as last mode.
        b: Scales of B, the MMA's number as last mode.
        copies: (copy, descriptors of the stages, target) of A and of B.
    """

    a: Any
    b: Any
    copies: Any

    def copy(self, stage: Scalar) -> None:
        """Starts to copy a stage's scales; MMAs that are issued later read them."""
        for copy, source, target in self.copies:
            cute.copy(copy, source[(None, None, None, None, stage)], target)

    def scaled(self, a: Any, b: Any, block: int) -> tuple[list[Any], list[Any]]:
        """Returns both operands of the `block`-th MMA of a k tile, with their scales."""
        at = (None, None, block)
        return [a, self.a[at]], [b, self.b[at]]


def in_tmem(config: GemmConfig, mma: cute.TiledMma, stages: MxStages, first: Any) -> TmemScales:
    """Returns the scales of a k tile in tensor memory, from column ``first`` on, which is free."""
    tiler = (*config.tile, config.tile_k)
    one_a, one_b = (cute.slice_(stage.layout, (None, None, None, 0)) for stage in stages)
    layout_a = layouts.make_tmem_layout_sfa(mma, tiler, MX[2], one_a)
    layout_b = layouts.make_tmem_layout_sfb(mma, tiler, MX[2], one_b)
    columns = config.scale_atoms[0] * ATOM_BYTES // 128
    a = cute.make_tensor(cute.recast_ptr(first, dtype=SCALE), layout_a)
    b = cute.make_tensor(cute.recast_ptr(first + columns, dtype=SCALE), layout_b)
    return TmemScales(a, b, [_copy(config, stages.a, a), _copy(config, stages.b, b)])


def _copy(config: GemmConfig, stages: Any, target: Any) -> tuple[Any, Any, Any]:
    """Returns the copy from shared to tensor memory, the same for each warp's lanes."""
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
