"""Events of kernels that rules handle, in addition to accesses and their order.

They are passed to `Checks.emit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cute_emulator.machine.barrier import CountBarrier, MBarrier
    from cute_emulator.machine.warp import Cta, Group, Warp
    from cute_emulator.ptx.ir import Instruction

Cells = tuple[int, int, tuple[int, ...]]
"""First column, columns, and halves of each 32 lanes."""


@dataclass(frozen=True)
class ByGroup:
    """Event of lanes of a warp.

    Attributes:
        group: Lanes.
        line: PTX line.
    """

    group: Group
    line: int


@dataclass(frozen=True)
class TensorMemoryUsed(ByGroup):
    """An asynchronous operation on cells of tensor memory is issued.

    Attributes:
        ctas: CTAs whose tensor memory is used.
        cells: Cells that are used.
        what: Operation.
    """

    ctas: tuple[Cta, ...]
    cells: tuple[Cells, ...]
    what: str


@dataclass(frozen=True)
class CtaGroupNamed(ByGroup):
    """A tcgen05 instruction names its `.cta_group`, another one than the kernel's first.

    Attributes:
        pair: Whether it is 2.
    """

    pair: bool


@dataclass(frozen=True)
class TensorMemoryAllocated(ByGroup):
    """A CTA has allocated columns together with its pair."""


@dataclass(frozen=True)
class CtaEnded:
    """The last warp of a CTA has exited.

    Attributes:
        cta: The CTA.
    """

    cta: Cta


@dataclass(frozen=True)
class EndedCtaUsed(ByGroup):
    """Shared memory of a CTA that has ended is accessed.

    Attributes:
        cta: The CTA that has ended.
        barrier: Its mbarrier at which a `tcgen05.commit` arrives; None for an access by address.
    """

    cta: Cta
    barrier: MBarrier | None


@dataclass(frozen=True)
class FreedTensorMemoryUsed(ByGroup):
    """A warp loads or stores columns of tensor memory that its CTA has freed.

    Attributes:
        first: First column.
        columns: Number of columns.
    """

    first: int
    columns: int


@dataclass(frozen=True)
class LanesNotNamed(ByGroup):
    """Lanes execute a `.sync` instruction, and its member mask does not name them.

    Attributes:
        lanes: Lanes that are not named.
        members: The mask.
        name: Name of the instruction.
    """

    lanes: int
    members: int
    name: str


@dataclass(frozen=True)
class ExitedLaneRead(ByGroup):
    """A shuffle reads from a lane that its mask names and that is not there.

    Attributes:
        lane: Lane that reads.
        source: Lane from which it reads.
        members: The mask.
    """

    lane: int
    source: int
    members: int


@dataclass(frozen=True)
class BarrierIncomplete(ByGroup):
    """A barrier that names no count lets lanes go, and some warps of the CTA have exited without it.

    Attributes:
        barrier: The barrier.
    """

    barrier: CountBarrier


@dataclass(frozen=True)
class AlignedBarrierReached(ByGroup):
    """Lanes arrive at a barrier that all lanes of their warp must execute together.

    Attributes:
        lanes: Lanes that arrive.
        instruction: Barrier instruction; a line may hold several.
    """

    lanes: int
    instruction: Instruction


@dataclass(frozen=True)
class AlignedBarrierPassed(ByGroup):
    """The barrier releases lanes.

    Attributes:
        lanes: Lanes that are released.
        instruction: Barrier instruction.
    """

    lanes: int
    instruction: Instruction


@dataclass(frozen=True)
class MbarrierMade(ByGroup):
    """`mbarrier.init` is executed.

    Attributes:
        old: Object that already exists at the address.
    """

    old: MBarrier | None


@dataclass(frozen=True)
class MbarrierInvalidated(ByGroup):
    """`mbarrier.inval` is executed.

    Attributes:
        old: Object that existed at the address.
        offset: Offset in shared memory.
    """

    old: MBarrier | None
    offset: int


@dataclass(frozen=True)
class CancelRequested(ByGroup):
    """`clusterlaunchcontrol.try_cancel` is executed."""


@dataclass(frozen=True)
class CancelRead(ByGroup):
    """The response to a cancel request is queried.

    Attributes:
        query: Name of the query.
        canceled: Whether the request had succeeded.
    """

    query: str
    canceled: bool


@dataclass(frozen=True)
class PeerUsed(ByGroup):
    """A CTA that has not waited at its cluster's barrier uses another CTA's shared memory.

    Attributes:
        cta: Owner of the shared memory.
    """

    cta: Cta


@dataclass(frozen=True)
class WgmmaUnfenced:
    """A wgmma uses registers that the warp may have accessed since the last `wgmma.fence`.

    Attributes:
        warp: Warp that issues it.
        line: PTX line of the wgmma.
    """

    warp: Warp
    line: int


@dataclass(frozen=True)
class WgmmaChanged:
    """Registers of a wgmma in flight have changed between its issue and the wait for it.

    Attributes:
        warp: Warp that waits.
        line: PTX line of the wgmma.
        operand: Operand in the registers.
    """

    warp: Warp
    line: int
    operand: str
