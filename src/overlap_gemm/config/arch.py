"""Facts of the architectures, each defined once: limits, kinds of MMA and their tiles, warps of a CTA.

Imports neither the DSL nor torch. An architecture that is not in `ARCHS` is an error: there is no fallback.
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
        tiles: Legal (M, N) of an MMA tile, in elements.
        clusters: Legal (M, N) of a cluster, in CTAs.
        cta_group: Number of CTAs that share one MMA tile.
        epilogue_groups: Number of groups of epilogue warps that take turns on the tiles.
        epilogue_threads: Threads of one of these groups: those that share a subtile.
        swaps: Whether B is the MMA's first operand, so that the accumulator is the tile's transpose.
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
        name: Name in `GemmConfig.arch`.
        target: Compiler option ``--gpu-arch``.
        capability: Compute capability of its devices, or None: no device has this architecture.
        smem_bytes: Shared memory that one CTA may use (CUDA Programming Guide, compute capabilities).
        mma: Kinds of MMA, by name.
        mainloop: Module and class of its mainloop, imported where a kernel is composed.
        threads: Threads of a CTA.
        first_receive_warp: First of the warps that are free for a receive role.
        receive_warps: Number of these warps.
        ring_swizzle: Module of `cutlass.utils` that lays out the ring's stages.
        narrow_bytes: Whether its MMA sums products of 8-bit types with fewer bits than fp32 has. Sums over a
            long K must then be promoted (docs/design/fp8.md).
        bytes_k_major: Whether 8-bit operands must be contiguous along K (PTX ISA, wgmma: only 16-bit types
            may be transposed).
        multiplies_scales: Whether its MMA multiplies 8-bit operands by scales of 32 elements of K (`mx`).
        calls_keep_registers: Whether a kernel may call functions that are not inlined. If the kernel moves
            registers between warps (``setmaxnreg``), the assembler ignores that as soon as there is a call.
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
"""The architectures by name; registered ones are last (`overlap_gemm.register`)."""


def add_arch(arch: Arch) -> None:
    """Adds an architecture to `ARCHS`.

    Raises:
        ValueError: Another architecture has this name, or is that of devices of this compute capability.
    """
    if arch.name in ARCHS:
        raise ValueError(f"arch {arch.name!r} is there already; there are {', '.join(ARCHS)}")
    other = None if arch.capability is None else arch_of_capability(arch.capability)
    if other is not None:
        raise ValueError(
            f"arch {arch.name!r} needs a compute capability of its own, or None; {arch.capability} is that "
            f"of {other.name}"
        )
    ARCHS[arch.name] = arch


def arch_of(name: str) -> Arch:
    """Returns the architecture of a name.

    Raises:
        ValueError: No architecture has this name.
    """
    if name not in ARCHS:
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}; got {name}")
    return ARCHS[name]


def arch_of_capability(capability: tuple[int, int]) -> Arch | None:
    """Returns the architecture for devices of a compute capability, or None."""
    return next((arch for arch in ARCHS.values() if arch.capability == capability), None)
