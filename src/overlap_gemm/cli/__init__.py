"""The `overlap-gemm` command. A command is a module of this package and a line in the list below."""

import typer

from . import bench, compile_check, demo, doctor, emulate

app = typer.Typer(
    help="Tensor-parallel GEMMs that overlap with their communication.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(demo.demo)
app.command()(bench.bench)
app.command()(doctor.doctor)
app.command()(emulate.emulate)
app.command()(compile_check.compile_check)


@app.callback()
def _several_commands() -> None:
    """Tensor-parallel GEMMs that overlap with their communication."""
