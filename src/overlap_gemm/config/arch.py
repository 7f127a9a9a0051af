"""What differs between architectures, each said once: limits, kinds of MMA and their tiles, warps of a CTA.

Imports neither the DSL nor torch. What is not in `ARCHS` is an error: nothing falls through to another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

MmaKind = Literal["1cta", "2cta", "pingpong", "cooperative", "swap_ab"]
Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Mma:
    """A kind of MMA on an architecture.

    Attributes:
        tiles: legal (M, N) of an MMA tile, in elements.
        clusters: legal (M, N) of a cluster, in CTAs.
        cta_group: CTAs that share one MMA tile.
        epilogue_groups: groups of epilogue warps that take turns on the tiles.
        epilogue_threads: threads of one of them: those that share a subtile.
        swaps: whether B is the MMA's first operand, so that the accumulator is the tile's transpose.
    """

    tiles: Shapes
    clusters: Shapes
    cta_group: int = 1
    epilogue_groups: int = 1
    epilogue_threads: int = 128
    swaps: bool = False


@dataclass(frozen=True)
class Arch:
    """An architecture that kernels are written for.

    Attributes:
        name: what `GemmConfig.arch` says.
        target: what the compiler is told, ``--gpu-arch``.
        capability: the compute capability of its devices, or None: no device is taken for one.
        smem_bytes: shared memory that one CTA may use (CUDA Programming Guide, compute capabilities).
        mma: its kinds of MMA.
        mainloop: module and class of its mainloop, imported where a kernel is composed.
        threads: threads of a CTA.
        first_receive_warp: the first of the warps that are free for a receive role.
        receive_warps: how many they are.
        ring_swizzle: module of `cutlass.utils` that lays out the ring's stages.
        narrow_bytes: whether its MMA adds products of 8-bit types with fewer bits than fp32 has, so that
            what is added over a long K must be promoted (docs/design/fp8.md).
        bytes_k_major: whether 8-bit operands must be contiguous along K (PTX ISA, wgmma: only 16-bit types
            may be transposed).
        multiplies_scales: whether its MMA multiplies 8-bit operands by scales of 32 elements of K (`mx`).
        calls_keep_registers: whether a kernel may call functions that are not inlined. Where it moves
            registers between warps (``setmaxnreg``) the assembler ignores that as soon as there is a call.
    """

    name: str
    target: str
    capability: tuple[int, int] | None
    smem_bytes: int
    mma: Mapping[MmaKind, Mma]
    mainloop: str
    threads: int
    first_receive_warp: int
    receive_warps: int
    ring_swizzle: str
    narrow_bytes: bool
    bytes_k_major: bool
    multiplies_scales: bool
    calls_keep_registers: bool


_SWAP_AB: Shapes = ((16, 64), (32, 64), (64, 64), (128, 64))

SM_90A = Arch(
    name="sm_90a",
    target="sm_90a",
    capability=(9, 0),
    smem_bytes=227 * 1024,
    mma=MappingProxyType(
        {
            "pingpong": Mma(((64, 128), (64, 256), (128, 128)), ((1, 1), (2, 1), (1, 2)), epilogue_groups=2),
            "cooperative": Mma(((128, 128), (128, 256)), ((1, 1), (2, 1), (1, 2)), epilogue_threads=256),
            "swap_ab": Mma(_SWAP_AB, ((1, 1),), epilogue_groups=2, swaps=True),
        }
    ),
    mainloop="overlap_gemm.mainloop.sm90:MainloopSm90",
    threads=384,
    first_receive_warp=2,
    receive_warps=2,
    ring_swizzle="sm90",
    narrow_bytes=True,
    bytes_k_major=True,
    multiplies_scales=False,
    calls_keep_registers=False,
)

SM_100A = Arch(
    name="sm_100a",
    target="sm_100a",
    capability=(10, 0),
    smem_bytes=227 * 1024,
    mma=MappingProxyType(
        {
            "1cta": Mma(((128, 64), (128, 128), (128, 256)), ((1, 1), (2, 1), (1, 2), (2, 2))),
            "2cta": Mma(((256, 128), (256, 256)), ((2, 1), (2, 2), (4, 1), (4, 2)), cta_group=2),
            "swap_ab": Mma(_SWAP_AB, ((1, 1),), swaps=True),
        }
    ),
    mainloop="overlap_gemm.mainloop.sm100:MainloopSm100",
    threads=352,
    first_receive_warp=7,
    receive_warps=4,
    ring_swizzle="sm100",
    narrow_bytes=False,
    bytes_k_major=False,
    multiplies_scales=True,
    calls_keep_registers=True,
)

ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (SM_90A, SM_100A, replace(SM_100A, name="sm_103a", target="sm_103a", capability=(10, 3)))
}
"""The registry. Another architecture is another entry."""


def arch_of(name: str) -> Arch:
    """The record of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in ARCHS:
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}; got {name}")
    return ARCHS[name]


def arch_of_capability(capability: tuple[int, int]) -> Arch | None:
    """The record for devices of a compute capability, or None."""
    return next((arch for arch in ARCHS.values() if arch.capability == capability), None)
