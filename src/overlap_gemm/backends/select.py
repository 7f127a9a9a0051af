"""Which backend carries out an op, and why. The choice is never silent: `explain` prints it."""

from dataclasses import dataclass

from .base import Backend, Problem
from .decomposed import Decomposed
from .fused import Fused
from .sequential import Sequential

BACKENDS: tuple[Backend, ...] = (Fused(), Decomposed(), Sequential())
"""In the order in which `auto` tries them. A new backend is one more entry."""

OR_AUTO = " or auto"
"""Behind a backend's name: what `auto` chooses will do where that backend has no such op."""


@dataclass(frozen=True)
class Choice:
    """A backend and the reasons for it.

    Attributes:
        backend: What will run.
        problem: What it was chosen for.
        requested: The caller's `backend=`.
        verdicts: (name, reason) of each backend considered, in order; reason None for the one chosen.
        backward: The choice for the dual op in the backward pass, where `explain` was asked.
    """

    backend: Backend
    problem: Problem
    requested: str
    verdicts: tuple[tuple[str, str | None], ...]
    backward: "Choice | None" = None

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
        if self.backward is not None:
            lines.append(f"  backward: {self.backward.problem.op} runs as {self.backward.backend.name!r}")
        return "\n".join(lines)


def choose(problem: Problem, requested: str = "auto") -> Choice:
    """Picks the backend for a problem. Every rank of a group comes to the same choice.

    Args:
        problem: What is to be carried out.
        requested: "auto", the name of a backend that must carry it out, or that name and `OR_AUTO`.

    Raises:
        ValueError: No backend of that name, or it cannot carry out the problem.
    """
    check_name(requested)
    name = requested.removesuffix(OR_AUTO)
    verdicts: list[tuple[str, str | None]] = []
    if name != "auto":
        backend = next(backend for backend in BACKENDS if backend.name == name)
        verdicts.append((name, backend.why_not(problem)))
        if verdicts[0][1] is None:
            return Choice(backend, problem, requested, tuple(verdicts))
        if name == requested:
            raise ValueError(f"backend={requested!r} cannot carry out {problem}: {verdicts[0][1]}")
    for backend in BACKENDS:
        if backend.name != name:
            verdict = backend.why_not(problem) or backend.why_slower(problem)
            verdicts.append((backend.name, verdict))
            if verdict is None:
                return Choice(backend, problem, requested, tuple(verdicts))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in verdicts)
    raise ValueError(f"no backend can carry out {problem}: {reasons}")


def preferring(requested: str) -> str:
    """What a backward pass asks for: the forward's backend if it has the dual op, else `auto`'s choice."""
    return requested if requested == "auto" or requested.endswith(OR_AUTO) else requested + OR_AUTO


def check_name(requested: str) -> None:
    """Raises a ValueError unless `requested` is "auto" or the name of a backend of this version."""
    names = ["auto", *(backend.name for backend in BACKENDS)]
    if requested.removesuffix(OR_AUTO) not in names:
        raise ValueError(f"backend={requested!r} is not available; choose one of {', '.join(names)}")
