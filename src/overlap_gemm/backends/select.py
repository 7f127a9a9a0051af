"""Which backend carries out an op, and why. The choice is never silent: `explain` prints it."""

from dataclasses import dataclass

from .base import Backend, Problem
from .decomposed import Decomposed
from .sequential import Sequential

BACKENDS: tuple[Backend, ...] = (Decomposed(), Sequential())
"""In the order in which `auto` tries them. A new backend is one more entry."""

UNBUILT = {"fused": "its kernels are not part of this version"}
"""Backends of the design that are not in `BACKENDS` yet, with what to tell somebody who asks for one."""


@dataclass(frozen=True)
class Choice:
    """A backend and the reasons for it.

    Attributes:
        backend: What will run.
        problem: What it was chosen for.
        requested: The caller's `backend=`.
        verdicts: (name, reason) of each backend considered, in order; reason None for the one chosen.
    """

    backend: Backend
    problem: Problem
    requested: str
    verdicts: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        """A line for the choice and one for each backend considered."""
        problem = self.problem
        lines = [
            f"{problem.op} runs as {self.backend.name!r} (backend={self.requested!r})",
            f"  M={problem.rows}, width={problem.features}, {problem.dtype}, {problem.device_type}, "
            f"P={problem.world_size}, {problem.bytes / 2**20:.3g} MiB to move",
        ]
        for name, reason in self.verdicts:
            lines.append(f"  {name}: {'chosen' if reason is None else 'no, ' + reason}")
        return "\n".join(lines)


def choose(problem: Problem, requested: str = "auto") -> Choice:
    """Picks the backend for a problem. Every rank of a group comes to the same choice.

    Args:
        problem: What is to be carried out.
        requested: "auto", or the name of a backend that must carry it out.

    Raises:
        ValueError: No backend of that name, or it cannot carry out the problem.
    """
    if requested == "auto":
        verdicts: list[tuple[str, str | None]] = list(UNBUILT.items())
        for backend in BACKENDS:
            verdict = backend.why_not(problem) or backend.why_slower(problem)
            verdicts.append((backend.name, verdict))
            if verdict is None:
                return Choice(backend, problem, requested, tuple(verdicts))
        raise AssertionError(f"no backend for {problem}; the last one carries out everything")
    check_name(requested)
    backend = next(backend for backend in BACKENDS if backend.name == requested)
    if reason := backend.why_not(problem):
        raise ValueError(f"backend={requested!r} cannot carry out {problem}: {reason}")
    return Choice(backend, problem, requested, ((requested, None),))


def check_name(requested: str) -> None:
    """Raises a ValueError unless `requested` is "auto" or the name of a backend of this version."""
    names = ["auto", *(backend.name for backend in BACKENDS)]
    if requested not in names:
        why = f": {UNBUILT[requested]}" if requested in UNBUILT else ""
        raise ValueError(f"backend={requested!r} is not available{why}; choose one of {', '.join(names)}")
