"""Scheduler: which warp runs next, when async work takes effect, and when a state is a deadlock."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from cute_emulator.errors import Deadlock, EmulatorError, KernelTrap
from cute_emulator.instructions.emit import BLOCK
from cute_emulator.machine.clocks import CYCLES_PER_NS, Items
from cute_emulator.machine.inject import Faults
from cute_emulator.machine.visibility import HeldStores

if TYPE_CHECKING:
    from cute_emulator.machine.asyncq import AsyncEngine
    from cute_emulator.machine.clocks import Clocks
    from cute_emulator.machine.warp import Group, Warp
    from cute_emulator.translate.program import Program

ORDERS = ("round_robin", "random")
QUANTUM = 64  # items a warp runs before the next one
PATIENCE = 10_000  # polls without progress of a loop that counts polls, before a deadlock is reported
JUMPS = 64  # jumps of the clock without progress, before a deadlock is reported
EXPIRIES = 1000  # consecutive waits that expire and are retried without progress, before a deadlock
LONGEST_JUMP = 1000 << 32  # ns; the clock keeps 64 bits after many such jumps


@dataclass(frozen=True)
class Schedule:
    """Order in which warps run.

    A turn ends when no group of the warp can continue, or after 64 items (`QUANTUM`): pieces of translated
    code of one or more instructions (`translate.program`). In `random` order its length is drawn from 1 to
    64.

    Attributes:
        order: `round_robin`, or `random` (next warp and the length of its turn drawn from the seed).
        lanes: Whether divergent lane groups run in random order. Otherwise the group with the deepest call
            stack runs first, among equals the one with the lowest instruction.
        starved: Predicate `starved(rank, ctaid, warp)`: such a warp runs only when no other warp of any rank
            can and no async event or held store is pending.
        grids: Order in which waiting kernels of several streams make clusters resident: `submission` (first
            submitted first), or `random`.
    """

    order: str = "round_robin"
    lanes: bool = False
    starved: Callable[[int, tuple[int, int, int], int], bool] | None = None
    grids: str = "submission"

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r} must be one of {', '.join(ORDERS)}")


def _state_of(group: Group) -> tuple[Any, ...]:
    """Returns a group's position and its live registers."""
    held = (group.R[slot] for slot in group.warp.grid.program.live_in(group.pc))
    return group.place, [v.tobytes() if v.__class__ is ndarray else v for v in held]


class Scheduler:
    """Runs ready warps until all have exited.

    If no warp is ready, it tries in this order:

    1. the next async event, or else all held stores
    2. a starved warp
    3. injected faults: late stores, stalled ranks
    4. time: the clock jumps to the end of the first `nanosleep`; without one, groups that read the clock in a
       polling loop are woken after ever longer jumps
    5. all polling groups once more, if there was progress since the last time: their `try_wait` returns false

    Then it raises `Deadlock`. It makes at most 64 jumps (`JUMPS`) without progress. A loop that retries an
    expired wait may do so 1000 times (`EXPIRIES`), and loops that count polls have 10,000 polls (`PATIENCE`).

    Attributes:
        progress: Grows with every event that can let a parked warp go on.
        executed: Warp instructions run.
        clock: Virtual nanoseconds, read by `%globaltimer` and `%clock64`: one per warp instruction, and
            jumps.
        limit: Largest number of warp instructions over all runs.
        clocks: Model of time, if a trace is recorded.
        ran: Items that ran, by program.
    """

    def __init__(self, engine: AsyncEngine, schedule: Schedule, seed: int) -> None:
        self.engine, self.schedule = engine, schedule
        self.rng = random.Random(seed)
        self.queue: deque[Warp] = deque()
        self.hungry: deque[Warp] = deque()
        self.faults = Faults(self)
        self.held = HeldStores("immediate", seed)
        self.progress = 0
        self.executed = 0
        self.clock = 1_000_000
        self.limit = 1 << 62
        self.live: dict[int, Warp] = {}
        self.pollers: dict[int, Group] = {}
        self.sleepers: list[tuple[int, int, Group]] = []
        self._begin_afresh()
        self.tick: Callable[[], None] | None = None
        self.clocks: Clocks | None = None
        self.ran: dict[Program, Items] = {}

    def _begin_afresh(self) -> None:
        self._last_soft_wake = -1
        self._peeking = False
        self._jumps = 0
        self._went_on = False
        self._expiries = EXPIRIES
        self._patience = PATIENCE

    def ready(self, warp: Warp) -> None:
        """Queues a warp that has something to run."""
        self.progress += 1
        self._line_up(warp)

    def _line_up(self, warp: Warp) -> None:
        if not warp.queued:
            warp.queued = True
            starved = self.schedule.starved
            late = starved is not None and starved(warp.grid.launch.rank, warp.cta.ctaid, warp.index)
            (self.hungry if late else self.queue).append(warp)

    def read_clock(self, warp: Warp) -> int:
        """Returns virtual time; a group that reads it in a polling loop is woken when time passes."""
        for group in warp.groups:
            group.clock = True
        return self.clock

    def poll(self, group: Group, why: str, counting: bool = False) -> None:
        """Parks a polling group until the polled value changes, or until time must pass.

        A loop that counts its polls may end by itself: `counting` allows it more polls before a deadlock is
        reported.
        """
        self.pollers[id(group)] = group
        if counting and self._patience > 0:
            self._patience -= 1
            self.progress += 1
        if group.clock and not counting:
            # A wait makes no progress if its loop leaves all live registers unchanged.
            state = _state_of(group)
            self._went_on |= group.last_poll is not None and state != group.last_poll
            group.last_poll = state
        group.park(why)

    def sleep(self, group: Group, until: int) -> None:
        """Parks a group until the virtual clock reaches `until`."""
        if self.clocks is not None:
            slept = int(CYCLES_PER_NS * (until - self.clock))
            self.clocks.join(self.clocks.now + slept, "nanosleep")
        self.sleepers.append((until, len(self.sleepers), group))
        group.park("nanosleep")

    def items(self, program: Program) -> Items:
        """Returns a program's items; they record which of them ran."""
        items = self.ran.get(program)
        if items is None:
            items = self.ran[program] = Items(program, self.clocks)
        return items

    # -- running ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until no warp is left.

        Raises:
            Deadlock: Nothing can go on.
            EmulatorError: The run exceeds `limit`, or a kernel failed.
        """
        queue, random_order = self.queue, self.schedule.order == "random"
        turns = 0
        while True:
            if not queue:
                if not self._idle():
                    return
                continue
            if random_order:
                queue.rotate(-self.rng.randrange(len(queue)))
            warp = queue.popleft()
            warp.queued = False
            if self.faults.active:
                self.faults.step(idle=False)
                if self.faults.holds(warp):
                    continue
            before = self.executed
            if self.clocks is not None:
                self.clocks.turn(warp)
            self._turn(warp, self.rng.randint(1, QUANTUM) if random_order else QUANTUM)
            self.clock += self.executed - before
            if self.clocks is not None:
                self.clocks.turn_ended(warp, self.executed - before)
            self.engine.step()
            self.held.step()
            if self.executed > self.limit:
                what = f"no end after {self.executed:,} warp instructions, more than the limit"
                raise EmulatorError(self.describe(what))
            turns += 1
            if not turns & 255 and self.tick is not None:
                self.tick()

    def _turn(self, warp: Warp, quantum: int) -> None:
        program = warp.grid.program
        report = warp.grid.checks.report
        report.ptx = program.module.text
        report.launched = "" if warp.grid.launch.work is None else warp.grid.launch.work.issued
        while quantum > 0:
            group = self._pick(warp)
            if group is None:
                return
            if len(group.R) != len(program.initial):
                group.grow()
            alone = len(warp.groups) == 1
            code, cost = self.items(program), program.cost
            others = () if alone else {g.pc for g in warp.groups if g is not group}
            bound = (
                None
                if alone
                else min((g.pc for g in warp.groups if g is not group and not g.why), default=None)
            )
            pc, count = group.pc, 0
            try:
                while quantum > 0:
                    quantum -= 1
                    group.pc = pc
                    following = code[pc](group)
                    if following == BLOCK:
                        break
                    count += cost[pc]
                    if following < 0:
                        break
                    pc = following
                    if not alone and (pc in others or (bound is not None and pc > bound)):
                        group.pc = pc
                        break
                else:
                    group.pc = pc
            except EmulatorError as error:
                error.line = error.line or next((ins.line for ins in program.instructions_of(pc)), 0)
                error.show(program.module.text)
                if self._jumps and isinstance(error, KernelTrap):
                    # A bounded wait has expired: without the bound this would be a deadlock.
                    error.add(self.describe("only time could pass; where the warps stood:"))
                raise
            except Exception as error:
                located = program.locate(error, group, pc)
                located.show(program.module.text)
                raise located from error
            self.executed += count
        if any(not g.why for g in warp.groups):
            self._line_up(warp)

    def _pick(self, warp: Warp) -> Group | None:
        groups = warp.groups
        if len(groups) == 1:
            return groups[0] if not groups[0].why else None
        if len({group.pc for group in groups}) < len(groups):
            self._merge(warp)
        runnable = [g for g in groups if not g.why]
        if not runnable:
            return None
        if self.schedule.lanes and len(runnable) > 1:
            return self.rng.choice(runnable)
        return min(runnable, key=lambda g: (-len(g.stack), g.pc))

    @staticmethod
    def _merge(warp: Warp) -> None:
        groups = warp.groups
        by_place: dict[tuple[int, tuple[int, ...]], Group] = {}
        for group in list(groups):
            if group.token is not None:
                continue
            first = by_place.setdefault(group.place, group)
            if first is not group:
                first.absorb(group, warp.grid.program.live_in(group.pc))
                groups.remove(group)
                first.wake()

    # -- when nothing is ready -------------------------------------------------------------------

    def _idle(self) -> bool:
        """Finds something to do; False when all warps have exited."""
        if self.engine.idle_step() or self.held.idle_step():
            return True
        if self.hungry:
            self.queue.append(self.hungry.popleft())
            return True
        if self.faults.active:
            if self.faults.step(idle=True):
                return True
            if all(self.faults.is_dead(w.grid.launch.rank) for w in self.live.values()):
                return False
        if not self.live:
            return False
        if self._let_time_pass():
            return True
        if self.progress != self._last_soft_wake and self.pollers:
            # A poll may be a single test, not a loop: all polling groups run once more before a deadlock.
            self._release(list(self.pollers.values()))
            self._last_soft_wake = self.progress
            return True
        what = "deadlock: no warp can go on and no async operation is pending"
        raise Deadlock(self.describe("\n".join([what, *self._half_reached()])))

    def _let_time_pass(self) -> bool:
        if self.sleepers:
            self.sleepers.sort(key=lambda s: s[:2])
            until, _, group = self.sleepers.pop(0)
            self.clock = max(self.clock, until)
            group.wake()
            return True
        watching = [g for g in self.pollers.values() if g.clock]
        if self._went_on and self._expiries:
            self._expiries -= 1
            self._jumps = 0
        self._went_on = False
        if watching and self._jumps < JUMPS:
            self._peeking = not self._peeking
            if self._peeking:
                # A later time can end a wait. Before that, all polling groups run once more: a group may be
                # parked at a single test. Or its loop polls two addresses, and one changed between its last
                # poll there and its parking at the other.
                self._release(list(self.pollers.values()))
                return True
            # Only a later time can wake these groups. Each jump is longer than the one before, so that a
            # bounded wait ends after a few polls whatever its bound.
            self._jumps += 1
            self.clock += min(1000 << self._jumps, LONGEST_JUMP)
            self._release(watching)
            return True
        return False

    def _release(self, groups: list[Group]) -> None:
        for group in groups:
            self.pollers.pop(id(group), None)
            group.polls.clear()
            group.token = "timeout" if group.token == "poll" else None
            group.wake()

    def moved(self) -> None:
        """Records progress: the clock's jumps and the number of expiries are reset."""
        self.progress += 1
        self._jumps = 0
        self._expiries = EXPIRIES

    def describe(self, what: str) -> str:
        """Returns a headline followed by the position of every warp."""
        lines = [what]
        for warp in self.live.values():
            for group in warp.groups:
                where = warp.grid.program.text_at(group.pc)
                lines.append(f"  {group.where()}: {where}; waits for {group.why or 'nothing (runnable)'}")
        shown = lines[:200]
        if len(lines) > len(shown):
            shown.append(f"  ... and {len(lines) - len(shown)} more")
        return "\n".join(shown)

    def _half_reached(self) -> list[str]:
        """Returns barriers at which only some warps have arrived, with the positions of the others."""
        ctas = dict.fromkeys(warp.cta for warp in self.live.values())
        barriers = [(b, [cta]) for cta in ctas for b in cta.named.values()]
        barriers += [(c.barrier, c.ctas) for c in dict.fromkeys(cta.cluster for cta in ctas)]
        lines = []
        for barrier, members in barriers:
            if not barrier.parked:
                continue
            here = dict.fromkeys(group.warp for group in barrier.parked)
            absent = []
            for warp in (w for cta in members for w in cta.warps if w not in here):
                whys = dict.fromkeys(group.why or "nothing (runnable)" for group in warp.groups)
                absent.append(f"{warp} {'waits for ' + ' and '.join(whys) if whys else 'has exited'}")
            more = [f"and {len(absent) - 8} more"] if len(absent) > 8 else []
            lines.append(
                f"  not all come to {barrier}: there are {', '.join(map(str, here))}; "
                + "; ".join([*absent[:8], *more])
            )
        return lines

    def reset(self) -> None:
        """Drops all warps, and the times that warps of this run have waited."""
        for waiting in (self.queue, self.hungry, self.live, self.pollers, self.sleepers):
            waiting.clear()  # type: ignore[attr-defined]
        self.faults.let_go()
        self._begin_afresh()
