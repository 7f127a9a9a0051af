"""Type aliases for values in traced code, as documentation for readers.

All are ``Any`` to a type checker: the DSL's integers mix with Python's, and the same code also runs on the
host with plain integers. So no class describes both.
"""

from typing import Any, TypeAlias

Scalar: TypeAlias = Any
"""Run-time integer, ``Int32`` or ``Int64``; Python's ``int`` if it is known when the kernel is traced."""

Address: TypeAlias = Any
"""``Int64``: an address, or a byte offset from the base of every rank's workspace."""


def wide(index: Scalar) -> Any:
    """Returns an index as ``Int64``, whose product with bytes does not overflow; an ``int`` unchanged."""
    if isinstance(index, int):
        return index
    from cutlass import Int64

    return Int64(index)


Predicate: TypeAlias = Any
"""Run-time truth value: ``Boolean``, or ``Int32`` 0 or 1."""

Fragment: TypeAlias = Any
"""Tensor in a thread's registers."""

Stages: TypeAlias = Any
"""Shared memory of a pipeline or of the ring; the last mode is the stage."""

Extras: TypeAlias = Any
"""Operands of an epilogue's visitors: a tuple of tensors, or None."""
