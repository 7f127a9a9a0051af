"""``python -m cute_emulator check``: a script in every mode, under several schedules; one verdict."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

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
from cute_emulator.host.emulator import Emulator, FindingsError
from cute_emulator.host.script import run_script
from cute_emulator.machine.roles import parse_roles
from cute_emulator.rules import RULES
from cute_emulator.settings import settings

KERNEL_KINDS = tuple(rule.kind for rule in RULES if rule.judges)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass
class Outcome:
    """What one run showed.

    Attributes:
        setting: how it was run.
        verdict: `clean`, `findings`, `broke off` (fault, deadlock, trap) or `failed` (the script itself).
        messages: the findings, or what it broke off with.
        command: repeats the run.
        seconds: wall time.
    """

    setting: str
    verdict: str
    messages: list[str] = field(default_factory=list)
    command: str = ""
    seconds: float = 0.0


def attempt(run: Callable[[], None]) -> tuple[str, list[str]]:
    """Verdict and messages of one run."""
    try:
        run()
    except FindingsError as error:
        return "findings", [str(finding) for finding in error.report.findings]
    except EmulatorError as error:
        return "broke off", [f"{type(error).__name__}: {error}"]
    except SystemExit as end:
        if end.code not in (None, 0):
            return "failed", [f"the script ended with exit code {end.code}"]
    except Exception as error:
        return "failed", [f"{type(error).__name__}: {error}"]
    return "clean", []


@contextlib.contextmanager
def each_warning_once() -> Iterator[None]:
    """The runs of a script warn alike; inside, a warning that was shown before is not shown again."""
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
    seeds: Annotated[int, typer.Option(help="Seeds per mode of shuffled turns.")] = 2,
    warps: Warps = 0,
    limit: Annotated[int, typer.Option(help="Warp instructions after which a run is broken off.")] = 10**8,
    strict: Strict = False,
    also: Also = None,
    roles: RoleNames = "",
    ignore: Ignore = None,
    report: Annotated[Path | None, typer.Option("--json", help="Write the outcomes there.")] = None,
) -> None:
    """Runs SCRIPT in every mode, in round robin and shuffled, with ranks and CTAs starved.

    Ends with exit code 1 unless every run was clean. Each finding comes with the command that repeats it.
    """
    outcomes, judged = [], Counter[str]()
    with as_user_error():
        names = parse_roles(roles)
    with with_line_information(), each_warning_once():
        for setting in settings(seeds, ranks, warps):
            begin = time.perf_counter()

            options = {
                **setting.options(strict, also or ()),
                "num_sms": num_sms,
                "limit": limit,
                "roles": names,
            }
            options["ignore"] = ignore or ()
            with as_user_error():
                emulator = Emulator(arch, ranks, **options)

            def run(emulator: Emulator = emulator) -> None:
                with emulator, contextlib.redirect_stdout(io.StringIO()):
                    run_script(emulator, script, arguments or [])

            outcome = Outcome(str(setting), *attempt(run))
            outcome.seconds = round(time.perf_counter() - begin, 2)
            for ran in emulator.report.coverage:
                judged += ran.judged
            words = ["python", "-m", "cute_emulator", "--arch", arch, "--ranks", str(ranks)]
            words += ["--mode", setting.mode, "--seed", str(setting.seed), "--schedule", setting.schedule]
            words += ["--num-sms", str(num_sms)] if num_sms else []
            words += ["--limit", str(limit)]
            words += ["--strict"] if strict else []
            words += [word for name in also or () for word in ("--also", name)]
            words += ["--roles", roles] if roles else []
            words += [word for kind in ignore or () for word in ("--ignore", kind)]
            outcome.command = shlex.join([*words, script, *(arguments or [])])
            outcomes.append(outcome)
    if report is not None:
        report.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    show(outcomes)
    idle = ", ".join(kind for kind in KERNEL_KINDS if not judged[kind])
    typer.echo(f"nothing that ran is judged by: {idle or 'no rule'}")
    if any(outcome.verdict != "clean" for outcome in outcomes):
        raise typer.Exit(1)


def show(outcomes: list[Outcome]) -> None:
    """Prints the runs, each different message once with the command that repeats it, and the verdict."""
    table = Table("setting", "verdict", "seconds")
    for outcome in outcomes:
        style = None if outcome.verdict == "clean" else "bold red"
        table.add_row(outcome.setting, outcome.verdict, f"{outcome.seconds:.1f}", style=style)
    console = Console(width=120)
    console.print(table)
    seen = set()
    for outcome in outcomes:
        new = [message for message in outcome.messages if message not in seen]
        seen.update(new)
        for message in new:
            console.print(message, markup=False, highlight=False, soft_wrap=True)
        if new:
            console.print(f"  repeat: {outcome.command}", markup=False, highlight=False, soft_wrap=True)
    bad = sum(outcome.verdict != "clean" for outcome in outcomes)
    console.print(
        f"{bad} of {len(outcomes)} runs are not clean" if bad else f"{len(outcomes)} runs, all clean"
    )
