"""A Hopper of 100 KiB of shared memory with fewer tiles, as an architecture from outside."""

from overlap_gemm import Arch, Mma, register

SMALL_HOPPER = Arch(
    name="sm_90s",
    target="sm_90a",
    capability=(9, 9),
    smem_bytes=100 * 1024,
    mma={"cooperative": Mma(((128, 128),), ((1, 1),), epilogue_threads=256)},
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
register(SMALL_HOPPER)
