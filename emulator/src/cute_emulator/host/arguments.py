"""Conversion of a kernel's arguments, arrays and scalars, to the bytes of its parameters."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cute_emulator.host.memory import named
from cute_emulator.machine.memory import Named
from cute_emulator.ptx.ir import Function, Variable
from cute_emulator.translate.program import program

Arguments = Sequence[Any] | Mapping[str, Any]
"""One argument for each parameter, in order; the keys of a mapping are names for messages."""

_FLOATS = {"f32": "<f", "b32": "<f", "f64": "<d", "b64": "<d"}
"""Types of parameters that hold a Python float."""


def entry_of(ptx: str, entry: str) -> Function:
    """Returns the kernel of this name.

    Raises:
        ValueError: The module has no such kernel; the message lists its kernels.
    """
    entries = entries_of(ptx)
    if entry not in entries:
        raise ValueError(
            f"no kernel {entry!r} in this PTX module; its kernels: {', '.join(entries) or 'none'}"
        )
    return program(ptx, entry).entry


def entries_of(ptx: str) -> list[str]:
    """Lists the names of a module's kernels."""
    return re.findall(r"\.entry\s+([\w$]+)", ptx)


def with_names(args: Arguments) -> list[tuple[str, Any]]:
    """Returns name and value of each argument; memory is returned as `Named`, for findings."""
    pairs = args.items() if isinstance(args, Mapping) else ((f"argument {n}", a) for n, a in enumerate(args))
    return [(name, named(a, name) if is_memory(a) else a) for name, a in pairs]


def is_memory(value: Any) -> bool:
    """Returns whether an argument is passed by its address."""
    return isinstance(value, np.ndarray | torch.Tensor | Named)


def parameters(entry: Function, args: Sequence[tuple[str, Any]]) -> tuple[bytes, ...]:
    """Returns the bytes of each parameter.

    Args:
        entry: Kernel.
        args: Name and value of each argument: memory (its address), None (a null pointer), bytes (copied, for
            structures and tensor maps), numbers.

    Raises:
        ValueError: The numbers of arguments and parameters differ, or a value does not fit.
        TypeError: A value has another type than the parameter.
    """
    if len(args) != len(entry.params):
        raise ValueError(
            f"{entry.name} takes {len(entry.params)} arguments ({_types(entry)}), got {len(args)}"
        )
    return tuple(_bytes_of(name, a, p) for (name, a), p in zip(args, entry.params, strict=True))


def _types(entry: Function) -> str:
    return ", ".join(_type(p) for p in entry.params)


def _type(parameter: Variable) -> str:
    return f".{parameter.type}" if parameter.type[0] != "b" else f"{parameter.nbytes} bytes"


def _bytes_of(name: str, value: Any, parameter: Variable) -> bytes:
    kind, size = parameter.type, parameter.nbytes
    wanted = f"{name}: parameter {parameter.name} is {_type(parameter)}"
    if isinstance(value, Named):
        value = value.address
        if size != 8:
            raise TypeError(f"{wanted}, not a pointer")
    if isinstance(value, np.generic) and (kind[0] == "f" or value.dtype.kind in "iub"):
        value = value.item()
    elif isinstance(value, np.generic):
        value = value.tobytes()
    if isinstance(value, bytes):
        if len(value) != size:
            raise ValueError(f"{wanted}, got {len(value)} bytes")
        return value
    if isinstance(value, float) or (kind[0] == "f" and isinstance(value, int)):
        if kind not in _FLOATS:
            raise TypeError(f"{wanted}, got {value!r}: pass an integer, or a NumPy scalar of its size")
        return struct.pack(_FLOATS[kind], value)
    if not isinstance(value, int | None):
        raise TypeError(f"{wanted}, got {type(value).__name__}: pass an array, a tensor, a number or bytes")
    number, bits = int(value or 0), 8 * size
    if not -(1 << bits - 1) <= number < 1 << bits:
        raise ValueError(f"{wanted}, got {number}: it has no more than {bits} bits")
    return (number & (1 << bits) - 1).to_bytes(size, "little")
