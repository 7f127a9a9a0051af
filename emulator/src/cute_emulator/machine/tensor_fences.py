"""`tcgen05.fence` between a thread's accesses to tensor memory and another thread's (PTX ISA 9.7.16.6.3).

`tcgen05` operations are asynchronous. A barrier, or a release and an acquire, orders them only with
`tcgen05.fence::before_thread_sync` after the first access and `tcgen05.fence::after_thread_sync` before the
second. The completion that a `tcgen05.commit` signals at an mbarrier needs only the second fence.

NVIDIA's CuTe DSL kernels have no such fence, or only one before the barrier in front of `tcgen05.dealloc`. So
by default these orders are judged only if a kernel follows the rule: accesses that a before-fence passed need
an after-fence, and a kernel with after-fences needs them and before-fences throughout. The check
`tmem-fence`, if enabled, judges all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cute_emulator.machine.cells import CLOCK, CLOCK_MASK, LINE_MASK, PARTY
from cute_emulator.machine.conflicts import TensorUnfenced
from cute_emulator.machine.order import united

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cute_emulator.machine.conflicts import EventSink
    from cute_emulator.machine.order import Agent


class Kept(NamedTuple):
    """Fences that a kernel contains anywhere."""

    before: bool
    after: bool


@lru_cache(maxsize=256)
def kept_in(ptx: str) -> Kept:
    """Returns the fences of a module."""
    return Kept("tcgen05.fence::before_thread_sync" in ptx, "tcgen05.fence::after_thread_sync" in ptx)


def before_sync(agent: Agent) -> None:
    """Executes `tcgen05.fence::before_thread_sync`: passes on the warp's accesses to tensor memory so far."""
    agent.tensor_passed = united(agent.tensor_passed, {agent.id: agent.vector[agent.id]})
    agent.advance()


def after_sync(agent: Agent) -> None:
    """Executes `tcgen05.fence::after_thread_sync`.

    Later accesses are ordered after passed ones and after completed units.
    """
    agent.tensor_seen = agent.tensor_passed
    agent.tensor_units = dict(agent.nearby)


def check(
    emit: EventSink, agent: Agent, entries: Iterable[int], line: int, strict: bool, frees: bool
) -> None:
    """Judges accesses, as entries of tensor memory cells, that happened before another by `agent`."""
    kept = kept_in(agent.warp.grid.program.module.text)
    if not (kept.before or kept.after or strict):
        return
    parties = agent.warp.cta.cluster.parties
    for entry in entries:
        number, clock = entry >> PARTY, entry >> CLOCK & CLOCK_MASK
        owner = parties[number].agent
        if number == agent.party or (owner is None and number in _units_of(agent)):
            continue
        passed = owner is None or agent.tensor_passed.get(owner, 0) >= clock
        if owner is None:
            seen = agent.tensor_units.get(number, 0) >= clock
            judged = strict or kept.after
        else:
            seen = agent.tensor_seen.get(owner, 0) >= clock
            judged = strict or kept.after or (passed and not frees) or (frees and not passed)
        if not judged or (passed and (seen or frees)):
            continue
        emit(TensorUnfenced(agent, line, parties[number], entry >> 1 & LINE_MASK, passed))


def _units_of(agent: Agent) -> set[int]:
    return {unit.number for unit in agent.units.values()}
