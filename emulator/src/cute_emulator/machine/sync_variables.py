"""Releases visible in memory (PTX ISA 8.7, "Release and Acquire Patterns"; 8.10.1, release sequences)."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.order import STRONG, Agent, Released, Snapshot, includes, merge

MOST = 64
"""Heads of a location that are kept apart."""

MOST_LOADS = 256
"""Releases that an agent has read since its last fence and that are kept apart."""


class SyncVariables:
    """Releases visible in memory: the heads of each location's release sequences."""

    def __init__(self) -> None:
        self._heads: dict[Any, list[Released]] = {}
        self._older: dict[Any, list[Released]] = {}  # before the last write
        self._last: dict[Any, int] = {}  # epoch of the last write

    def write(self, agent: Agent, place: Any, scope: int, releases: bool, rmw: bool, lanes: int = -1) -> None:
        """Records a strong write of some lanes, before it is executed.

        A read-modify-write continues the release sequences that it read.
        """
        before = self._heads.get(place, [])
        self._older[place], self._last[place] = before, agent.strong_epoch
        heads = list(before) if rmw else []
        if releases:
            heads.append(Released(agent.release(lanes), scope, agent.strong))
        elif agent.fenced is not None:
            snapshot, fenced = agent.fenced
            heads.append(Released(agent.released_by(snapshot, lanes), min(scope, fenced), agent.strong))
        if heads:
            self._heads[place] = heads if len(heads) <= MOST else _condensed(heads)
        else:
            self._heads.pop(place, None)

    def read(self, agent: Agent, place: Any, scope: int, acquires: bool, older: bool = False) -> None:
        """Records a strong read; `older`: of the value that the last write replaced."""
        if not older and place in self._last:
            agent.observed[place] = self._last[place]
        for released in (self._older if older else self._heads).get(place, ()):
            both = min(scope, released.scope)
            if not acquires:
                agent.loads.append(released if both == released.scope else released._replace(scope=both))
            elif includes(both, released.snapshot.agent.warp, agent.warp):
                agent.observe(released)
        if len(agent.loads) > MOST_LOADS:
            agent.loads[:] = _condensed(agent.loads)

    def clear(self) -> None:
        """Drops all releases: all accesses so far are ordered before what follows."""
        self._heads.clear()
        self._older.clear()
        self._last.clear()


def _condensed(heads: list[Released]) -> list[Released]:
    """Returns heads in which those of one scope, released in one instance of it, are joined to one.

    Whoever reads with that scope or a wider one observes all of them, or none.
    """
    groups: dict[tuple[int, Any], list[Released]] = {}
    for head in heads:
        warp = head.snapshot.agent.warp
        instance = (warp.cta, warp.cta.cluster, warp.grid.launch.rank, None)[head.scope]
        groups.setdefault((head.scope, instance), []).append(head)
    out = []
    for same in groups.values():
        joint = Snapshot.joined(head.snapshot for head in same)
        merge(joint.vector, {head.snapshot.agent.id + STRONG: head.store for head in same})
        out.append(Released(joint, same[0].scope, same[0].store))
    return out
