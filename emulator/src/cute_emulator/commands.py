"""Arguments, options and error handling that the emulator's commands share."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cute_emulator.errors import EmulatorError
from cute_emulator.execution.launch import SM_COUNT
from cute_emulator.host.replace import environment
from cute_emulator.rules import OPTIONAL_CHECKS

# Arguments and options of the commands.
Script = Annotated[
    str, typer.Argument(help="Script that fails where kernels are wrong, or a kernel (.ptx, .cu).")
]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
Arch = Annotated[str, typer.Option(help=f"Architecture: {', '.join(SM_COUNT)}.")]
Ranks = Annotated[int, typer.Option(help="Run the script once per rank.")]
NumSms = Annotated[int | None, typer.Option(help="Number of multiprocessors of the device.")]
Strict = Annotated[bool, typer.Option(help="Enable checks that correct kernels may violate, too.")]
Also = Annotated[list[str] | None, typer.Option(help=f"Additional check: {', '.join(OPTIONAL_CHECKS)}.")]
Warps = Annotated[int, typer.Option(help="Also starve each of this many warps in turn.")]
RoleNames = Annotated[str, typer.Option(help="Names of warps: 0-3=epilogue,4=mma,5=load.")]
Ignore = Annotated[list[str] | None, typer.Option(help="Kind of findings to discard.")]


def with_line_information() -> contextlib.AbstractContextManager[None]:
    """Adds the Python line of each instruction to the PTX of kernels compiled inside."""
    return environment("CUTE_DSL_LINEINFO", "1")


@contextlib.contextmanager
def as_user_error() -> Iterator[None]:
    """Reports a `ValueError` or a missing file as a user error: one line and exit code 2, no traceback."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"emulator: {error}", err=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def as_verdict() -> Iterator[None]:
    """Reports an `EmulatorError` inside as a verdict on the kernels.

    Prints the message and the script's traceback, and exits with code 1.
    """
    try:
        yield
    except EmulatorError as error:
        frames = traceback.extract_tb(error.__traceback__)
        script = [frame for frame in frames if not _MACHINERY.intersection(Path(frame.filename).parts)]
        if script:
            typer.echo("Called from here (most recent call last):", err=True)
            typer.echo("".join(traceback.format_list(script)), err=True, nl=False)
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None


_MACHINERY = {
    "cute_emulator", "typer", "cutlass", "nvidia_cutlass_dsl", "triton", "<frozen runpy>", "runpy.py",
    "contextlib.py", "<ptx>",
}  # fmt: skip
"""Parts of paths of files that do not belong to the script."""
