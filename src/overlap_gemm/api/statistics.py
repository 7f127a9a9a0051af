"""`stats`: what this process has called, by which backend and why, and the memory that it shares."""

from collections import Counter
from dataclasses import dataclass

from ..backends.known import known_groups
from ..backends.select import reasons
from ..dispatch.choosing import calls
from ..runtime.group import known_progress
from ..runtime.memory.workspace import workspaces

__all__ = ["Stats", "stats"]


@dataclass(frozen=True)
class Stats:
    """What `stats` returns; all of this process, since it began.

    Attributes:
        calls: Op -> backend -> calls, those that raised and those of gradients among them.
        not_taken: Op and backend, as "gemm_all_reduce as torch" -> each backend that was considered,
            and why it was not taken; of the last choice.
        measured: Kind of call -> what was measured of it.
        refused: Group -> calls that raised before their launch, and how the last of them ended.
        symmetric_bytes: Group and kind of memory, as "0: slots" -> bytes on this rank.
    """

    calls: dict[str, dict[str, int]]
    not_taken: dict[str, dict[str, str]]
    measured: dict[str, str]
    refused: dict[str, str]
    symmetric_bytes: dict[str, int]

    def __str__(self) -> str:
        """A line for each entry."""
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
    """Returns what this process has called, by which backend, why, and what memory it shares.

    Reads host memory alone: no communication, nothing waits.
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
            for known in known_groups()
            for kind, measured in known.kinds.items()
            if measured is not None
        },
        {name: str(progress) for name, progress in known_progress().items() if progress.skipped},
        dict(owned),
    )
