"""Data paths of the asynchronous and tensor instructions, as pure functions of memory contents.

This package contains no warps, time or ordering: the machine decides *when* an operation happens, a unit
computes its *result*. Representations:

- shared memory: a `uint8` array of one CTA
- tensor memory: a `uint32` array `[128 lanes, 512 columns]`
- a register of a warp: an array over the 32 lanes
"""
