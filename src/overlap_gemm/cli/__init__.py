"""The `overlap-gemm` command. A subcommand `foo-bar` is a function `foo_bar` in the module `foo_bar`.

The module is in this package and the name in `COMMANDS`, or in `TOOLS_PACKAGE` and `TOOLS`. It is imported
when the subcommand runs, so it may import torch, which takes seconds. `--help` reads the function's docstring
without importing it.
"""

import ast
import logging
import re
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__

logger = logging.getLogger(__name__)

COMMANDS = ("demo", "explain", "plan", "tune", "doctor", "soak")
"""Subcommands in the order of `--help`."""

TOOLS = ("bench", "emulate", "compile-check")
"""Subcommands for developers."""

TOOLS_PACKAGE = "overlap_gemm_tools"
"""Package with the modules of `TOOLS`; the extra `tools` installs it."""


class LazyCommands(TyperGroup):
    """Group that imports the called subcommand and reports user errors and missing packages in one line.

    User errors are ValueError, TypeError and OSError; a missing package is a ModuleNotFoundError of a module
    that an extra installs. The line is written to stderr, the exit code is 1, and the traceback is logged at
    level DEBUG. Other exceptions propagate with their traceback.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the subcommand in place of its placeholder, which has name and help only.

        Called by click.
        """
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and _command(name), rest

    def invoke(self, ctx: Any) -> Any:
        """Runs the subcommand. Called by click."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if (extra := extra_with(error.name or "")) is None:  # not the user's mistake
                raise
            reason = f"{error.name} is not installed: pip install 'overlap-gemm[{extra}]'"
            cause: Exception = error
        except (ValueError, TypeError, OSError) as error:
            reason, cause = str(error), error
        logger.debug("the command failed", exc_info=cause)
        typer.echo(f"Error: {reason}", err=True)
        raise typer.Exit(1) from cause


def extra_with(module: str) -> str | None:
    """Returns the smallest extra of this distribution that installs a module, or None."""
    try:
        requirements = metadata.requires("overlap-gemm") or ()
    except metadata.PackageNotFoundError:
        return None
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        name, *extra = re.findall(r"^[\w.-]+|(?<=extra == .)[\w-]+", requirement)
        for one in extra:
            extras.setdefault(one, []).append(name.replace("_", "-").lower())
    distribution = module.partition(".")[0].replace("_", "-").lower()
    return min(
        (e for e, names in extras.items() if distribution in names),
        key=lambda e: len(extras[e]),
        default=None,
    )


def _new_app(**options: Any) -> typer.Typer:
    return typer.Typer(pretty_exceptions_show_locals=False, rich_markup_mode=None, **options)


def _command(name: str) -> Any:
    """Returns the subcommand with its options."""
    module = name.replace("-", "_")
    if name in TOOLS and find_spec(TOOLS_PACKAGE) is None:
        raise ValueError(f"{name} is a tool for developers: pip install 'overlap-gemm[tools]'")
    package = TOOLS_PACKAGE if name in TOOLS else __name__
    alone = _new_app(add_completion=False)
    alone.command(name)(getattr(import_module(f".{module}", package), module))
    return typer.main.get_command(alone)


def _help(name: str) -> str | None:
    """Returns the docstring of a subcommand's function without importing its module."""
    module, home = name.replace("-", "_"), Path(__file__)
    if name in TOOLS:
        package = find_spec(TOOLS_PACKAGE)
        if package is None or package.origin is None:
            return "Tool for developers: pip install 'overlap-gemm[tools]'."
        home = Path(package.origin)
    source = ast.parse(home.with_name(f"{module}.py").read_text(encoding="utf-8"))
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
for _name in (*COMMANDS, *TOOLS):
    app.command(_name, help=_help(_name))(lambda: None)


@app.callback()
def _several_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Runs tensor-parallel GEMMs that overlap with their communication."""
