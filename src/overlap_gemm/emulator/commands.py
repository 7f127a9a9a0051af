"""What the emulator's commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from overlap_gemm.emulator.host.replace import environment
from overlap_gemm.emulator.run.launch import SM_COUNT

ARCHS = ", ".join(SM_COUNT)


def with_line_information() -> contextlib.AbstractContextManager[None]:
    """Kernels compiled inside say in their PTX which Python line each instruction comes from."""
    return environment("CUTE_DSL_LINEINFO", "1")


@contextlib.contextmanager
def as_user_error() -> Iterator[None]:
    """A `ValueError` inside is the user's: one line and exit code 2, no traceback."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"emulator: {error}", err=True)
        raise typer.Exit(2) from None
