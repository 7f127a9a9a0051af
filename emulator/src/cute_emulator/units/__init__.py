"""The data paths of the asynchronous and tensor instructions as pure functions of memory contents.

Nothing here knows of warps, time or ordering: the machine decides *when* an operation happens, a unit says
*what*. Shared memory is a `uint8` array of one CTA, tensor memory a `uint32` array `[128 lanes, 512
columns]`, a register of a warp an array over the 32 lanes.
"""
