"""What lies in registers, and for how long."""

from __future__ import annotations

from typing import Any

from cutlass import cute


def computed_here(value: Any) -> Any:
    """``value``, an ``Int32`` or ``Int64``, of which the compiler knows no more than that it is new.

    What follows from a value that does not change in a loop is computed in front of the loop, and kept in
    registers all the while, whether there are any to spare or not; and what is needed in a branch alone is
    computed there, however late. What follows from this one is not, and it is there before the next wait.
    """
    kind = type(value)
    move = f"mov.b{kind.width} {{$w0}}, {{$r0}};"
    return kind(cute.arch.inline_ptx(move, write_only_types=[kind], read_only_args=[value]))
