"""``python -m cute_emulator [run | check | mutate] [OPTIONS] SCRIPT ARGS...``: scripts without a GPU.

Exit codes of `run`, besides those of the script's `SystemExit`:

- 0: there are no findings
- 1: findings, also with ``--collect``; another `EmulatorError`; an exception of the script, with its
  traceback
- 2: a wrong option; a kernel file (.ptx, .cu) that is missing or cannot be launched

Traces and the hits of injected faults are written also if the run fails. With ``--collect`` the findings are
then printed before the exception.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from cute_emulator import check_command, mutate_command
from cute_emulator.commands import (
    Also,
    Arch,
    Arguments,
    Ignore,
    NumSms,
    Ranks,
    RoleNames,
    Strict,
    as_user_error,
    as_verdict,
    with_line_information,
)
from cute_emulator.host.emulator import Emulator
from cute_emulator.host.launch_files import SUFFIXES
from cute_emulator.host.script import run_script
from cute_emulator.machine.inject import WORDS
from cute_emulator.machine.roles import parse_roles
from cute_emulator.settings import SCHEDULES, Setting
from cute_emulator.trace import Trace

SILENT_SECONDS = 3.0
"""Runs shorter than this show no progress."""


class Progress:
    """Progress display of a long run on a terminal, once a second; the argument `progress` of `Machine`."""

    def __init__(self) -> None:
        self._shown = time.monotonic() + SILENT_SECONDS

    def __call__(self, instructions: int) -> None:
        """Prints the number of warp instructions run so far, at most once a second."""
        now = time.monotonic()
        if now > self._shown and sys.stderr.isatty():
            self._shown = now + 1.0
            typer.echo(f"\remulator: {instructions:,} warp instructions", err=True, nl=False)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[
        str, typer.Argument(help="Python script, or a kernel (.ptx, .cu), whose argument is its launch.")
    ],
    arguments: Arguments = None,
    arch: Arch = "sm_100a",
    ranks: Ranks = 1,
    mode: Annotated[str, typer.Option(help="When async operations complete: immediate, random, lazy.")] = (
        "immediate"
    ),
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    num_sms: NumSms = None,
    schedule: Annotated[str, typer.Option(help=f"Order in which warps run: {SCHEDULES}.")] = "round_robin",
    strict: Strict = False,
    also: Also = None,
    limit: Annotated[int | None, typer.Option(help="Largest number of warp instructions.")] = None,
    keep_ptx: Annotated[Path | None, typer.Option(help="Write the PTX that runs to this folder.")] = None,
    roles: RoleNames = "",
    fault: Annotated[list[str] | None, typer.Option(help=f"Fault to inject: {WORDS}.")] = None,
    collect: Annotated[bool, typer.Option(help="Print findings at the end, do not stop at them.")] = False,
    ignore: Ignore = None,
    poison_symmetric: Annotated[
        bool, typer.Option(help="Symmetric memory begins poisoned, not zero as on a device.")
    ] = False,
    usage: Annotated[
        bool,
        typer.Option(help="Print resources, coverage and judged instructions of launches."),
    ] = False,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Write a timeline of warps: .html, a page; .json, for Perfetto; .png."),
    ] = None,
) -> None:
    """Runs SCRIPT with ARGUMENTS on emulated GPUs, unchanged.

    `check --help` and `mutate --help` describe the other commands.
    """
    keep = _keeper(keep_ptx) if keep_ptx else None
    with as_user_error():
        names = parse_roles(roles)
        for path in trace or ():
            check_trace(path)
        recorder = Trace(roles=names) if trace else None
        options = Setting.of(mode, seed, schedule).options(strict, also or ())
        options |= {
            "num_sms": num_sms,
            "limit": limit,
            "collect": collect,
            "ignore": ignore or (),
            "trace": recorder,
            "roles": names,
            "progress": Progress(),
        }
        emulator = Emulator(arch, ranks, rewrite=keep, **options)
        for words in fault or ():
            emulator.faults.by_words(words)
    report = emulator.report
    try:
        # A script's ValueError is an error of the script; that of a kernel's launch is a user error.
        outer = as_user_error() if script.endswith(SUFFIXES) else contextlib.nullcontext()
        with outer, as_verdict(), with_line_information(), emulator:
            run_script(emulator, script, arguments or [], poison_symmetric)
    except BaseException:  # earlier findings explain why a comparison of the script fails
        for finding in report.findings if collect else ():
            typer.echo(f"emulator: {finding}", err=True)
        raise
    finally:  # a trace is most useful if the run failed
        if recorder is not None and recorder.spans:
            for path in trace or ():
                getattr(recorder, f"save_{path.suffix[1:]}")(path)
        for made, hits in emulator.faults.hits():
            typer.echo(f"emulator: {made} acted on {hits} stores", err=True)
    for taken, times in report.usage.items() if usage else ():
        typer.echo(f"emulator: {times} x {taken}", err=True)
    for ran in report.coverage if usage else ():
        typer.echo(f"emulator: {ran}", err=True)
    typer.echo(f"emulator: {report.instructions} warp instructions in {report.seconds:.2f} s", err=True)
    for finding in report.findings:
        typer.echo(f"emulator: {finding}", err=True)
    if report.findings:
        raise typer.Exit(1)


def check_trace(path: Path) -> None:
    """Raises `ValueError` if no trace can be written to a file of this name."""
    if path.suffix not in (".html", ".json", ".png"):
        raise ValueError(f"--trace {path} must end in .html (a page), .json (for Perfetto) or .png")
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise ValueError(
            f"--trace {path} needs matplotlib: pip install 'cute-emulator[plots]', or name a page, "
            f"{path.with_suffix('.html')}, which needs nothing"
        )


def _keeper(folder: Path) -> Callable[[str], str]:
    """Returns a function that writes each launched module once, to a file named after its first kernel."""
    folder.mkdir(parents=True, exist_ok=True)
    kept: set[str] = set()

    def keep(ptx: str) -> str:
        if ptx not in kept:
            kept.add(ptx)
            name = ptx.partition(".entry ")[2].partition("(")[0][:80] or "module"
            (folder / f"{len(kept)}-{name}.ptx").write_text(ptx)
        return ptx

    return keep


def main() -> None:
    """Runs a script (`run`, the default command), `check`, or `mutate`."""
    if sys.argv[1:2] == ["check"]:
        check_command.app(sys.argv[2:], prog_name="python -m cute_emulator check")
    elif sys.argv[1:2] == ["mutate"]:
        mutate_command.app(sys.argv[2:], prog_name="python -m cute_emulator mutate")
    else:
        app(sys.argv[1 + (sys.argv[1:2] == ["run"]) :], prog_name="python -m cute_emulator")


if __name__ == "__main__":
    main()
