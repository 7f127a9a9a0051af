# Copyright (c) 2026 The overlap_gemm authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

# Redistribution and use in source and binary forms, with or without
# modification, are permitted provided that the following conditions are met:

# 1. Redistributions of source code must retain the above copyright notice, this
# list of conditions and the following disclaimer.

# 2. Redistributions in binary form must reproduce the above copyright notice,
# this list of conditions and the following disclaimer in the documentation
# and/or other materials provided with the distribution.

# 3. Neither the name of the copyright holder nor the names of its
# contributors may be used to endorse or promote products derived from
# this software without specific prior written permission.

# THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS"
# AND ANY EXPRESS OR IMPLIED WARRANTIES, INCLUDING, BUT NOT LIMITED TO, THE
# IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
# DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE
# FOR ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL
# DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
# SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER
# CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY,
# OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE
# OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.

"""A flag after a TMA store needs `cp.async.bulk.wait_group`, not `cp.async.bulk.wait_group.read`.

CTA 0 stores a buffer to global memory with a bulk store, waits, and releases a flag. CTA 1 acquires the flag
and copies the buffer. The PTX ISA (cp.async.bulk.wait_group) defines two waits:

* With `.read` the wait ends when the source has been read. Writes may not be complete.
* Without `.read` the wait ends when the writes are visible to the executing thread. Its release of the flag
  then makes them visible to the thread that acquires the flag.

So `--wait read` is a data race. For sm_90a the assembler of nvidia-cutlass-dsl 4.8.1 compiles both waits to
the same instruction (`DEPBAR.LE SB0, 0x0`). So a GPU is not expected to show the race, but no document
guarantees this. An emulator that checks the order of accesses reports the race, with both lines:

.. code-block:: bash

    python -m cute_emulator --arch sm_90a read_wait_race.py --wait full
    python -m cute_emulator --arch sm_90a read_wait_race.py --wait read

On a GPU:

.. code-block:: bash

    python read_wait_race.py --wait read --launches 1000
"""

import argparse

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

THREADS = 256
ELEMENTS = 16384  # of Float32: 64 KiB, one bulk store


@cute.kernel
def send_and_receive(
    x: cute.Tensor,
    mailbox: cute.Tensor,
    out: cute.Tensor,
    flag: cute.Tensor,
    launch: cutlass.Int32,
    reads_only: cutlass.Constexpr,
):
    """Stores x in the mailbox, by CTA 0, and copies the mailbox to out, by CTA 1."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    stage = memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(ELEMENTS), 128)
    if cta == 0:
        for i in cutlass.range(thread, ELEMENTS, THREADS, unroll=1):
            stage[i] = x[i]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if thread == 0:
            store = cute.make_copy_atom(
                cpasync.CopyBulkS2GOp(), cutlass.Float32, num_bits_per_copy=32 * ELEMENTS
            )
            cute.copy(store, stage, mailbox)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=reads_only)
            cute.arch.store(flag.iterator, launch, sem="release", scope="gpu")
    else:
        if thread == 0:
            seen = cute.arch.load(flag.iterator, cutlass.Int32, sem="acquire", scope="gpu")
            while seen < launch:
                seen = cute.arch.load(flag.iterator, cutlass.Int32, sem="acquire", scope="gpu")
        cute.arch.sync_threads()
        for i in cutlass.range(thread, ELEMENTS, THREADS, unroll=1):
            out[i] = mailbox[i]


@cute.jit
def send(
    x: cute.Tensor,
    mailbox: cute.Tensor,
    out: cute.Tensor,
    flag: cute.Tensor,
    launch: cutlass.Int32,
    reads_only: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    """Launches two CTAs, which are resident at the same time."""
    send_and_receive(x, mailbox, out, flag, launch, reads_only).launch(
        grid=(2, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def run(wait: str, launches: int = 3) -> None:
    """Sends different data in each launch and compares what arrives.

    :param wait: "full" or "read", the wait before the flag
    :param launches: Number of launches
    """
    x, mailbox, out = (torch.zeros(ELEMENTS, device="cuda") for _ in range(3))
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (x, mailbox, out, flag)]
    compiled = cute.compile(send, *tensors, 1, wait == "read", stream)
    for launch in range(1, launches + 1):
        x.copy_(torch.arange(ELEMENTS, device="cuda") + launch)
        compiled(*tensors, launch, stream)
        torch.cuda.synchronize()
        torch.testing.assert_close(out, x, rtol=0, atol=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Shows the wait between a TMA store and its flag.")
    parser.add_argument("--wait", choices=["full", "read"], default="full", help="Wait before the flag")
    parser.add_argument("--launches", type=int, default=3, help="Number of launches")
    args = parser.parse_args()
    run(args.wait, args.launches)
    print("PASS")
