"""Findings grouped by cause: one missing barrier may leave a hundred accesses unordered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cute_emulator.errors import EmulatorError, Finding, Report


@dataclass(frozen=True)
class Cause:
    """Findings of one kind with the same missing synchronisation, linked by lines that they share.

    The missing synchronisation is the message up to its first colon, if the message begins with "no ". One
    shared line of the source (of the PTX if that is unknown) links two findings. Links are transitive: a
    finding that is linked to two groups merges them. Of the other findings at most `SHOWN` = 8 lines are
    shown.

    Attributes:
        finding: First finding of the group.
        others: Other findings of the group.
    """

    finding: Finding
    others: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        if not self.others:
            return str(self.finding)
        places = sorted({place for finding in self.others for place in _places(finding)})
        shown = ", ".join(map(_named, places[:SHOWN])) + (", .." if len(places) > SHOWN else "")
        n = len(self.others)
        return (
            f"{self.finding}\n      {n} more finding{'s' * (n > 1)} follow{'s' * (n == 1)} from it: {shown}"
        )


SHOWN = 8
"""Number of lines of the other findings that a message lists."""


def causes(findings: Iterable[Finding]) -> list[Cause]:
    """Groups findings; groups are in the order of their first findings."""
    groups: list[tuple[set[object], list[Finding]]] = []
    for finding in findings:
        missing = finding.message.partition(":")[0] if finding.message.startswith("no ") else ""
        ends: set[object] = {(finding.kind, missing, place) for place in _places(finding)}
        linked = [group for group in groups if group[0] & ends]
        if not linked:
            groups.append((ends, [finding]))
            continue
        first = linked[0]
        first[0].update(ends)
        first[1].append(finding)
        for other in linked[1:]:
            first[0].update(other[0])
            first[1].extend(other[1])
            groups.remove(other)
    return [Cause(members[0], tuple(members[1:])) for _, members in groups]


def _places(finding: Finding) -> list[tuple[str, int]]:
    """Returns the lines of the source, or of the PTX if these are not known."""
    return list(finding.places) or ([("PTX", finding.line)] if finding.line else [])


def _named(place: tuple[str, int]) -> str:
    return f"{place[0].rpartition('/')[2]}:{place[1]}"


class FindingsError(EmulatorError):
    """Error for a run that ended with findings of the checks.

    Attributes:
        report: Record of the run.
    """

    def __init__(self, report: Report) -> None:
        groups = causes(report.findings)
        of = f", of {len(groups)} cause(s)" if len(groups) < len(report.findings) else ""
        lines = [f"{len(report.findings)} finding(s) in the emulated kernels{of}:", *map(str, groups)]
        super().__init__("\n  ".join(lines))
        self.report = report
