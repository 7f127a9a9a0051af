"""One compile for all runs of a script: the result of a compile is stored for equal modules.

A script that runs once for each setting traces its kernels again each time, and the modules are equal to the
last byte. The key is the module's text with its source lines, the pipeline and the other arguments of the
compile. The folder is one of this process and of those that it forks.
"""

from __future__ import annotations

import hashlib
import json
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
    return Path(_room().name)


def key_of(module: Any, *arguments: Any) -> str:
    """Returns the name of a compile's result, before the compile changes the module."""
    text = module.operation.get_asm(enable_debug_info=True)
    return hashlib.sha256("\n".join([text, *map(repr, arguments)]).encode()).hexdigest()


def load(key: str) -> Compiled | None:
    """Returns the result of an equal compile, if there was one."""
    try:
        header, _, bytecode = (folder() / key).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    return Compiled(bytecode, json.loads(header))


def store(key: str, module: Any, texts: Mapping[str, str]) -> None:
    """Keeps the result of a compile; processes side by side may store the same."""
    with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as file:
        file.write(json.dumps(dict(texts)).encode() + b"\n")
        module.operation.write_bytecode(file)
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
