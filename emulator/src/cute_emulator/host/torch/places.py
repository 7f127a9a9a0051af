"""Places in streams, as events mark them."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_emulator.host.timeline import Vector
from cute_emulator.machine.streams import StreamEvent


@dataclass(frozen=True)
class Place:
    """What was in a stream when an event was recorded.

    Attributes:
        mark: The machine's event.
        before: The order of the host's works, as far as the host is a party.
    """

    mark: StreamEvent
    before: Vector = field(default_factory=dict)


NOWHERE = Place(StreamEvent(done=True))
"""Of an event that was not recorded: nobody waits for it."""
