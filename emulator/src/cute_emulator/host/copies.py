"""Copy engines: copies in stream order that run concurrently with the rank's kernels, on none of their SMs.

A copy is modelled as a small kernel of one warp on SMs that no other kernel uses. So all rules for kernels
apply to it: the order of its stream, happens-before, and late arrival of stores at a peer.

Every copy begins after the earlier work of its stream. A *flag* is a copy of 4 or 8 bytes by
``st.release.sys``: a reader that observes it observes everything before it in the stream. CUDA guarantees
this order: copies of one stream execute one after the other, and stream writes follow a system-wide fence
(CUDA driver API, `cuStreamWriteValue32`).
"""

from __future__ import annotations

import struct

from cute_emulator.execution.launch import Launch

CHUNK = 16
"""Bytes that a lane copies at a time."""

FLAGS = {4: "flag", 8: "wide_flag"}
"""Kernel that copies a flag, by the flag's bytes."""

_PTX = """
.version 8.6
.target sm_90a
.address_size 64

.visible .entry copy(.param .u64 target, .param .u64 source, .param .u64 nbytes)
{
    .reg .pred %p;
    .reg .b64 %t, %s, %n, %at, %x, %y;
    .reg .b32 %lane, %v<5>;
    ld.param.u64 %t, [target];
    ld.param.u64 %s, [source];
    ld.param.u64 %n, [nbytes];
    mov.u32 %lane, %tid.x;
    mul.wide.u32 %at, %lane, 16;
COPY:
    setp.ge.u64 %p, %at, %n;
    @%p bra DONE;
    add.u64 %x, %s, %at;
    add.u64 %y, %t, %at;
    ld.global.v4.u32 {%v1, %v2, %v3, %v4}, [%x];
    st.global.v4.u32 [%y], {%v1, %v2, %v3, %v4};
    add.u64 %at, %at, 512;
    bra COPY;
DONE:
    ret;
}

.visible .entry flag(.param .u64 target, .param .u64 source, .param .u64 nbytes)
{
    .reg .pred %p;
    .reg .b64 %t, %s;
    .reg .b32 %lane, %v;
    ld.param.u64 %t, [target];
    ld.param.u64 %s, [source];
    mov.u32 %lane, %tid.x;
    setp.ne.u32 %p, %lane, 0;
    @%p bra DONE;
    ld.global.u32 %v, [%s];
    st.release.sys.global.u32 [%t], %v;
DONE:
    ret;
}

.visible .entry wide_flag(.param .u64 target, .param .u64 source, .param .u64 nbytes)
{
    .reg .pred %p;
    .reg .b64 %t, %s;
    .reg .b32 %lane;
    .reg .b64 %v;
    ld.param.u64 %t, [target];
    ld.param.u64 %s, [source];
    mov.u32 %lane, %tid.x;
    setp.ne.u32 %p, %lane, 0;
    @%p bra DONE;
    ld.global.u64 %v, [%s];
    st.release.sys.global.u64 [%t], %v;
DONE:
    ret;
}
"""


def copy_launch(rank: int, stream: int, target: int, source: int, nbytes: int) -> Launch:
    """Returns the launch of a copy by an engine of `rank`; 4 or 8 bytes are copied as a flag.

    Args:
        rank: Rank of the stream.
        stream: Handle of the stream.
        target: Address of any rank's memory.
        source: Source address.
        nbytes: 4, 8, or a multiple of 16 at addresses that are multiples of 16.

    Raises:
        ValueError: Another number of bytes, or a misaligned address of a copy that is not a flag.
    """
    if nbytes not in FLAGS and (nbytes | target | source) % CHUNK:
        raise ValueError(
            f"a copy must have 4 or 8 bytes, or a multiple of {CHUNK} at addresses that are multiples of "
            f"{CHUNK}; got {nbytes} bytes from {source:#x} to {target:#x}"
        )
    params = tuple(struct.pack("<Q", value) for value in (target, source, nbytes))
    entry = FLAGS.get(nbytes, "copy")
    return Launch(_PTX, entry, (1, 1, 1), (32, 1, 1), params=params, rank=rank, stream=stream, engine=True)
