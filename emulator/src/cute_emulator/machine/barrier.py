"""mbarrier objects, named barriers and the cluster barrier (PTX ISA 9.7.13.1, 9.7.13.3, 9.7.13.15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cute_emulator.errors import EmulatorError
from cute_emulator.machine.order import Snapshot, merge
from cute_emulator.machine.window import OFFSET

if TYPE_CHECKING:
    from cute_emulator.machine.clocks import Clocks
    from cute_emulator.machine.order import Agent, Vector
    from cute_emulator.machine.warp import Cta, Group


class Parked:
    """Groups that wait for the same event."""

    __slots__ = ("parked",)

    def __init__(self) -> None:
        self.parked: list[Group] = []

    def park(self, group: Group, why: str) -> None:
        """Parks a group until `wake`."""
        self.parked.append(group)
        group.park(why)

    def wake(self) -> None:
        """Makes every parked group ready."""
        if self.parked:
            parked, self.parked = self.parked, []
            for group in parked:
                group.wake()


class Waiters(Parked):
    """Groups parked on a barrier.

    Attributes:
        scope: Scope of an arrival without a scope.
        arrivals: Releases of the current phase by agent, with their scope.
        known: Releases of the completed phases by agent.
        joint: Whether all participants are in the barrier's scope, so that their releases are joined to one
            snapshot: true for `CountBarrier`.
        inits: Initialised mbarriers that arriving warps had fenced.
        clocks: Model of time, if there is one.
        since: Time at which the last phase was complete, by that model.
    """

    joint = False
    __slots__ = ("_reached", "arrivals", "clocks", "inits", "known", "scope", "since")

    def __init__(self, scope: str) -> None:
        super().__init__()
        self.scope = scope
        self.arrivals: dict[int, tuple[Snapshot, int]] = {}
        self.known: dict[int, tuple[Snapshot, int]] = {}
        self.inits: list[MBarrier] = []
        self.clocks: Clocks | None = None
        self.since = self._reached = 0

    def reach(self) -> None:
        """Records the time of an arrival, or of the end of an asynchronous operation."""
        if self.clocks is not None:
            self._reached = max(self._reached, self.clocks.now)

    def publish(self) -> None:
        """Completes a phase: waiting warps observe the releases of its arrivals."""
        self.since, self._reached = self._reached, 0
        if self.arrivals:
            if self.joint:
                self.known = {0: (Snapshot.joined(s for s, _ in self.arrivals.values()), 0)}
            else:
                self.known.update(self.arrivals)
            self.arrivals.clear()


class MBarrier(Waiters):
    """mbarrier object. A phase completes when no arrival is pending and the transaction count is zero.

    A `count` outside of 1..2**20 - 1 raises an `EmulatorError`.

    Attributes:
        address: Shared address, for messages.
        cta: CTA whose shared memory contains the object.
        count: Expected arrivals of a phase.
        pending: Pending arrivals of this phase.
        tx: Transaction count (bytes expected less bytes completed).
        phase: Parity of the current, incomplete phase.
        completed: Number of phases completed since `mbarrier.init`.
        fenced: Whether its initialisation was made visible to other CTAs and to the async proxy.
        party: Number among the parties that access its cluster's memories (`shared_races`), 0 for none.
        initialised: Agent that initialised it, the agent's clock then, and the PTX line.
        users: Agents that are known to be ordered after the initialisation.
        expected: PTX line of the last `expect_tx`, 0 for none.
        passing: Clocks that units pass on by their arrivals in the current phase.
        passed: Clocks that units passed on in completed phases.
        copying: `cp.async` copies that arrivals in the current phase signal, by agent.
        copied: `cp.async` copies signalled in completed phases, by agent.
    """

    __slots__ = (
        "_name",
        "address",
        "completed",
        "copied",
        "copying",
        "count",
        "cta",
        "expected",
        "fenced",
        "initialised",
        "party",
        "passed",
        "passing",
        "pending",
        "phase",
        "tx",
        "users",
    )

    def __init__(self, address: int, count: int, cta: Cta) -> None:
        super().__init__("cta")
        if not 1 <= count < 1 << 20:
            raise EmulatorError(f"mbarrier.init at {address:#x} with count {count}; 1 to 2**20 - 1 are valid")
        self.address, self.count, self.pending, self.cta = address, count, count, cta
        self._name = ""
        self.tx, self.phase, self.completed, self.fenced = 0, 0, 0, False
        self.party = 0
        self.initialised: tuple[Agent, int, int] | None = None
        self.users: set[int] = set()
        self.expected = 0
        self.passing: Vector = {}
        self.passed: Vector = {}
        self.copying: Vector = {}
        self.copied: Vector = {}

    def expect(self, nbytes: int) -> None:
        """Executes `expect-tx`.

        Raises:
            EmulatorError: The transaction count is 2**20 or more.
        """
        self.tx += nbytes
        if self.tx >= 1 << 20:
            raise EmulatorError(f"{self.name()}: {self.tx} bytes are expected; at most 2**20 - 1 are valid")
        self._advance()

    def complete(self, nbytes: int) -> None:
        """Executes `complete-tx`."""
        self.tx -= nbytes
        self._advance()

    def arrive(self, count: int = 1, passing: Vector | None = None, copied: Vector | None = None) -> None:
        """Executes `arrive-on`.

        Args:
            count: Number of arrivals.
            passing: Clocks that an arriving asynchronous unit passes on.
            copied: `cp.async` copies that the arrival signals.

        Raises:
            EmulatorError: `count` is less than 1, or more arrivals than are pending (over-arrival).
        """
        if count < 1:
            raise EmulatorError(f"{self.name()}: {count} arrivals; 1 to 2**20 - 1 are valid")
        if count > self.pending:
            raise EmulatorError(
                f"{self.name()}: {count} arrival(s) where {self.pending} of {self.count} are "
                f"pending in phase {self.completed} (over-arrival)"
            )
        if passing:
            merge(self.passing, passing)
        if copied:
            merge(self.copying, copied)
        self.pending -= count
        self._advance()

    def _advance(self) -> None:
        self.reach()
        if self.pending == 0 and self.tx == 0:
            self.publish()
            if self.passing:
                merge(self.passed, self.passing)
                self.passing = {}
            if self.copying:
                merge(self.copied, self.copying)
                self.copying = {}
            self.phase ^= 1
            self.completed += 1
            self.pending = self.count
            self.wake()

    def name(self) -> str:
        """Returns the address, with the name of the object in the source."""
        if not self._name:  # used at every wait
            self._name = f"mbarrier {self.address:#x}{self.cta.called(self.address & OFFSET)}"
        return self._name

    def __str__(self) -> str:
        return (
            f"{self.name()} (phase {self.completed}, parity {self.phase}: "
            f"{self.pending} of {self.count} arrivals pending, {self.tx} bytes outstanding)"
        )


class CountBarrier(Waiters):
    """Barrier that releases when a number of threads has arrived: a named barrier or the cluster barrier.

    Attributes:
        name: Name in messages.
        everyone: Number of participating threads if the instruction has no count.
        arrived: Threads that have arrived in this generation.
        generation: Number of releases.
        votes: Sum of the predicates of `bar.red`, by parity of the generation.
        present: Threads that had arrived at the last release.
        reduces: Whether `bar.red` arrived last.
    """

    joint = True

    __slots__ = ("arrived", "count", "everyone", "generation", "name", "present", "reduces", "votes")

    def __init__(self, name: str, everyone: Callable[[], int], scope: str = "cta") -> None:
        super().__init__(scope)
        self.name, self.everyone = name, everyone
        self.arrived, self.count, self.generation = 0, 0, 0
        self.present, self.reduces = 0, False
        self.votes = [0, 0]

    def arrive(self, threads: int, count: int = 0, votes: int = 0, reduces: bool = False) -> int:
        """Counts arrivals, with the instruction's thread count or 0; returns their generation.

        Raises:
            EmulatorError: In one phase thread counts differ, `bar.red` meets another barrier instruction, or
                more threads arrive than the count.
        """
        if self.arrived and reduces != self.reduces:
            raise EmulatorError(
                f"{self.name}: a reduction and another barrier instruction arrive in one phase"
            )
        if self.arrived and count != self.count:
            raise EmulatorError(
                f"{self.name}: a participant expects {count or 'all'} threads, "
                f"an earlier one {self.count or 'all'}"
            )
        generation = self.generation
        self.count, self.reduces = count, reduces
        self.arrived += threads
        self.votes[generation & 1] += votes
        self.reach()
        if count and self.arrived > count:
            raise EmulatorError(f"{self.name}: {self.arrived} threads arrived, but {count} participate")
        self.check()
        return generation

    def check(self) -> None:
        """Releases the barrier if all have arrived; also called when threads exit.

        An exited thread does not count as arrived. Without a thread count the barrier expects only the
        threads that `everyone` still counts.
        """
        if self.arrived and self.arrived >= (self.count or self.everyone()):
            self.publish()
            self.present, self.arrived = self.arrived, 0
            self.generation += 1
            self.votes[self.generation & 1] = 0
            self.wake()

    def __str__(self) -> str:
        return f"{self.name} ({self.arrived} of {self.count or self.everyone()} threads arrived)"
