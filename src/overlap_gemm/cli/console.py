"""Where commands that run on several ranks print."""

from rich.console import Console

LEAST_WIDTH = 120
"""Columns that the tables need; a file has no width, and mpirun's pseudo-terminals claim 80."""


def rank_zero_console(rank: int) -> Console:
    """A console that speaks on rank 0 only."""
    quiet = rank != 0
    return Console(quiet=quiet, width=max(LEAST_WIDTH, Console().width))
