"""``python -m cute_emulator mutate``: tests whether a script detects missing synchronisation."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cute_emulator import mutate
from cute_emulator.commands import Arch, Arguments, Ranks, Script, Warps
from cute_emulator.host.emulator import Emulator
from cute_emulator.host.script import run_script

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class ScriptFailed(Exception):
    """Error for a script that ended with an exit code other than 0."""


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def main(
    script: Script,
    arguments: Arguments = None,
    arch: Arch = "sm_100a",
    ranks: Ranks = 1,
    seeds: Annotated[int, typer.Option(help="Seeds per mode, in addition to a run in round robin.")] = 2,
    warps: Warps = 0,
    select: Annotated[str, typer.Option(help="Only mutations whose name matches, e.g. 'fence*'.")] = "*",
    reasons: Annotated[
        Path | None, typer.Option(help="JSON object: pattern of names -> why going undetected is right.")
    ] = None,
    exhaustive: Annotated[bool, typer.Option(help="Run every setting, also after a detection.")] = False,
) -> None:
    """Runs SCRIPT with one synchronisation operation removed or weakened at a time, under every setting.

    Ends with exit code 1 if a mutation that was executed went undetected without a reason.
    """

    def check(options: dict[str, Any]) -> None:
        with Emulator(arch, ranks, **options) as emulator, contextlib.redirect_stdout(io.StringIO()):
            try:
                run_script(emulator, script, arguments or [])
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise ScriptFailed(f"exit code {end.code}") from None

    why = json.loads(reasons.read_text()) if reasons else {}
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("unmodified", total=None)

        def progress(number: int, total: int, mutation: mutate.Mutation) -> None:
            bar.update(task, completed=number, total=total, description=mutation.key[:60])

        settings = mutate.settings(seeds, ranks, warps)
        outcomes = mutate.run(
            check, settings, select=select, reasons=why, exhaustive=exhaustive, progress=progress
        )
    Console(width=160).print(table(outcomes))
    if any(outcome.verdict == "NOT DETECTED" for outcome in outcomes):
        raise typer.Exit(1)


def table(outcomes: Sequence[mutate.Outcome]) -> Table:
    """Returns the outcomes as a table, with a count of each verdict as its caption."""
    rows = Table("line", "operation", "verdict", "noticed", "how", title="Mutations")
    for outcome in outcomes:
        noticed = f"{len(outcome.detections)} of {outcome.tried}"
        how = "; ".join(f"{setting}: {what}" for setting, what in outcome.detections[:3]) or outcome.reason
        line, name = str(outcome.mutation.line), outcome.mutation.key
        style = "bold red" if outcome.verdict == "NOT DETECTED" else None
        rows.add_row(line, name, outcome.verdict, noticed, how, style=style)
    counts = Counter(outcome.verdict for outcome in outcomes)
    rows.caption = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return rows


if __name__ == "__main__":
    app()
