"""Programmatic dependent launch: a kernel is launched while the preceding one in its stream still runs.

- Preceding kernel: permits the launch when each of its CTAs has executed
  ``griddepcontrol.launch_dependents`` or has ended.
- Every thread: sets up barriers and shared memory, which depend on no other kernel. Then it waits until the
  preceding kernel has ended and its writes are visible (``griddepcontrol.wait``).
- Load warp, ``dependent_weights``: before its wait it loads the first k tiles of B, at most one per stage. It
  loads the k tiles of A into the same stages after the wait.
- Comm warp of each CTA, all lanes: after its wait it permits the launch of the next kernel.

All accesses of a call to a workspace, the epoch first, come after every thread's wait. So the order between
calls of :mod:`overlap_gemm.exchange.call` is unchanged. The same holds for the caller's kernels: A is read,
and the output written, after the preceding kernel has ended, whatever that kernel is.

**Early B** is read before the preceding kernel has ended. So neither that kernel nor an earlier one that
still runs may write B. If the preceding kernel is of this library, no earlier one still runs: it permits the
launch after its wait. A foreign kernel may permit the launch before its wait. Then an earlier kernel may
still write B, and nothing is guaranteed. Early loads are for weights that do not change while such calls are
queued, as in serving; an optimizer's step writes weights. If the call itself copies the weight, the preceding
kernel is the copy. Then the host launches ``dependent`` (`tuning.settings.late_weights`).

**Progress.** All CTAs of the preceding kernel are resident when it permits the launch. So the dependent
kernel's CTAs occupy no SM that the preceding kernel needs. A kernel with a relay kernel
(:mod:`overlap_gemm.exchange.relay`) is never dependent. Otherwise CTAs launched early could occupy the SM
that the relay kernel needs, while a GEMM waits for the relay kernel. SMs that are reserved for other kernels
may hold CTAs that wait for the preceding kernel, and end after it.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from overlap_gemm.kernel.loads import load_first_weights
from overlap_gemm.kernel.protocols import KernelOp, Mainloop
from overlap_gemm.kernel.split import num_early
from overlap_gemm.kernel.work import Work


@cute.jit
def load_weights_early(mainloop: Mainloop, op: KernelOp, res: Any, ops: Any, work: Work) -> None:
    """Loads the first k tiles of B of this cluster's first tile; all lanes of the load warp."""
    # Before the branch: with this in it the DSL's compiler (4.8.1) fails on a one-shot kernel with LL.
    place = work.place(op.order, 0)
    column = place.n * mainloop.config.cluster_tile[1]
    col = place.shard * work.shards.col_step + column
    if cutlass.const_expr(ops.others is not None):
        weights = work.shards.weights
        for i in cutlass.range_constexpr(len(weights)):
            begin, columns, step = weights[i]
            if (work.num_tiles > 0) & (column >= begin) & (column < begin + columns):
                col = place.shard * step + column - begin
                _, b, first, _ = mainloop.loads(res, ops.of_weight(i), Int32(0), col)
                load_first_weights(res.ab, mainloop.load_state(), b, first, num_early(mainloop.config, ops.b))
    elif work.num_tiles > 0:
        _, b, first, _ = mainloop.loads(res, ops.parts_of_k[0], Int32(0), col)
        load_first_weights(res.ab, mainloop.load_state(), b, first, num_early(mainloop.config, ops.b))


def wait_for_prerequisite(config: cutlass.Constexpr) -> None:
    """Waits until the preceding kernel has ended, if dependent; every thread, before it accesses its data."""
    if config.is_dependent:
        cute.arch.griddepcontrol_wait()


def launch_dependents(config: cutlass.Constexpr) -> None:
    """Permits the launch of the next kernel, if dependent; the comm warp of each CTA, after its wait."""
    if config.is_dependent:
        cute.arch.griddepcontrol_launch_dependents()
