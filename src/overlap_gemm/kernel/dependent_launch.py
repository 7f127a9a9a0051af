"""Programmatic dependent launch: a kernel is launched while the one before it in its stream still runs.

    the kernel before   lets it be launched when each of its CTAs has said so
                        (``griddepcontrol.launch_dependents``) or has ended
    every thread        sets up what depends on nobody: barriers, shared memory; then waits until the kernel
                        before has ended and all that it did is visible (``griddepcontrol.wait``)
    load warp           ``dependent_weights``: in front of its wait it loads B's first k tiles, as many as
                        there are stages; A's go to the same stages, after it
    comm warp           after its wait lets the next kernel be launched

What a call reads or writes of a workspace, its epoch first of all, comes after every thread's wait, so the
order between calls is the one of :mod:`overlap_gemm.exchange.call`: nothing there changes. Nor does what the
caller's own kernels rely on: A is read, and the output written, after the kernel before has ended, whichever
it is.

**B early** is read before the kernel before has ended: that one must not write it. Nor may an earlier one
that still runs then: there is none if the kernel before is one of these, which let the next one go after
their own wait; of others' kernels that let go before they wait nothing is known. So it is for weights that
stay as they are while such calls are queued, as in serving. An optimizer's step writes them, and where the
call itself copies the weight, the kernel before does: the host launches ``dependent`` then
(`tuning.settings.late_weights`).

**Progress.** A dependent's CTAs take no place that the kernel before needs: all of its CTAs run when it lets
go. What else it waits for on its own rank might find none: so none of these has a relay kernel
(:mod:`overlap_gemm.exchange.relay`). SMs that are reserved for others may hold CTAs that wait for the kernel
before, and so end after it.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from overlap_gemm.kernel.loads import load_first_weights
from overlap_gemm.kernel.split import num_early
from overlap_gemm.kernel.surface import KernelOp, Mainloop
from overlap_gemm.kernel.work import Work


@cute.jit
def load_weights_early(mainloop: Mainloop, op: KernelOp, res: Any, ops: Any, work: Work) -> None:
    """All lanes of the load warp: loads the first k tiles of B of this cluster's first tile."""
    # In front of the branch: with this in it the DSL's compiler (4.8.1) fails on a one-shot kernel by words.
    place = work.place(op.order, 0)
    col = place.shard * work.shards.col_step + place.n * mainloop.config.cluster_tile[1]
    if work.num_tiles > 0:
        _, b, first, _ = mainloop.loads(res, ops, Int32(0), col)
        load_first_weights(res.ab, mainloop.load_state(), b, first, num_early(mainloop.config, ops.a))


def wait_for_kernel_before(config: cutlass.Constexpr) -> None:
    """Every thread, before it reads or writes anything: waits until that one has ended."""
    if config.is_dependent:
        cute.arch.griddepcontrol_wait()


def let_next_kernel_go(config: cutlass.Constexpr) -> None:
    """A thread of each CTA, after its wait."""
    if config.is_dependent:
        cute.arch.griddepcontrol_launch_dependents()
