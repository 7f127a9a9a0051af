"""Console of commands that run on several ranks."""

from rich.console import Console

LEAST_WIDTH = 120
"""Columns that the tables need; a file has no width, and mpirun's pseudo-terminals report 80."""


def rank_zero_console(rank: int) -> Console:
    """Returns a console that prints on rank 0 only."""
    quiet = rank != 0
    return Console(quiet=quiet, width=max(LEAST_WIDTH, Console().width))
