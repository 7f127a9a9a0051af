"""Pairs of accesses without the required order, as the machine detects them: passed to `Checks.emit`.

The machine records the order of accesses and compares it (`races`, `shared_races`, `lane_order`,
`tensor_fences`); a rule (`rules`) states what is missing, in a separate file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_emulator.machine.barrier import MBarrier
    from cute_emulator.machine.lane_order import LaneStore
    from cute_emulator.machine.order import Agent
    from cute_emulator.machine.shared_races import Party
    from cute_emulator.machine.warp import Cta, Group, Warp

EventSink = Callable[[object], None]
"""Function that passes an event to the rules of its class."""


@dataclass(frozen=True)
class GlobalPair:
    """Two accesses to global memory; the later one is the one that is judged.

    Attributes:
        agent: Agent of the later access.
        line: PTX line of the later access.
        owner: Agent of the earlier access.
        first: PTX line of the earlier access, in its kernel.
        verb: `read`, `write` or `async read`: the later access.
        was: `read` or `written`: the earlier access.
        spot: Address, allocation and element, for messages.
    """

    agent: Agent
    line: int
    owner: Agent
    first: int
    verb: str
    was: str
    spot: str


@dataclass(frozen=True)
class GlobalUnordered(GlobalPair):
    """Nothing orders two conflicting accesses.

    Attributes:
        scopes: Scopes of both where both are strong, the later one first; else None.
        is_bulk: Whether the earlier access is the write of a bulk store.
        lanes: Lanes of the later access, for messages.
    """

    scopes: tuple[str, str] | None
    is_bulk: bool
    lanes: str


@dataclass(frozen=True)
class GlobalIncoherent(GlobalPair):
    """`ld.global.nc` reads what its kernel wrote; `spot` is the allocation."""


@dataclass(frozen=True)
class GlobalAliased(GlobalPair):
    """Two ordered accesses by a multicast address and by a rank's own address, with no alias fence between.

    Attributes:
        is_multicast: Whether the later access is the one by the multicast address.
    """

    is_multicast: bool


@dataclass(frozen=True)
class GlobalUnfenced(GlobalPair):
    """An async unit reads or overwrites an ordinary write that has passed no proxy fence."""


@dataclass(frozen=True)
class SharedUnfenced:
    """An async unit reads or overwrites an ordinary write to shared memory that has passed no proxy fence.

    Attributes:
        warp: Issues the operation of the unit.
        line: PTX line of the operation.
        what: The operation.
        is_read: Whether the operation reads the place.
        cta: Owner of the shared memory.
        at: Offset in it.
        writer: Warp that wrote.
        is_copy: Whether it wrote by `cp.async`.
    """

    warp: Warp
    line: int
    what: str
    is_read: bool
    cta: Cta
    at: int
    writer: Warp
    is_copy: bool


@dataclass(frozen=True)
class SharedUnordered:
    """Nothing orders two conflicting accesses to shared or tensor memory.

    Attributes:
        agent: Agent of the later access.
        line: PTX line of the later access.
        party: Party of the earlier access.
        first: PTX line of the earlier access.
        verb: `read` or `write`: the later access.
        was: `read` or `written`: the earlier access.
        cta: Owner of the memory.
        at: Offset in shared memory; None in tensor memory.
        lanes: Lanes of the later access, for messages.
    """

    agent: Agent
    line: int
    party: Party
    first: int
    verb: str
    was: str
    cta: Cta
    at: int | None
    lanes: str


@dataclass(frozen=True)
class LanesUnordered:
    """A lane, or an operation that it issues, reads what another lane stored without order between them.

    Attributes:
        warp: Reads.
        who: Reader within the warp: a lane or an operation.
        line: PTX line of the read.
        store: The store.
        lane: Lane that stored.
        at: Where: offset in shared memory, or address.
    """

    warp: Warp
    who: str
    line: int
    store: LaneStore
    lane: int
    at: int


@dataclass(frozen=True)
class TensorUnfenced:
    """Two threads use tensor memory in an order that no `tcgen05.fence` makes known to its pipe.

    Attributes:
        agent: Agent of the later access.
        line: PTX line of the later access.
        party: Party of the earlier access.
        first: PTX line of the earlier access.
        has_before: Whether `before_thread_sync` was executed after the earlier one, so that
            `after_thread_sync` is missing.
    """

    agent: Agent
    line: int
    party: Party
    first: int
    has_before: bool


@dataclass(frozen=True)
class TensorUnwaited:
    """A product or a dealloc touches cells of which a `tcgen05.ld` or `.st` has not been waited for.

    Attributes:
        cta: Owner of the tensor memory.
        line: PTX line of the product or dealloc.
        what: The product or dealloc.
        columns: First and last column that it uses.
        kind: `ld` or `st`.
        warp: Number of the warp whose access has not been waited for.
    """

    cta: Cta
    line: int
    what: str
    columns: tuple[int, int]
    kind: str
    warp: int


@dataclass(frozen=True)
class MbarrierUnfenced:
    """Another CTA or the async proxy uses an mbarrier whose init no fence followed.

    Attributes:
        barrier: The mbarrier.
        what: Use, with its warp.
        line: PTX line of the use.
    """

    barrier: MBarrier
    what: str
    line: int


@dataclass(frozen=True)
class MbarrierUnordered:
    """A warp uses an mbarrier whose init is not ordered before.

    Attributes:
        group: Lanes that use it.
        line: PTX line of the use.
        barrier: The mbarrier.
        owner: Agent of the warp that initialised it.
        first: PTX line of the init.
    """

    group: Group
    line: int
    barrier: MBarrier
    owner: Agent
    first: int


@dataclass(frozen=True)
class Works:
    """Two works of streams, or of the host, that touch the same bytes with no order between.

    Attributes:
        old: Touch that was recorded first (`host.timeline.Touch`).
        new: Touch that was recorded second.
        spot: Place that both touch, for messages.
    """

    old: Any
    new: Any
    spot: str

    @property
    def lines(self) -> list[tuple[str, int]]:
        """Lines of the script that issued the works, the second one first, as far as they are known."""
        return [touch.work.line for touch in (self.new, self.old) if touch.work.line is not None]


class StreamWorks(Works):
    """Both works are those of streams."""


class HostWorks(Works):
    """One of the works is the host's."""


class ReusedWorks(Works):
    """The memory was freed and allocated again between the two works."""


@dataclass(frozen=True)
class FreedTouched:
    """A replayed graph touches memory that was freed after its capture.

    Attributes:
        touch: Access of the graph (`host.timeline.Touch`).
    """

    touch: Any

    @property
    def lines(self) -> list[tuple[str, int]]:
        """Returns the line of the script that issued the replay, if it is known."""
        return [self.touch.work.line] if self.touch.work.line is not None else []
