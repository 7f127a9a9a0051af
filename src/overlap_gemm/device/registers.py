"""Control over the compiler's use of registers."""

from __future__ import annotations

from typing import Any

from cutlass import cute


def rematerialize(value: Any) -> Any:
    """Returns ``value``, an ``Int32`` or ``Int64``, through a ``mov`` that the compiler cannot look through.

    The compiler hoists expressions of a loop-invariant value out of the loop and keeps them in registers,
    even if registers are short. It also sinks expressions that only one branch needs into that branch. It
    does neither with expressions of the result.
    """
    kind = type(value)
    move = f"mov.b{kind.width} {{$w0}}, {{$r0}};"
    return kind(cute.arch.inline_ptx(move, write_only_types=[kind], read_only_args=[value]))
