"""The configuration of a fused GEMM kernel: every compile-time choice; `rules` defines the legal ones.

Imports neither the DSL nor torch, so planning, tuning and the command line can use it on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from overlap_gemm.config.arch import Arch, Mma, MmaKind, arch_of
from overlap_gemm.config.naming import name_of
from overlap_gemm.config.rules import (
    BARRIER_BYTES,
    MOST_IN_REGISTERS,
    PROMOTED_VALUES,
    InDtype,
    Launch,
    OutDtype,
    check,
)
from overlap_gemm.config.scale_blocks import (
    ATOM_BYTES,
    ATOM_ROWS,
    MX,
    PROMOTED,
    STAGE_ALIGNMENT,
    TMA_SCALES,
    Blocks,
)
from overlap_gemm.config.visitors import Operand, Visitor

DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "e4m3": 1, "e5m2": 1}

TILE_K_BYTES = 128
"""K extent of one A/B stage: one swizzle row."""

TMEM_COLUMNS = 512
"""Columns of 128 lanes of 4 bytes: all tensor memory of an SM (PTX ISA, tcgen05)."""

UNIT_BYTES = 4096
"""Largest unit, the bytes of a slot that a warp finishes at a time: 8 chunks of 16 bytes a lane."""

TILE_UNITS = 4
"""Least number of units of a slot: so several warps finish a small tile, each with one round of loads."""


@dataclass(frozen=True)
class GemmConfig:
    """Compile-time choices of one kernel. Rank, world size and shape are run-time values, not part of it.

    Attributes:
        arch: Name of an architecture in `arch.ARCHS`.
        tile: (M, N) of one MMA tile, in elements. For ``mma="2cta"`` the tile of both CTAs together.
        cluster: (M, N) of a thread block cluster, in CTAs. A and B tiles are multicast along it.
        mma: Warps or CTAs that issue the MMA. sm_100: ``"1cta"`` or ``"2cta"`` (tcgen05 ``cta_group``).
            sm_90: ``"pingpong"`` (two warp groups work on alternate tiles) or ``"cooperative"`` (both on one
            tile). Both: ``"swap_ab"`` (as 1-CTA, or ping-pong, with B as the MMA's 64-row operand: for few
            rows of A).
        in_dtype: Element type of A and B. Accumulation is fp32. 8-bit products may be scaled by visitors.
        b_dtype: Element type of B if it is the other 8-bit type; None: A's.
        out_dtype: Element type of the output.
        slot_dtype: Element type of partial tiles on the wire; a 16-bit type rounds each partial once.
        a_major: Contiguous dimension of A (M x K): ``"k"`` or ``"m"``.
        b_major: Contiguous dimension of B (N x K): ``"k"`` or ``"n"``.
        epilogue: Visitors applied to sums before they are rounded, in order (`config.visitors`).
        ring_stages: Shared-memory stages between the epilogue warps and the comm lane.
        inflight: Bulk groups the comm lane leaves in flight, 1 to ``ring_stages - 1``.
        raster_group: Tile rows per band of the raster (L2 locality).
        fast_accum: For 8-bit types: whether sums stay in the MMA's accumulator, which on sm_90a keeps 14
            bits of them. By default they are promoted to fp32 after each k tile there.
        blocks: For 8-bit types: numbers of rows of A, rows of B and elements of K that share a scale:
            `PROMOTED` or `MX`; None: there are no scales of these kinds.
        k_split: Number of CTAs that share a tile, each of which multiplies a part of K (`kernel.split`).
        leaves: Parts of a rank's K whose sums are added by a binary tree (`mainloop.leaves`); 0: no tree.
        launch: Beginning of the kernel. ``"ordered"``: after the stream's preceding kernel has ended.
            ``"dependent"``: as its programmatic dependent (`kernel.dependent_launch`).
            ``"dependent_weights"``, swapped kernels only: it also reads B before that; nothing may write B.
        weights: Number of matrices B: each with an output (`work.WeightColumns`), or each a part of K with a
            matrix A.
    """

    arch: str = "sm_100a"
    tile: tuple[int, int] = (128, 128)
    cluster: tuple[int, int] = (1, 1)
    mma: MmaKind = "1cta"
    in_dtype: InDtype = "bf16"
    out_dtype: OutDtype = "bf16"
    slot_dtype: OutDtype = "bf16"
    a_major: Literal["k", "m"] = "k"
    b_major: Literal["k", "n"] = "k"
    epilogue: tuple[Visitor, ...] = ()
    ring_stages: int = 4
    inflight: int = 2
    raster_group: int = 8
    k_split: int = 1
    leaves: int = 0
    fast_accum: bool = False
    launch: Launch = "ordered"
    blocks: Blocks | None = None
    b_dtype: InDtype | None = None
    weights: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError, naming the rule, for a configuration no kernel exists for."""
        check(self)

    @cached_property
    def on(self) -> Arch:
        """Returns the architecture."""
        return arch_of(self.arch)

    @cached_property
    def kind(self) -> Mma:
        """Returns the kind of MMA on this architecture."""
        return self.on.mma[self.mma]

    @cached_property
    def has_two_weights(self) -> bool:
        """Returns whether B is two matrices, read as one (`kernel.operand_views.interleaved`)."""
        return any(visitor.of_two_weights for visitor in self.epilogue)

    @cached_property
    def has_bytes(self) -> bool:
        """Returns whether A and B are of an 8-bit type."""
        return DTYPE_BYTES[self.in_dtype] == 1

    @cached_property
    def in_dtypes(self) -> tuple[str, str]:
        """Returns the element types of A and of B."""
        return self.in_dtype, self.b_dtype or self.in_dtype

    @cached_property
    def half_dtype(self) -> str:
        """Returns the 16-bit type for which 16-bit stages are laid out."""
        return "bf16" if self.has_bytes else self.in_dtype

    @cached_property
    def promotes(self) -> bool:
        """Returns whether the MMA's sums are added to fp32 registers after each k tile."""
        return self.has_bytes and self.on.narrow_bytes and not self.fast_accum

    @cached_property
    def sums(self) -> int:
        """Returns the number of k tiles whose sums are in flight in a warp group, if sums are promoted.

        With two, one sum is promoted during the products of the other. Wide tiles have no registers for two.
        With scales of blocks there is one, because a k tile's scales multiply its sum.
        """
        return 1 if self.sum_parts > 1 or self.blocks in PROMOTED else 2

    @cached_property
    def sum_parts(self) -> int:
        """Returns the number of parts of a tile's columns, one instruction each, promoted one by one."""
        return max(self.accumulators // PROMOTED_VALUES, 1) if self.promotes else 1

    @cached_property
    def receive_role_is_register_limited(self) -> bool:
        """Returns whether receive and shard roles have few registers: promotion needs them."""
        in_flight = self.accumulators // self.sum_parts * self.sums
        return self.promotes and self.accumulators + in_flight == 3 * PROMOTED_VALUES

    @cached_property
    def accumulators(self) -> int:
        """Returns the number of accumulators of a thread."""
        return self.cta_tile[0] * self.cta_tile[1] // self.epilogue_threads

    @cached_property
    def k_step(self) -> int:
        """Returns the divisor of the number of k tiles: 2 if two sums are in flight (`sums`), else 1."""
        return self.sums if self.promotes else 1

    @cached_property
    def tile_k(self) -> int:
        """Returns the K extent of one A/B stage, in elements."""
        return TILE_K_BYTES // DTYPE_BYTES[self.in_dtype]

    @cached_property
    def accumulations(self) -> int:
        """Returns the number of separate sums of a tile, one for each leaf of K; 1 without leaves."""
        return max(self.leaves, 1)

    @cached_property
    def levels(self) -> int:
        """Returns the number of nodes of the leaves' tree that a tile keeps at once."""
        return self.accumulations.bit_length() - 1

    @cached_property
    def parks_in_memory(self) -> bool:
        """Returns whether nodes of the leaves' tree are in local memory, because registers are too few."""
        of_products = PROMOTED_VALUES if self.promotes else 0
        return self.accumulators * (self.levels + 1) + of_products > MOST_IN_REGISTERS

    @cached_property
    def parked_bytes(self) -> int:
        """Returns the most bytes of a thread's local memory that nodes of the tree need."""
        return 4 * self.accumulators * max(self.levels, 2) if self.levels else 0

    @cached_property
    def is_dependent(self) -> bool:
        """Returns whether the kernel may be launched before the stream's preceding kernel has ended."""
        return self.launch != "ordered"

    @cached_property
    def loads_weights_early(self) -> bool:
        """Returns whether B is read before the stream's preceding kernel has ended."""
        return self.launch == "dependent_weights"

    @cached_property
    def epilogue_operands(self) -> tuple[Operand, ...]:
        """Returns the operands of all visitors, in the order in which the kernel takes them."""
        return tuple(operand for visitor in self.epilogue for operand in visitor.operands)

    @cached_property
    def visits_rows(self) -> bool:
        """Returns whether an epilogue warp reads an operand per row of A, which is gathered with the row."""
        partial = [visitor for visitor in self.epilogue if visitor.of == "partial"]
        return any(operand.kind == "rows" for visitor in partial for operand in visitor.operands)

    @cached_property
    def is_swap_ab(self) -> bool:
        """Returns whether the MMA's rows are B's, and the accumulator is the tile's transpose."""
        return self.kind.swaps

    @cached_property
    def sends_ll(self) -> bool:
        """Returns whether tiles are sent as LL packets, unless another transport is requested.

        One warp stores all packets of a tile. For a large tile that takes longer than a flag's trip: for 128
        rows 3 to 5 us more than bulk stores on two H200, for 64 and fewer 0 to 3 us less.
        """
        return self.is_swap_ab and self.tile[0] <= 64

    @cached_property
    def mma_order(self) -> tuple[int, int]:
        """Returns the numbers of the MMA's first and second operand: 0 for A, 1 for B."""
        return (1, 0) if self.is_swap_ab else (0, 1)

    @cached_property
    def cta_group(self) -> int:
        """Returns the number of CTAs that share one MMA tile."""
        return self.kind.cta_group

    @cached_property
    def cta_tile(self) -> tuple[int, int]:
        """Returns (M, N) of the accumulator of one CTA."""
        return self.tile[0] // self.cta_group, self.tile[1]

    @cached_property
    def cluster_tile(self) -> tuple[int, int]:
        """Returns (M, N) that one cluster computes at a time: the unit of the tile order."""
        return self.cta_tile[0] * self.cluster[0], self.cta_tile[1] * self.cluster[1]

    @cached_property
    def cluster_size(self) -> int:
        """Returns the number of CTAs of `cluster`: those among which a cluster tile is divided."""
        return self.cluster[0] * self.cluster[1]

    @cached_property
    def cluster_ctas(self) -> int:
        """Returns the number of CTAs of a launched cluster: ``k_split`` for each of `cluster_size`."""
        return self.cluster_size * self.k_split

    @cached_property
    def split_bytes(self) -> int:
        """Returns the bytes in which the first CTA of a split tile collects the others' accumulators."""
        return (self.k_split - 1) * self.cta_tile[0] * self.cta_tile[1] * 4

    @cached_property
    def epilogue_groups(self) -> int:
        """Returns the number of groups of epilogue warps that take turns on the tiles."""
        return self.kind.epilogue_groups

    @cached_property
    def epilogue_threads(self) -> int:
        """Returns the number of threads of one epilogue group: those that share a subtile."""
        return self.kind.epilogue_threads

    @cached_property
    def threads(self) -> int:
        """Returns the number of threads per CTA."""
        return self.on.threads

    @cached_property
    def first_receive_warp(self) -> int:
        """Returns the first of the warps that are free for a receive role."""
        return self.on.first_receive_warp

    @cached_property
    def receive_warps(self) -> int:
        """Returns the number of warps that are free for a receive role."""
        return self.on.receive_warps

    @cached_property
    def epi_tile(self) -> tuple[int, int]:
        """Returns (M, N) of a subtile: the content of one ring stage."""
        if self.is_swap_ab:
            return min(self.tile[0], 64), 64
        if self.mma == "pingpong":
            return 64, 32 if self.has_pairs or "f32" in (self.out_dtype, self.slot_dtype) else 64
        return 128, 32

    @cached_property
    def subtiles(self) -> int:
        """Returns the number of subtiles per CTA tile."""
        return self.cta_tile[0] // self.epi_tile[0] * self.epi_columns

    @cached_property
    def has_pairs(self) -> bool:
        """Returns whether the epilogue makes one output subtile of two adjacent ones of the product."""
        return any(visitor.epilogue.pairs for visitor in self.epilogue)

    @cached_property
    def subtile_step(self) -> int:
        """Returns the number of subtiles of the product that make one of the output."""
        return 2 if self.has_pairs else 1

    @cached_property
    def stored_subtiles(self) -> int:
        """Returns the number of subtiles of the output per CTA tile."""
        return self.subtiles // self.subtile_step

    @cached_property
    def epi_columns(self) -> int:
        """Returns the subtiles along N; subtile ``s`` is at (``s // epi_columns``, ``s % epi_columns``)."""
        return self.cta_tile[1] // self.epi_tile[1]

    @cached_property
    def slot_subtile_bytes(self) -> int:
        """Returns the bytes of one partial subtile on the wire."""
        return self.epi_tile[0] * self.epi_tile[1] * DTYPE_BYTES[self.slot_dtype]

    @cached_property
    def tile_bytes(self) -> int:
        """Returns the bytes of one partial CTA tile on the wire, and so of its slot."""
        return self.subtiles * self.slot_subtile_bytes

    @cached_property
    def result_bytes(self) -> int:
        """Returns the bytes of one summed CTA tile on the wire, and so of its result slot."""
        return self.tile_bytes // DTYPE_BYTES[self.slot_dtype] * DTYPE_BYTES[self.out_dtype]

    @cached_property
    def unit_bytes(self) -> int:
        """Returns the bytes of a unit, which divide a subtile: `copied_bytes`, at most a quarter slot."""
        return min(self.copied_bytes, self.tile_bytes // TILE_UNITS)

    @cached_property
    def unit_rows(self) -> int:
        """Returns the number of rows of a subtile in a unit."""
        return self.unit_bytes // (self.epi_tile[1] * DTYPE_BYTES[self.slot_dtype])

    @cached_property
    def copied_bytes(self) -> int:
        """Returns the most bytes that a warp loads at a time, all of them in flight at once."""
        return UNIT_BYTES // 2 if self.receive_role_is_register_limited else UNIT_BYTES

    @cached_property
    def units(self) -> int:
        """Returns the number of parts into which the receive role cuts a CTA tile."""
        return self.tile_bytes // self.unit_bytes

    @cached_property
    def lane_chunks(self) -> int:
        """Returns the number of 16-byte chunks of a unit that each lane of a warp finishes."""
        return self.unit_bytes // (32 * 16)

    @cached_property
    def stage_bytes(self) -> int:
        """Returns the bytes of one ring stage: the larger of a partial and an output subtile."""
        wide = max(DTYPE_BYTES[self.slot_dtype], DTYPE_BYTES[self.out_dtype])
        return self.epi_tile[0] * self.epi_tile[1] * wide

    @cached_property
    def ab_stage_bytes(self) -> int:
        """Returns the bytes of one A/B stage in one CTA.

        Operands and scales of `MX` are padded to a multiple of 1024 bytes. Scales of `PROMOTED` follow.
        """
        of_a, of_b = self.scale_bytes
        loaded = -(-(self.ab_loaded_bytes - of_a - of_b) // 1024) * 1024
        return loaded + of_a + -(-of_b // STAGE_ALIGNMENT) * STAGE_ALIGNMENT

    @cached_property
    def ab_loaded_bytes(self) -> int:
        """Returns the bytes that a CTA loads into a stage (2-CTA: each has half of B, all of its scales)."""
        operands = (self.cta_tile[0] + self.cta_tile[1] // self.cta_group) * TILE_K_BYTES
        return operands + sum(self.scale_atoms) * ATOM_BYTES + sum(self.scale_bytes)

    @cached_property
    def block_rows(self) -> int:
        """Returns the number of rows of B that share a scale of `PROMOTED`; 0: there is none."""
        return self.blocks[1] if self.blocks is not None and self.blocks in PROMOTED else 0

    @cached_property
    def column_blocks(self) -> int:
        """Returns the number of blocks of B's rows in a CTA tile that share a scale of `PROMOTED`."""
        return max(self.cta_tile[1] // self.block_rows, 1) if self.block_rows else 0

    @cached_property
    def k_parts(self) -> int:
        """Returns the parts of a k tile that have separate scales of `PROMOTED`; each is promoted."""
        return max(self.tile_k // self.blocks[2], 1) if self.blocks and self.blocks in PROMOTED else 1

    @cached_property
    def scale_bytes(self) -> tuple[int, int]:
        """Returns bytes of scales of `PROMOTED` per stage and CTA: of A's rows, of blocks of columns."""
        of_rows = 4 * self.k_parts * self.cta_tile[0] if self.column_blocks else 0
        return of_rows, 4 * TMA_SCALES * self.column_blocks

    @cached_property
    def scale_atoms(self) -> tuple[int, int]:
        """Returns the atoms of scales of A and of B that a CTA has of a k tile."""
        if self.blocks != MX:
            return 0, 0
        return self.cta_tile[0] // ATOM_ROWS, self.cta_tile[1] // ATOM_ROWS

    @cached_property
    def acc_stages(self) -> int:
        """Returns the accumulators in tensor memory: two, or one if two leave no space for scales."""
        columns = self.tile[self.mma_order[1]]
        return 2 if 2 * columns + sum(self.scale_atoms) * ATOM_BYTES // 128 <= TMEM_COLUMNS else 1

    @cached_property
    def ab_stages(self) -> int:
        """Returns the number of A/B stages that fit next to barriers, ring and the sums of split K."""
        return (self.on.smem_bytes - self._smem_but_ab) // self.ab_stage_bytes

    @cached_property
    def smem_bytes(self) -> int:
        """Returns the bytes of shared memory of one CTA, all of it dynamic."""
        return self._smem_but_ab + self.ab_stages * self.ab_stage_bytes

    @cached_property
    def _smem_but_ab(self) -> int:
        return BARRIER_BYTES + self.ring_stages * self.stage_bytes + self.split_bytes

    @cached_property
    def name(self) -> str:
        """Returns a short name: ``sm_100a_1cta_128x128_c1x1_bf16``, then departures from defaults."""
        return name_of(self)


_OPERANDS = ("arch", "in_dtype", "b_dtype", "out_dtype", "a_major", "b_major", "weights")
FACTS = (*_OPERANDS, "epilogue", "blocks", "leaves")
"""Fields that the device, the operands of a call and its promises determine, not the caller."""

CHOICES = tuple(field.name for field in fields(GemmConfig) if field.name not in FACTS)
"""Fields that callers may choose (`configured`)."""
