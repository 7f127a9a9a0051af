"""What kernels do that rules look at, beside accesses to memory and their order: told to `Checks.tell`."""

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
    """Something that lanes of a warp do.

    Attributes:
        group: The lanes.
        line: Of the PTX.
    """

    group: Group
    line: int


@dataclass(frozen=True)
class TensorMemoryUsed(ByGroup):
    """An asynchronous operation is told to use cells of tensor memory.

    Attributes:
        ctas: In each of these.
        cells: Which.
        what: The operation.
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
    """Lanes come to a barrier that all lanes of their warp must execute together.

    Attributes:
        lanes: Which.
        instruction: The barrier; a line may hold several.
    """

    lanes: int
    instruction: Instruction


@dataclass(frozen=True)
class AlignedBarrierPassed(ByGroup):
    """The barrier lets lanes go.

    Attributes:
        lanes: Which.
        instruction: The barrier.
    """

    lanes: int
    instruction: Instruction


@dataclass(frozen=True)
class MbarrierMade(ByGroup):
    """`mbarrier.init`.

    Attributes:
        old: The object that is there already.
    """

    old: MBarrier | None


@dataclass(frozen=True)
class MbarrierInvalidated(ByGroup):
    """`mbarrier.inval`.

    Attributes:
        old: The object that was there.
        offset: Where.
    """

    old: MBarrier | None
    offset: int


@dataclass(frozen=True)
class CancelRequested(ByGroup):
    """`clusterlaunchcontrol.try_cancel`."""


@dataclass(frozen=True)
class CancelRead(ByGroup):
    """A query of a request's answer.

    Attributes:
        query: Which.
        canceled: Whether the request had succeeded.
    """

    query: str
    canceled: bool


@dataclass(frozen=True)
class PeerUsed(ByGroup):
    """A CTA that has not waited at its cluster's barrier uses another one's shared memory.

    Attributes:
        cta: Whose.
    """

    cta: Cta


@dataclass(frozen=True)
class WgmmaUnfenced:
    """A wgmma uses registers that the warp may have accessed since the last `wgmma.fence`.

    Attributes:
        warp: The warp.
        line: Of the wgmma.
    """

    warp: Warp
    line: int


@dataclass(frozen=True)
class WgmmaChanged:
    """Registers of a wgmma in flight hold something else when it is waited for than when it was issued.

    Attributes:
        warp: The warp.
        line: Of the wgmma.
        operand: Which registers.
    """

    warp: Warp
    line: int
    operand: str
