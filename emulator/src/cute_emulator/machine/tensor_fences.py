"""`tcgen05.fence` between a thread's accesses to tensor memory and another thread's (PTX ISA 9.7.16.6.3).

`tcgen05` operations are asynchronous: a barrier, or a release and an acquire, orders them only with
`tcgen05.fence::before_thread_sync` after the one and `tcgen05.fence::after_thread_sync` before the other, and
what a `tcgen05.commit` told of at an mbarrier only with the second.

NVIDIA's CuTe DSL kernels have no such fence, or one before the barrier in front of `tcgen05.dealloc` alone.
So these are judged by default only where a kernel keeps the rule: what a before-fence passed needs an
after-fence, and a kernel that has after-fences needs them and before-fences throughout. The check
`tmem-fence`, where it is named, judges all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from cute_emulator.machine.cells import CLOCK, CLOCK_MASK, LINE_MASK, PARTY
from cute_emulator.machine.conflicts import TensorUnfenced
from cute_emulator.machine.order import united

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cute_emulator.machine.conflicts import Tell
    from cute_emulator.machine.order import Agent


class Kept(NamedTuple):
    """Which fences a kernel has anywhere."""

    before: bool
    after: bool


@lru_cache(maxsize=256)
def kept_in(ptx: str) -> Kept:
    """Those of a module."""
    return Kept("tcgen05.fence::before_thread_sync" in ptx, "tcgen05.fence::after_thread_sync" in ptx)


def before_sync(agent: Agent) -> None:
    """`tcgen05.fence::before_thread_sync`: passes what the warp did in tensor memory so far."""
    agent.tensor_passed = united(agent.tensor_passed, {agent.id: agent.vector[agent.id]})
    agent.advance()


def after_sync(agent: Agent) -> None:
    """`tcgen05.fence::after_thread_sync`: what follows comes after what was passed, and what units told."""
    agent.tensor_seen = agent.tensor_passed
    agent.tensor_units = dict(agent.nearby)


def check(tell: Tell, agent: Agent, entries: Iterable[int], line: int, strict: bool, frees: bool) -> None:
    """Judges accesses that happened before another one by `agent`, entries of cells of tensor memory."""
    kept = kept_in(agent.warp.grid.program.module.text)
    if not (kept.before or kept.after or strict):
        return
    parties = agent.warp.cta.cluster.parties
    for entry in entries:
        number, clock = entry >> PARTY, entry >> CLOCK & CLOCK_MASK
        owner = parties[number].agent
        if number == agent.party or (owner is None and number in _own_units(agent)):
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
        tell(TensorUnfenced(agent, line, parties[number], entry >> 1 & LINE_MASK, passed))


def _own_units(agent: Agent) -> set[int]:
    return {unit.number for unit in agent.units.values()}
