"""The `overlap-gemm` command. A command is a module of this package and a name in the list below.

A command's module is imported when the command runs: most of them need torch, which takes seconds to import,
and `--help`, `--version` and a shell's completion do not.
"""

import ast
import logging
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__

logger = logging.getLogger(__name__)

COMMANDS = ("demo", "explain", "plan", "tune", "bench", "doctor", "emulate", "compile-check")
"""In the order of `--help`. `compile-check` is the function `compile_check` of a module of that name."""


class LazyCommands(TyperGroup):
    """Imports the command that is called; says what a user got wrong in one line.

    The traceback goes to the log, at level DEBUG.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Called by click: the command in place of its placeholder, which has name and help only."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and _command(name), rest

    def invoke(self, ctx: Any) -> Any:
        """Called by click."""
        try:
            return super().invoke(ctx)
        except (ValueError, TypeError, OSError) as error:
            logger.debug("the command failed", exc_info=True)
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error


def _new_app(**options: Any) -> typer.Typer:
    return typer.Typer(pretty_exceptions_show_locals=False, rich_markup_mode=None, **options)


def _command(name: str) -> Any:
    """The command itself, with its options."""
    module = name.replace("-", "_")
    alone = _new_app(add_completion=False)
    alone.command(name)(getattr(import_module(f".{module}", __name__), module))
    return typer.main.get_command(alone)


def _help(name: str) -> str | None:
    """The docstring of a command's function, read without importing its module."""
    module = name.replace("-", "_")
    source = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    functions = (node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == module)
    return ast.get_docstring(next(functions))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"overlap-gemm {__version__}")
        raise typer.Exit


app = _new_app(
    help="Tensor-parallel GEMMs that overlap with their communication.",
    cls=LazyCommands,
    no_args_is_help=True,
)
for _name in COMMANDS:
    app.command(_name, help=_help(_name))(lambda: None)


@app.callback()
def _several_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Tensor-parallel GEMMs that overlap with their communication."""
