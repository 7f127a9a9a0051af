"""``python -m cute_emulator check``: a script in every mode, under several schedules; one verdict."""

from __future__ import annotations

import contextlib
import io
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from cute_emulator.causes import Cause, FindingsError, causes
from cute_emulator.commands import (
    Also,
    Arch,
    Arguments,
    Ignore,
    NumSms,
    Ranks,
    RoleNames,
    Script,
    Strict,
    Warps,
    as_user_error,
    with_line_information,
)
from cute_emulator.errors import EmulatorError
from cute_emulator.host.dsl import shared_compiles
from cute_emulator.host.emulator import Emulator
from cute_emulator.host.script import run_script
from cute_emulator.machine.roles import parse_roles
from cute_emulator.report_files import SUFFIXES, Outcome, check_suffix, distinct_messages, verdict, write
from cute_emulator.rules import RULES
from cute_emulator.settings import Setting, settings

R = TypeVar("R")
KERNEL_KINDS = tuple(rule.kind for rule in RULES if rule.judges)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def attempt(run: Callable[[], None]) -> tuple[str, list[str], list[Cause]]:
    """Runs a check; returns its verdict, messages and causes."""
    try:
        run()
    except FindingsError as error:
        findings = error.report.findings
        return "findings", [str(finding) for finding in findings], causes(findings)
    except EmulatorError as error:
        return "broke off", [f"{type(error).__name__}: {error}"], []
    except SystemExit as end:
        if end.code not in (None, 0):
            return "failed", [f"the script ended with exit code {end.code}"], []
    except Exception as error:
        return "failed", [f"{type(error).__name__}: {error}"], []
    return "clean", [], []


@contextlib.contextmanager
def each_warning_once() -> Iterator[None]:
    """Suppresses, inside, warnings that an earlier run of the script has already shown."""
    seen: set[tuple[str, str, int]] = set()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_once(message: Any, category: Any, filename: str, line: int, *to: Any) -> None:
            what = (str(message), filename, line)
            if what not in seen:
                seen.add(what)
                show(message, category, filename, line, *to)

        warnings.showwarning = show_once  # type: ignore[assignment]
        yield


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def main(
    script: Script,
    arguments: Arguments = None,
    arch: Arch = "sm_100a",
    ranks: Ranks = 1,
    num_sms: NumSms = None,
    seeds: Annotated[int, typer.Option(help="Seeds per mode of shuffled order.")] = 2,
    warps: Warps = 0,
    limit: Annotated[int, typer.Option(help="Largest number of warp instructions of a run.")] = 10**8,
    strict: Strict = False,
    also: Also = None,
    roles: RoleNames = "",
    ignore: Ignore = None,
    report: Annotated[
        list[Path] | None,
        typer.Option("--report", "--json", help=f"Write the findings: {', '.join(SUFFIXES)}."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Concurrent runs, in processes.")] = 1,
) -> None:
    """Runs SCRIPT in every mode, in round robin and shuffled, with ranks and CTAs starved.

    Ends with exit code 1 unless every run was clean. Each finding comes with the command that repeats it.
    """
    words = ["--num-sms", str(num_sms)] if num_sms else []
    words += ["--limit", str(limit)]
    words += ["--strict"] if strict else []
    words += [word for name in also or () for word in ("--also", name)]
    words += ["--roles", roles] if roles else []
    words += [word for kind in ignore or () for word in ("--ignore", kind)]
    with as_user_error():
        for path in report or ():
            check_suffix(path)
        options: dict[str, Any] = {
            "num_sms": num_sms, "limit": limit, "roles": parse_roles(roles), "ignore": ignore or (),
        }  # fmt: skip
        Emulator(arch, ranks, **options)
    check = partial(_run, arch, ranks, options, strict, tuple(also or ()), words, script, arguments or [])
    outcomes, judged = [], Counter[str]()
    with with_line_information(), each_warning_once():
        for outcome, counts in side_by_side(check, settings(seeds, ranks, warps), jobs):
            outcomes.append(outcome)
            judged += counts
    for path in report or ():
        write(path, outcomes, script)
    show(outcomes)
    idle = ", ".join(kind for kind in KERNEL_KINDS if not judged[kind])
    typer.echo(f"nothing that ran is judged by: {idle or 'no rule'}")
    if any(outcome.verdict != "clean" for outcome in outcomes):
        raise typer.Exit(1)


def side_by_side(check: Callable[[Setting], R], settings: Iterable[Setting], jobs: int) -> Iterator[R]:
    """Yields the result of a check for each setting, in order; processes share imports and compiles."""
    if jobs < 2:
        yield from map(check, settings)
        return
    shared_compiles.folder()
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from pool.map(check, settings)


def _run(
    arch: str, ranks: int, options: dict[str, Any], strict: bool, also: tuple[str, ...], words: list[str],
    script: str, arguments: list[str], setting: Setting,
) -> tuple[Outcome, Counter[str]]:  # fmt: skip
    """Runs a check once; returns the outcome and the number of instructions that each rule judged."""
    begin = time.perf_counter()
    emulator = Emulator(arch, ranks, **options, **setting.options(strict, also))

    def run() -> None:
        with emulator, contextlib.redirect_stdout(io.StringIO()):
            run_script(emulator, script, arguments)

    outcome = Outcome(str(setting), *attempt(run))
    outcome.seconds = round(time.perf_counter() - begin, 2)
    command = ["python", "-m", "cute_emulator", "--arch", arch, "--ranks", str(ranks), "--mode", setting.mode]
    command += ["--seed", str(setting.seed), "--schedule", setting.schedule, *words, script, *arguments]
    outcome.command = shlex.join(command)
    return outcome, sum((ran.judged for ran in emulator.report.coverage), Counter[str]())


def show(outcomes: list[Outcome]) -> None:
    """Prints the runs, each different message once with the command that reproduces it, and the verdict."""
    table = Table("setting", "verdict", "seconds")
    for outcome in outcomes:
        style = None if outcome.verdict == "clean" else "bold red"
        table.add_row(outcome.setting, outcome.verdict, f"{outcome.seconds:.1f}", style=style)
    console = Console(width=120)
    console.print(table)
    for text, _, command in distinct_messages(outcomes):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"  repeat: {command}", markup=False, highlight=False, soft_wrap=True)
    console.print(verdict(outcomes))
