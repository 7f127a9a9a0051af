"""Findings by what they come from: one missing barrier may leave a hundred accesses unordered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cute_emulator.errors import EmulatorError, Finding, Report


@dataclass(frozen=True)
class Cause:
    """Findings of one kind that miss the same, and are linked by lines that they share.

    Attributes:
        finding: The first of them.
        others: The rest.
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
"""Lines of the findings that follow which are named."""


def causes(findings: Iterable[Finding]) -> list[Cause]:
    """Groups findings; the order is that of the first of each."""
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
    return [Cause(found[0], tuple(found[1:])) for _, found in groups]


def _places(finding: Finding) -> list[tuple[str, int]]:
    """Lines of the source, or of the PTX where these are not known."""
    return list(finding.places) or ([("PTX", finding.line)] if finding.line else [])


def _named(place: tuple[str, int]) -> str:
    return f"{place[0].rpartition('/')[2]}:{place[1]}"


class FindingsError(EmulatorError):
    """A run ended, and the checks found something.

    Attributes:
        report: What the run recorded.
    """

    def __init__(self, report: Report) -> None:
        found = causes(report.findings)
        of = f", of {len(found)} cause(s)" if len(found) < len(report.findings) else ""
        lines = [f"{len(report.findings)} finding(s) in the emulated kernels{of}:", *map(str, found)]
        super().__init__("\n  ".join(lines))
        self.report = report
