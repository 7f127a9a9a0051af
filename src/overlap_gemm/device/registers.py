"""Control of the compiler's use of registers."""

from __future__ import annotations

from typing import Any

from cutlass import cute


def rematerialize(value: Any) -> Any:
    """Returns ``value``, an ``Int32`` or ``Int64``, as a new value to the compiler.

    The compiler computes expressions of a loop-invariant value before the loop, and keeps them in registers,
    even if registers are short. It moves expressions that only a branch needs into that branch. Neither holds
    for expressions of the result, and the result is computed before the next wait.
    """
    kind = type(value)
    move = f"mov.b{kind.width} {{$w0}}, {{$r0}};"
    return kind(cute.arch.inline_ptx(move, write_only_types=[kind], read_only_args=[value]))
