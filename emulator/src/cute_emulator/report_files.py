"""Findings of `check` as a file: JSON, text, a page to share, or SARIF for code review."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cute_emulator.causes import Cause
from cute_emulator.rules import RULES

SUFFIXES = (".html", ".json", ".sarif", ".txt")


@dataclass
class Outcome:
    """Outcome of one run.

    Attributes:
        setting: Setting of the run.
        verdict: `clean`, `findings`, `broke off` (fault, deadlock, trap) or `failed` (the script itself).
        messages: Findings, or the error that ended the run.
        causes: Findings grouped by cause.
        command: Command that reproduces the run.
        seconds: Wall time.
    """

    setting: str
    verdict: str
    messages: list[str] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    command: str = ""
    seconds: float = 0.0


def distinct_messages(outcomes: Iterable[Outcome]) -> list[tuple[str, Cause | None, str]]:
    """Returns each different message with its cause, if any, and the first command that reproduces it."""
    seen: set[str] = set()
    distinct: list[tuple[str, Cause | None, str]] = []
    for outcome in outcomes:
        messages: list[tuple[str, str, Cause | None]] = [(str(c.finding), str(c), c) for c in outcome.causes]
        messages += [(text, text, None) for text in (() if outcome.causes else outcome.messages)]
        for key, text, cause in messages:
            if key not in seen:
                seen.add(key)
                distinct.append((text, cause, outcome.command))
    return distinct


def verdict(outcomes: list[Outcome]) -> str:
    """Returns the last line of a report."""
    bad = sum(outcome.verdict != "clean" for outcome in outcomes)
    return f"{bad} of {len(outcomes)} runs are not clean" if bad else f"{len(outcomes)} runs, all clean"


def check_suffix(path: Path) -> None:
    """Raises `ValueError` if no report can be written to a file of this name."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--report {path} must end in one of {', '.join(SUFFIXES)}")


def write(path: Path, outcomes: list[Outcome], script: str) -> None:
    """Writes a report in the format of the suffix."""
    makes = {".json": _json, ".txt": _text, ".html": _page, ".sarif": _sarif}
    path.write_text(makes[path.suffix](outcomes, script))


def _json(outcomes: list[Outcome], _: str) -> str:
    return json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n"


def _text(outcomes: list[Outcome], script: str) -> str:
    lines = [f"{script}: {verdict(outcomes)}", ""]
    lines += [f"{o.setting:40} {o.verdict:12} {o.seconds:.1f} s" for o in outcomes]
    for text, _, command in distinct_messages(outcomes):
        lines += ["", text, f"  repeat: {command}"]
    return "\n".join(lines) + "\n"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; } td, th { padding: .1rem 1rem .1rem 0;
text-align: left; }
.bad { color: #b00020; font-weight: 600; } code { color: #555; }
"""


def _page(outcomes: list[Outcome], script: str) -> str:
    rows = "".join(
        f'<tr><td>{html.escape(o.setting)}</td><td class="{"" if o.verdict == "clean" else "bad"}">'
        f"{o.verdict}</td><td>{o.seconds:.1f} s</td></tr>"
        for o in outcomes
    )
    parts = [
        f"<h2>{html.escape(text.splitlines()[0])}</h2><pre>{html.escape(text)}</pre>"
        f"<p>Repeat: <code>{html.escape(command)}</code></p>"
        for text, _, command in distinct_messages(outcomes)
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(script)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(script)}: {verdict(outcomes)}</h1>"
        f"<table><tr><th>setting</th><th>verdict</th><th>time</th></tr>{rows}</table>{''.join(parts)}</html>\n"
    )


def _location(place: tuple[str, int]) -> Mapping[str, Any]:
    path = Path(place[0])
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": path.as_posix()},
            "region": {"startLine": max(place[1], 1)},
        }
    }


def _sarif(outcomes: list[Outcome], script: str) -> str:
    """Returns SARIF 2.1.0: a result for each cause, and for each error that ended a run."""
    results = []
    for text, cause, command in distinct_messages(outcomes):
        places = list(cause.finding.places) if cause is not None else []
        first, *related = places or [(script, 1)]
        results.append(
            {
                "ruleId": cause.finding.kind if cause is not None else "run",
                "level": "error",
                "message": {"text": f"{text}\nRepeat: {command}"},
                "locations": [_location(first)],
                "relatedLocations": [_location(place) for place in related],
            }
        )
    rules = [{"id": r.kind, "shortDescription": {"text": " ".join(w.text for w in r.rows)}} for r in RULES]
    rules.append({"id": "run", "shortDescription": {"text": "A run ends, and its script is content"}})
    driver = {"name": "cute-emulator", "rules": rules}
    return json.dumps(
        {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{"tool": {"driver": driver}, "results": results}],
        },
        indent=1,
    )
