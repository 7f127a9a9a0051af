"""Values of epilogues in a kernel: fp32 registers with the operators and functions of `epilogues`.

No function is a call. exp, sqrt, rsqrt, reciprocal and tanh are the approximate instructions of the special
function units; quotients and sigmoid use the reciprocal (2 units in the last place). exp and sigmoid of x err
by |x| units more, since x * log2(e) is rounded. tanh has a relative error of 2**-11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, cute

from overlap_gemm.epilogues import Value

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class Register(Value):
    """Value of an epilogue in an fp32 register.

    Attributes:
        raw: ``Float32``.
    """

    raw: Any

    def unary(self, name: str) -> Register:
        """Returns the function named ``name`` (as in torch) of this value."""
        return Register(_UNARY[name](self.raw))

    def binary(self, name: str, left: Any, right: Any) -> Register:
        """Returns the function named ``name`` (as in torch) of ``left`` and ``right``: values or numbers."""
        return Register(_BINARY[name](raw(left), raw(right)))


def raw(value: Any) -> Any:
    """Returns the ``Float32`` of a `Register` or of a number."""
    return value.raw if isinstance(value, Register) else Float32(value)


def _exp(x: Any) -> Any:
    return cute.math.exp2(x * Float32(LOG2_E), approx=True)


def _reciprocal(x: Any) -> Any:
    return cute.math.rcp(x, approx=True)


_UNARY = {
    "neg": lambda x: -x,
    "abs": cute.math.absf,
    "exp": _exp,
    "sqrt": lambda x: cute.math.sqrt(x, approx=True),
    "rsqrt": lambda x: cute.math.rsqrt(x, approx=True),
    "reciprocal": _reciprocal,
    "sigmoid": lambda x: _reciprocal(_exp(-x) + Float32(1.0)),
    "tanh": lambda x: cute.math.tanh(x, approx=True),
    "erf": cute.math.erf,
}

_BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x * _reciprocal(y),
    "maximum": lambda x, y: cute.math.max(x, y, propagate_nan=True),
    "minimum": lambda x, y: cute.math.min(x, y, propagate_nan=True),
}
