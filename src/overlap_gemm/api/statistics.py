"""`stats`: calls of this process by op and backend, reasons of choices, and shared memory."""

from collections import Counter
from dataclasses import dataclass

from ..backends.group_measurements import all_measurements
from ..backends.select import reasons
from ..dispatch.choosing import calls
from ..runtime.group import known_progress
from ..runtime.memory.workspace import workspaces

__all__ = ["Stats", "stats"]


@dataclass(frozen=True)
class Stats:
    """Result of `stats`, for this process since its start.

    Attributes:
        calls: Op -> backend -> number of calls that were started: also those of gradients and of `warmup`,
            and those that raised while they ran (timeouts). Calls of invalid arguments and replays of CUDA
            graphs are not counted.
        not_taken: Op and backend, such as "gemm_all_reduce as torch" -> other backend -> reason against it,
            at the last choice.
        measured: Call signature -> summary of its measurement.
        refused: Group -> number of calls that raised before their launch (invalid arguments, for example;
            not in `calls`), and the last error.
        symmetric_bytes: Group and kind of memory, such as "0: slots" -> bytes on this rank.
    """

    calls: dict[str, dict[str, int]]
    not_taken: dict[str, dict[str, str]]
    measured: dict[str, str]
    refused: dict[str, str]
    symmetric_bytes: dict[str, int]

    def __str__(self) -> str:
        """Returns one line per entry."""
        lines = [
            f"calls: {op} as {backend}: {count}"
            for op, by_backend in self.calls.items()
            for backend, count in by_backend.items()
        ]
        for what, others in self.not_taken.items():
            lines += [f"not taken: {what}: {backend}, {reason}" for backend, reason in others.items()]
        lines += [f"measured: {kind}: {words}" for kind, words in self.measured.items()]
        lines += [f"refused: group {group!r}: {words}" for group, words in self.refused.items()]
        lines += [
            f"symmetric memory: {owner}: {nbytes} bytes" for owner, nbytes in self.symmetric_bytes.items()
        ]
        return "\n".join(lines) or "no calls"


def stats() -> Stats:
    """Returns the calls of this process, the backends and the reasons for them, and its shared memory.

    Reads host memory only: no communication, no waiting.
    """
    by_op: dict[str, dict[str, int]] = {}
    for (op, backend), (count,) in calls.items():
        if count:
            by_op.setdefault(op, {})[backend] = count
    owned: Counter[str] = Counter()
    for workspace in workspaces():
        owned[f"{workspace.group.name}: {workspace.size.kind}"] += workspace.memory.local.numel()
    return Stats(
        by_op,
        {f"{op} as {backend}": dict(why) for (op, backend), why in reasons.items()},
        {
            kind: str(measured)
            for group in all_measurements()
            for kind, measured in group.kinds.items()
            if measured is not None
        },
        {name: str(progress) for name, progress in known_progress().items() if progress.skipped},
        dict(owned),
    )
