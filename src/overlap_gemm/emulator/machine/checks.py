"""What is checked while a kernel runs: proxy fences, pending work at exit, barrier state at exit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from overlap_gemm.emulator.machine.barrier import MBarrier
    from overlap_gemm.emulator.machine.errors import Report
    from overlap_gemm.emulator.machine.warp import Cta, Group, Warp
    from overlap_gemm.emulator.ptx.ir import Instruction

CHECKS = ("proxy", "exit", "mbarrier")
# Right by the letter, but kernels that rely on the assembler's tracking of registers break them on purpose.
STRICT_CHECKS = ("tmem", "wgmma")


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

    # -- initialisation of mbarriers -------------------------------------------------------------

    def mbarrier_init(self, group: Group, barrier: MBarrier) -> None:
        """`mbarrier.init`: a fence of this warp must follow."""
        group.warp.state.setdefault("mbarrier_init", []).append(barrier)

    def mbarrier_fence(self, group: Group) -> None:
        """`fence.mbarrier_init`, or a fence at least as strong."""
        for barrier in group.warp.state.pop("mbarrier_init", ()):
            barrier.fenced = True

    def mbarrier_use(self, barrier: MBarrier, what: str, line: int) -> None:
        """Another CTA or the async proxy operates on a barrier."""
        if not barrier.fenced and "mbarrier" in self.enabled:
            self.report.add(
                "mbarrier-init",
                f"{what} (line {line}) uses {barrier}, but no fence.mbarrier_init followed its init",
                key=barrier.address,
            )

    # -- tensor memory ---------------------------------------------------------------------------

    def tmem_use(
        self,
        cta: Cta,
        kinds: tuple[str, ...],
        first: int,
        columns: int,
        halves: tuple[int, ...],
        what: str,
        line: int,
    ) -> None:
        """A product or a dealloc touches cells: no warp may have an access of `kinds` to them open."""
        found = cta.tmem_order.conflict(kinds, first, columns, halves) if "tmem" in self.enabled else None
        if found is not None:
            kind, warp = found
            self.report.add(
                "tmem-unwaited",
                f"{what} (line {line}) uses columns {first}..{first + columns - 1} of {cta}, where a "
                f"tcgen05.{kind} of warp {warp} has not been waited for with tcgen05.wait::{kind}",
                line,
            )

    # -- wgmma registers -------------------------------------------------------------------------

    def wgmma_unfenced(self, warp: Warp, line: int) -> None:
        """A wgmma uses registers that the warp may have accessed since the last wgmma.fence."""
        if "wgmma" in self.enabled:
            self.report.add(
                "wgmma-fence",
                f"the wgmma of line {line} of {warp} uses registers that other instructions may access, with "
                "no wgmma.fence before it",
                line,
            )

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
