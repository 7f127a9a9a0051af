"""``python -m overlap_gemm.emulator [OPTIONS] SCRIPT ARGS...``: runs a CuTe DSL script without a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from .host.emulator import Emulator
from .host.script import run_script

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="Python script to run.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    arch: Annotated[str, typer.Option(help="Architecture: sm_90a, sm_100a or sm_103a.")] = "sm_100a",
    ranks: Annotated[int, typer.Option(help="Run the script once per rank.")] = 1,
    mode: Annotated[str, typer.Option(help="When async operations complete: immediate, random, lazy.")] = (
        "immediate"
    ),
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    num_sms: Annotated[int | None, typer.Option(help="Multiprocessors the device claims.")] = None,
    collect: Annotated[bool, typer.Option(help="Print findings at the end, do not stop at them.")] = False,
) -> None:
    """Runs SCRIPT with ARGUMENTS on emulated GPUs, unchanged."""
    with Emulator(arch, ranks, mode, seed, num_sms=num_sms, collect=collect) as emulator:  # type: ignore[arg-type]
        run_script(emulator, script, arguments or [])
    report = emulator.report
    typer.echo(f"emulator: {report.instructions} warp instructions in {report.seconds:.2f} s", err=True)
    for finding in report.findings:
        typer.echo(f"emulator: {finding}", err=True)
    if report.findings:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
