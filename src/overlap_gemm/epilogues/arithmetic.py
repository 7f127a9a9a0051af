"""What an epilogue may do to its values: operators, and the functions here.

The same code runs on tensors (torch's methods have the names used here) and on values of a kernel
(`Value`, which `overlap_gemm.device.values` implements). Standard library only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

GELU_CUBE = 0.044715
"""Weight of x**3 in the approximation of GELU by tanh (Hendrycks and Gimpel, 2016)."""

SQRT_2_OVER_PI = 0.7978845608028654
SQRT_HALF = 0.7071067811865476


class Value(ABC):
    """An fp32 value that is neither a tensor nor a number: what an epilogue's function may do to it.

    The names of the functions are those of torch's methods.
    """

    @abstractmethod
    def unary(self, name: str) -> Value:
        """Returns a function of the value: ``neg``, ``abs``, ``exp``, ... by torch's name."""

    @abstractmethod
    def binary(self, name: str, left: Any, right: Any) -> Value:
        """Returns ``left name right``, one of them the value: ``add``, ``maximum``, ... by torch's name."""

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
            "an epilogue does the same to every value: it cannot branch on one (if, and, or, a comparison); "
            "use overlap_gemm.epilogues.maximum or minimum"
        )

    def exp(self) -> Value:
        """Returns e to the value."""
        return self.unary("exp")

    def sqrt(self) -> Value:
        """Returns the square root."""
        return self.unary("sqrt")

    def rsqrt(self) -> Value:
        """Returns 1 divided by the square root."""
        return self.unary("rsqrt")

    def reciprocal(self) -> Value:
        """Returns 1 divided by the value."""
        return self.unary("reciprocal")

    def sigmoid(self) -> Value:
        """Returns 1 / (1 + exp(-x))."""
        return self.unary("sigmoid")

    def tanh(self) -> Value:
        """Returns the hyperbolic tangent."""
        return self.unary("tanh")

    def erf(self) -> Value:
        """Returns the error function."""
        return self.unary("erf")

    def clamp(self, min: Any = None, max: Any = None) -> Value:
        """Returns the value, at least ``min`` and at most ``max``; NaN remains NaN."""
        value = self
        if min is not None:
            value = value.binary("maximum", value, min)
        return value if max is None else value.binary("minimum", value, max)


def exp(x: Any) -> Any:
    """Returns e to the x."""
    return x.exp()


def sqrt(x: Any) -> Any:
    """Returns the square root of x."""
    return x.sqrt()


def rsqrt(x: Any) -> Any:
    """Returns 1 divided by the square root of x."""
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
    """Returns the larger of a value and a value or number; NaN where one is."""
    return x.clamp(min=y)


def minimum(x: Any, y: Any) -> Any:
    """Returns the smaller of a value and a value or number; NaN where one is."""
    return x.clamp(max=y)


def relu(x: Any) -> Any:
    """Returns x where it is positive, else 0."""
    return maximum(x, 0.0)


def silu(x: Any) -> Any:
    """Returns x * sigmoid(x)."""
    return x * x.sigmoid()


def gelu(x: Any) -> Any:
    """Returns x times the normal distribution's probability of less than x."""
    return 0.5 * x * (1.0 + (x * SQRT_HALF).erf())


def gelu_tanh(x: Any) -> Any:
    """Returns GELU approximated by tanh, 0.5 * x * (1 + tanh(u)), which is x * sigmoid(2 * u)."""
    return x * ((2 * SQRT_2_OVER_PI) * (x + GELU_CUBE * (x * x * x))).sigmoid()
