"""Storage of a kernel's PTX in the binary that it is compiled to.

A compile leaves a device binary (a fat binary that contains SASS only) as a constant of the host module.
While an emulator is open the PTX text is appended to that constant. The CUDA runtime reads no further than
the length in the fat binary's header, so the module still runs on a GPU; the emulator reads the text after
it. So PTX and binary always correspond, whatever the kernels' names. They survive the DSL's caches and its
export to object files.

The emulator runs the PTX only, so ptxas compiles it without optimisation: the binary of a kernel with
NVSHMEM's device code takes a third of the time. The PTX is the same. Options of the caller for ptxas, and a
dump of the binary, are respected.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from cute_emulator.errors import EmulatorError
from cute_emulator.host.dsl import shared_compiles
from cute_emulator.host.dsl.shared_names import comments_of

_FATBIN = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes that follow it
_FATBIN_MAGIC = 0xBA55ED50
_TRAILER = struct.Struct("<32sQ")  # mark, bytes of PTX that follow
_MARK = b"cute_emulator.ptx".ljust(32, b"\0")
_DUMP_OPTION = re.compile(r"\bdump-ptx-path='([^']*)'")
_PIPELINE = "cute-to-nvvm{"
_OF_BINARY = re.compile(r"\b(ptx-options|dump-cubin-path)=")
_UNOPTIMIZED = "ptx-options='-O0'"


def keep_ptx(compile_module: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the DSL's ``Compiler.compile(module, pipeline, ...)``: the compiled module contains its PTX.

    The PTX is dumped into a folder of this one compile. The DSL's dump files have truncated names, which two
    concurrent compiles would overwrite.
    """

    @wraps(compile_module)
    def compile_and_keep(compiler: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
        wanted = _DUMP_OPTION.search(pipeline)
        path = wanted[1] if wanted else ""
        pipeline = _DUMP_OPTION.sub("", pipeline)
        if not _OF_BINARY.search(pipeline):
            pipeline = pipeline.replace(_PIPELINE, f"{_PIPELINE}{_UNOPTIMIZED} ")
        text = module.operation.get_asm(enable_debug_info=True)
        key = shared_compiles.key_of(text, pipeline, args, sorted(kwargs.items()))
        known = None if getattr(compiler, "_post_compile_hook", None) else shared_compiles.load(key)
        if known is not None:
            shared_compiles.replace(module, known)
            _dump(known.texts, path)
            return module
        with tempfile.TemporaryDirectory(prefix="overlap_gemm_ptx_") as folder:
            option = f"dump-ptx-path='{Path(folder) / 'module'}'"
            pipeline = pipeline.replace(_PIPELINE, f"{_PIPELINE}{option} ")
            names = comments_of(text)
            # 4.6 compiles the module in place and returns nothing.
            compiled = compile_module(compiler, module, pipeline, *args, **kwargs) or module
            files = sorted(Path(folder).glob("module*.ptx"))
            texts = {file.name.removeprefix("module"): file.read_text() for file in files}
        _dump(texts, path)
        _append(compiled, [text + names for text in texts.values()])
        shared_compiles.store(key, compiled, texts)
        return compiled

    return compile_and_keep


def _dump(texts: Mapping[str, str], path: str) -> None:
    """Writes PTX texts to the path of the pipeline's dump option, by the suffixes of their files' names."""
    for suffix, text in texts.items() if path else ():
        Path(path + suffix).write_text(text)


def _append(module: Any, texts: list[str]) -> None:
    from cutlass._mlir import ir

    constants = list(_binary_constants(module))
    if len(constants) != len(texts):
        raise EmulatorError(
            f"the compile made {len(constants)} device binaries and {len(texts)} PTX texts; "
            "the emulator needs one text for each binary"
        )
    if len(constants) > 1:
        raise EmulatorError(f"the emulator runs one device module per compile, got {len(constants)}")
    with module.context, ir.Location.unknown():
        for constant, text in zip(constants, texts, strict=True):
            ptx = text.encode()
            content = constant.attributes["value"].value_bytes + _TRAILER.pack(_MARK, len(ptx)) + ptx
            constant.attributes["value"] = ir.StringAttr.get(content)
            kind = ir.Type.parse(f"!llvm.array<{len(content)} x i8>")
            constant.attributes["global_type"] = ir.TypeAttr.get(kind)


def _binary_constants(module: Any) -> Iterator[Any]:
    for operation in module.body.operations:
        if operation.operation.name != "llvm.mlir.global" or "value" not in operation.attributes:
            continue
        value = operation.attributes["value"]
        content = getattr(value, "value_bytes", b"")
        if len(content) >= _FATBIN.size and _FATBIN.unpack_from(content)[0] == _FATBIN_MAGIC:
            yield operation


def ptx_of(address: int) -> str:
    """Returns the PTX after the device binary at an address of this process.

    Raises:
        EmulatorError: There is none: the function was compiled while no emulator was open.
    """
    memory = os.open(
        "/proc/self/mem", os.O_RDONLY
    )  # reads past a constant's end fail instead of ending the process
    try:
        magic, _, header, body = _FATBIN.unpack(_read(memory, _FATBIN.size, address))
        if magic == _FATBIN_MAGIC:
            trailer = address + header + body
            mark, length = _TRAILER.unpack(_read(memory, _TRAILER.size, trailer))
            if mark == _MARK:
                return _read(memory, length, trailer + _TRAILER.size).decode()
    finally:
        os.close(memory)
    raise EmulatorError(
        "this function's binary carries no PTX: it was compiled (or exported) while no emulator was open. "
        "Call cute.compile inside `with Emulator(...)`"
    )


def _read(memory: int, size: int, address: int) -> bytes:
    try:
        content = os.pread(memory, size, address)
    except OSError:
        content = b""
    return content.ljust(size, b"\0")
