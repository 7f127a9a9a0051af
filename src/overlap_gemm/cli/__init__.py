"""The `overlap-gemm` command. A command is a module of this package and a line in the list below."""

import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from . import bench, compile_check, demo, doctor, emulate, plan, tune

logger = logging.getLogger(__name__)


class OneLineErrors(TyperGroup):
    """Says what a user got wrong in one line; the traceback goes to the log, at level DEBUG."""

    def invoke(self, ctx: Any) -> Any:
        """Called by click."""
        try:
            return super().invoke(ctx)
        except (ValueError, TypeError, OSError) as error:
            logger.debug("the command failed", exc_info=True)
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    help="Tensor-parallel GEMMs that overlap with their communication.",
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)
app.command()(demo.demo)
app.command()(plan.plan)
app.command()(tune.tune)
app.command()(bench.bench)
app.command()(doctor.doctor)
app.command()(emulate.emulate)
app.command()(compile_check.compile_check)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"overlap-gemm {__version__}")
        raise typer.Exit


@app.callback()
def _several_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Tensor-parallel GEMMs that overlap with their communication."""
