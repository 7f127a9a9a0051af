"""Operations on values in an epilogue: `Value` with its operators, and functions such as `exp` and `silu`.

A function of this module accepts a torch tensor or a `Value`. It calls methods of its argument by torch's
names, so one source runs on tensors and in a kernel (`overlap_gemm.device.values` implements `Value`). The
functions are elementwise; a result has the shape of the argument. Standard library only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

GELU_CUBE = 0.044715
"""Weight of x**3 in the approximation of GELU by tanh (Hendrycks and Gimpel, 2016)."""

SQRT_2_OVER_PI = 0.7978845608028654
SQRT_HALF = 0.7071067811865476


class Value(ABC):
    """Abstract fp32 value in an epilogue's function: a register of a kernel, or a placeholder in a check.

    It supports `+ - * /`, `abs` and the methods below, which have the names of torch's tensor methods. It
    has no truth value, cannot be compared or changed in place: a branch, `==` and `+=` raise TypeError.
    """

    @abstractmethod
    def unary(self, name: str) -> Value:
        """Returns the result of an operation with one operand, by torch's name: ``neg``, ``abs``, ``exp``."""

    @abstractmethod
    def binary(self, name: str, left: Any, right: Any) -> Value:
        """Returns the result of an operation with two operands, by torch's name: ``add``, ``maximum``.

        Args:
            name: Name of the operation.
            left: First operand, a value or a number.
            right: Second operand, a value or a number. At least one of the two operands is this value.
        """

    def __add__(self, other: Any) -> Value:
        return self.binary("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return self.binary("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return self.binary("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return self.binary("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return self.binary("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return self.binary("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return self.binary("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return self.binary("div", other, self)

    def __neg__(self) -> Value:
        return self.unary("neg")

    def __abs__(self) -> Value:
        return self.unary("abs")

    def __bool__(self) -> bool:
        raise TypeError(
            "an epilogue computes the same expression for every value: it cannot branch on one (if, and, or, "
            "a comparison); use overlap_gemm.epilogues.maximum or minimum"
        )

    def __eq__(self, other: object) -> bool:
        raise TypeError(
            "an epilogue computes with values, which do not compare (==, !=); use "
            "overlap_gemm.epilogues.maximum or minimum"
        )

    __hash__ = object.__hash__

    def __iadd__(self, other: Any) -> Value:
        """Raises TypeError, as `-=`, `*=` and `/=` do: on tensors they would change an operand."""
        raise TypeError(
            "an epilogue does not change a value (+=, -=, *=, /=), which on tensors would change the "
            "operand: write y = y + x"
        )

    __isub__ = __imul__ = __itruediv__ = __iadd__

    def exp(self) -> Value:
        """Returns e raised to the value."""
        return self.unary("exp")

    def sqrt(self) -> Value:
        """Returns the square root of the value."""
        return self.unary("sqrt")

    def rsqrt(self) -> Value:
        """Returns 1 / sqrt(x), where x is the value."""
        return self.unary("rsqrt")

    def reciprocal(self) -> Value:
        """Returns 1 / x, where x is the value."""
        return self.unary("reciprocal")

    def sigmoid(self) -> Value:
        """Returns 1 / (1 + exp(-x)), where x is the value."""
        return self.unary("sigmoid")

    def tanh(self) -> Value:
        """Returns the hyperbolic tangent of the value."""
        return self.unary("tanh")

    def erf(self) -> Value:
        """Returns the error function of the value."""
        return self.unary("erf")

    def clamp(self, min: Any = None, max: Any = None) -> Value:
        """Returns the value limited to ``[min, max]``; a limit None is not applied, and NaN remains NaN.

        Args:
            min: Lower limit, a value or a number.
            max: Upper limit, a value or a number.
        """
        value = self
        if min is not None:
            value = value.binary("maximum", value, min)
        return value if max is None else value.binary("minimum", value, max)


def exp(x: Any) -> Any:
    """Returns e raised to x."""
    return x.exp()


def sqrt(x: Any) -> Any:
    """Returns the square root of x."""
    return x.sqrt()


def rsqrt(x: Any) -> Any:
    """Returns 1 / sqrt(x)."""
    return x.rsqrt()


def reciprocal(x: Any) -> Any:
    """Returns 1 / x."""
    return x.reciprocal()


def tanh(x: Any) -> Any:
    """Returns the hyperbolic tangent of x."""
    return x.tanh()


def erf(x: Any) -> Any:
    """Returns the error function of x."""
    return x.erf()


def sigmoid(x: Any) -> Any:
    """Returns 1 / (1 + exp(-x))."""
    return x.sigmoid()


def maximum(x: Any, y: Any) -> Any:
    """Returns the larger of x (a value or tensor) and y (also a number); NaN if x or y is NaN."""
    return x.clamp(min=y)


def minimum(x: Any, y: Any) -> Any:
    """Returns the smaller of x (a value or tensor) and y (also a number); NaN if x or y is NaN."""
    return x.clamp(max=y)


def relu(x: Any) -> Any:
    """Returns max(x, 0)."""
    return maximum(x, 0.0)


def silu(x: Any) -> Any:
    """Returns x * sigmoid(x)."""
    return x * x.sigmoid()


def gelu(x: Any) -> Any:
    """Returns 0.5 * x * (1 + erf(x / sqrt(2))), as ``torch.nn.functional.gelu``."""
    return 0.5 * x * (1.0 + (x * SQRT_HALF).erf())


def gelu_tanh(x: Any) -> Any:
    """Returns GELU approximated by tanh, as ``torch.nn.functional.gelu(x, approximate="tanh")``.

    With u = sqrt(2 / pi) * (x + 0.044715 * x**3), the result is 0.5 * x * (1 + tanh(u)). It is computed as
    x * sigmoid(2 * u), which is equal.
    """
    return x * ((2 * SQRT_2_OVER_PI) * (x + GELU_CUBE * (x * x * x))).sigmoid()
