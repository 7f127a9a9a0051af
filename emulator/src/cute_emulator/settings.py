"""Settings of a check: when asynchronous operations complete, and in which order warps run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cute_emulator.execution.scheduler import Schedule
from cute_emulator.machine.asyncq import MODES
from cute_emulator.rules import CHECKS, STRICT_CHECKS

SCHEDULES = "round_robin, shuffled, starve:RANK, starve:warp:NUMBER, starve:cta:NUMBER"


@dataclass(frozen=True)
class Setting:
    """One setting of a check.

    Attributes:
        mode: `immediate`, `random` or `lazy`.
        seed: Seed of every random choice.
        shuffled: Random order of warps, of divergent lane groups and of grids, instead of round robin.
        starved_rank: Rank that runs only when no other can.
        starved_warp: Warp of every CTA that runs only when no other can.
        starved_cta: Value of x % 2 + 2 * (y % 2). CTAs with this value, one of up to four neighbours in a
            cluster, run only when no other can.
    """

    mode: str
    seed: int = 0
    shuffled: bool = False
    starved_rank: int | None = None
    starved_warp: int | None = None
    starved_cta: int | None = None

    @staticmethod
    def of(mode: str, seed: int, schedule: str) -> Setting:
        """Returns the setting of a schedule's name on the command line, one of `SCHEDULES`.

        `starve:RANK` starves a rank, `starve:warp:NUMBER` that warp of every CTA, and `starve:cta:NUMBER`, 0
        to 3, the CTAs with this value of `starved_cta`.

        Raises:
            ValueError: The mode or the schedule is unknown.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} must be one of {', '.join(MODES)}")
        match schedule.split(":"):
            case ["round_robin"]:
                return Setting(mode, seed)
            case ["shuffled"]:
                return Setting(mode, seed, shuffled=True)
            case ["starve", number] | ["starve", "rank", number] if number.isdigit():
                return Setting(mode, seed, starved_rank=int(number))
            case ["starve", "warp", number] if number.isdigit():
                return Setting(mode, seed, starved_warp=int(number))
            case ["starve", "cta", number] if number.isdigit():
                return Setting(mode, seed, starved_cta=int(number))
        raise ValueError(f"schedule {schedule!r} must be one of {SCHEDULES}")

    @property
    def schedule(self) -> str:
        """Returns the schedule's name on the command line."""
        for what, which in (
            ("", self.starved_rank),
            ("cta:", self.starved_cta),
            ("warp:", self.starved_warp),
        ):
            if which is not None:
                return f"starve:{what}{which}"
        return "shuffled" if self.shuffled else "round_robin"

    def options(self, strict: bool = True, also: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the arguments of `Emulator` for the setting.

        Args:
            strict: Whether to add the checks that correct kernels may violate. The commands `run` and `check`
                add them only with ``--strict``; `mutate` always does.
            also: Names of additional checks.
        """
        parties = (self.starved_rank, self.starved_cta, self.starved_warp)

        def starved(rank: int, cta: tuple[int, int, int], warp: int) -> bool:
            return any(
                a == b for a, b in zip(parties, (rank, cta[0] % 2 + 2 * (cta[1] % 2), warp), strict=True)
            )

        schedule = Schedule(
            order="random" if self.shuffled else "round_robin",
            lanes=self.shuffled,
            starved=None if parties == (None, None, None) else starved,
            grids="random" if self.shuffled else "submission",
        )
        checks = CHECKS + (STRICT_CHECKS if strict else ()) + tuple(also)
        return {"mode": self.mode, "seed": self.seed, "schedule": schedule, "checks": checks}

    def __str__(self) -> str:
        extra = ", shuffled" if self.shuffled else ""
        for what, which in (
            ("rank", self.starved_rank),
            ("CTA", self.starved_cta),
            ("warp", self.starved_warp),
        ):
            extra += "" if which is None else f", {what} {which} starved"
        return f"{self.mode} {self.seed}{extra}"


def settings(seeds: int = 2, ranks: int = 1, warps: int = 0) -> list[Setting]:
    """Returns every mode in round robin, shuffled with each seed, and with ranks, CTAs and warps starved.

    In this order:

    - immediate, lazy and random in round robin, seed 0: 3 settings
    - for each seed 1..`seeds` the three modes, shuffled: 3 * seeds
    - lazy and immediate with each rank starved: 2 * ranks, or none for one rank
    - lazy with each of the four classes of CTAs starved (`Setting.starved_cta`): 4
    - immediate and lazy with each warp 0..`warps` - 1 starved: 2 * warps
    """
    modes = ("immediate", "lazy", "random")
    chosen = [Setting(mode) for mode in modes]
    chosen += [Setting(mode, seed, shuffled=True) for seed in range(1, seeds + 1) for mode in modes]
    if ranks > 1:
        chosen += [
            Setting(mode, starved_rank=rank) for mode in ("lazy", "immediate") for rank in range(ranks)
        ]
    chosen += [Setting("lazy", starved_cta=number) for number in range(4)]
    return chosen + [Setting(mode, starved_warp=w) for mode in ("immediate", "lazy") for w in range(warps)]
