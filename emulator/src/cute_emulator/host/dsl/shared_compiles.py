"""One compile for all runs of a script: the result of a compile is stored for equal modules.

A script that runs once for each setting traces its kernels again each time, and the modules are equal to the
last byte. The key has the module's text with its source lines, the pipeline, and the other arguments of the
compile. It also has the versions of DSL and Python, and Python's prefix. The folder belongs to this process
and to those that it forks. If ``CUTE_EMULATOR_COMPILES`` names a folder, all processes with this variable
share it.

A result that does not have the recorded digest is compiled again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Compiled(NamedTuple):
    """Result of a compile.

    Attributes:
        bytecode: Compiled module, in MLIR's bytecode.
        texts: PTX of its device binaries, by the ends of the names of the files that the DSL writes.
    """

    bytecode: bytes
    texts: dict[str, str]


@cache
def _room() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="overlap_gemm_compiles_")


def folder() -> Path:
    """Returns the folder of the compiles; a process that forks calls this before."""
    return Path(os.environ.get("CUTE_EMULATOR_COMPILES") or _room().name)


@cache
def _versions() -> str:
    return f"{importlib.metadata.version('nvidia-cutlass-dsl')} {sys.version} {sys.prefix}"


def key_of(text: str, *arguments: Any) -> str:
    """Returns the name of a compile's result.

    Args:
        text: Text of the module before the compile, with debug information.
        arguments: Other arguments of the compile.
    """
    return hashlib.sha256("\n".join([text, _versions(), *map(repr, arguments)]).encode()).hexdigest()


def load(key: str) -> Compiled | None:
    """Returns the result of an equal compile; None if there is none, or it is damaged."""
    try:
        digest, _, content = (folder() / key).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if digest.decode(errors="replace") != hashlib.sha256(content).hexdigest():
        return None
    header, _, bytecode = content.partition(b"\n")
    return Compiled(bytecode, json.loads(header))


def store(key: str, module: Any, texts: Mapping[str, str]) -> None:
    """Stores the result of a compile; concurrent processes may store the same."""
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    content = json.dumps(dict(texts)).encode() + b"\n" + bytecode.getvalue()
    with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as file:
        file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    Path(file.name).replace(folder() / key)


def replace(module: Any, compiled: Compiled) -> None:
    """Puts the result of an equal compile in a module's place."""
    from cutlass._mlir import ir

    with module.context, ir.Location.unknown():
        other = ir.Module.parse(compiled.bytecode)
        for operation in list(module.body.operations):
            operation.operation.erase()
        for operation in list(other.body.operations):
            module.body.append(operation)
        for name in other.operation.attributes:
            module.operation.attributes[name] = other.operation.attributes[name]
