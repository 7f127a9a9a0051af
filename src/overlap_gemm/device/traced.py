"""Type aliases of the values that kernels are traced with.

To a type checker all of them are ``Any``: the DSL's integers take part in Python's arithmetic. The same code
runs with plain integers on the host, so no class describes both. The aliases are for readers.
"""

from typing import Any, TypeAlias

Scalar: TypeAlias = Any
"""A run-time integer, ``Int32`` or ``Int64``; Python's if it is known when the kernel is traced."""

Address: TypeAlias = Any
"""``Int64``: bytes, from zero or from the base of every rank's workspace."""

Predicate: TypeAlias = Any
"""A run-time truth value: ``Boolean``, or ``Int32`` 0 or 1."""

Fragment: TypeAlias = Any
"""A tensor in a thread's registers."""

Stages: TypeAlias = Any
"""Shared memory of a pipeline or of the ring, the stage its last mode."""

Extras: TypeAlias = Any
"""Operands of an epilogue's visitors: a tuple of tensors, or None."""
