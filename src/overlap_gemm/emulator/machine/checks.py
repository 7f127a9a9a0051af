"""What is checked while a kernel runs: proxy fences, pending work at exit, barrier state at exit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from overlap_gemm.emulator.machine.barrier import MBarrier
    from overlap_gemm.emulator.machine.errors import Report
    from overlap_gemm.emulator.machine.warp import Cta, Group
    from overlap_gemm.emulator.ptx.ir import Instruction

CHECKS = ("proxy", "exit")


class Checks:
    """Hooks that instruction handlers call; each feeds the report."""

    def __init__(self, report: Report, enabled: frozenset[str]) -> None:
        self.report, self.enabled = report, enabled

    # -- generic and async proxy -----------------------------------------------------------------

    def proxy_fence(self, group: Group, spaces: list[str]) -> None:
        """`fence.proxy.async`: what this warp wrote to shared memory is now visible to the async proxy."""
        cta = group.warp.cta
        if not spaces or spaces[0].startswith("shared"):
            dirty = cta.dirty
            dirty[dirty == group.warp.index + 1] = 0

    def async_read(self, cta: Cta, offsets: NDArray[np.int64], what: str, line: int) -> None:
        """An async unit reads shared memory: every granule must have been fenced since it was written."""
        if "proxy" not in self.enabled:
            return
        granules = offsets >> 4
        marks = cta.dirty[granules]
        if marks.any():
            at = int(np.flatnonzero(marks)[0])
            writer = int(marks[at]) - 1
            self.report.add(
                "proxy-fence",
                f"{what} (line {line}) reads shared address {int(offsets[at]):#x} of {cta}, which warp "
                f"{writer} wrote through the generic proxy with no fence.proxy.async since",
                line,
            )

    def async_write(self, cta: Cta, offsets: NDArray[np.int64]) -> None:
        """An async unit overwrote shared memory: generic writes before it no longer matter."""
        cta.dirty[offsets >> 4] = 0

    # -- synchronisation hooks -------------------------------------------------------------------

    def fence(self, group: Group, ins: Instruction) -> None:
        """`fence` and `membar`."""

    def release(self, group: Group, ins: Instruction) -> None:
        """An mbarrier arrival."""

    def arrive(self, group: Group, barrier: MBarrier) -> None:
        """An arrival at a barrier object."""

    def acquire_barrier(self, group: Group, barrier: MBarrier) -> None:
        """A successful wait on a barrier object."""

    def strong_load(self, group: Group, ins: Instruction, space: str, address: Any, acquires: bool) -> None:
        """A volatile, relaxed or acquire load."""

    def strong_store(self, group: Group, ins: Instruction, space: str, address: Any) -> None:
        """A volatile, relaxed or release store."""

    def atomic(self, group: Group, ins: Instruction, space: str, address: Any) -> None:
        """An atomic or reduction."""

    # -- exit ------------------------------------------------------------------------------------

    def cta_exit(self, cta: Cta) -> None:
        """Nothing may still read or write the memory of a CTA that ends."""
        if "exit" not in self.enabled:
            return
        for event in cta.pending.values():
            self.report.add(
                "exit-pending", f"{cta} exits while {event.what} has not happened", key=event.what
            )
        for barrier in cta.mbarriers.values():
            if barrier.tx:
                self.report.add("exit-tx", f"{cta} exits with {barrier}", key=barrier.address)
        if cta.tmem_owner.any():
            columns = int(np.count_nonzero(cta.tmem_owner))
            self.report.add(
                "tmem-leak", f"{cta} exits with {columns} columns of tensor memory allocated", key=0
            )
