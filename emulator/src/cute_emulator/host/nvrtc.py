"""Compilation of CUDA C++ to PTX by NVRTC; needs the wheel nvidia-cuda-nvrtc, but no GPU and no toolkit."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

HEADERS = ("cudart", "cccl")
"""Libraries whose installed headers are used: nvidia-cuda-runtime, nvidia-cuda-cccl."""


def compile_cuda(
    source: str, arch: str = "sm_90a", name: str = "kernel.cu", options: Sequence[str] = ()
) -> str:
    """Compiles CUDA C++ with line information.

    Args:
        source: Source of the kernels; ``extern "C"`` keeps their names.
        arch: Architecture, such as "sm_90a" or "sm_100a".
        name: File name in findings; if the file exists, findings show its lines.
        options: Further options of NVRTC.

    Returns:
        PTX text for `cute_emulator.run`.

    Raises:
        ValueError: NVRTC reports an error; the message contains NVRTC's log.
        ImportError: NVRTC is not installed.
    """
    from cuda.bindings import nvrtc

    known = ["--gpu-architecture=" + arch.replace("sm_", "compute_"), "-lineinfo"]
    words = [word.encode() for word in (*known, *_headers(), *options)]
    try:
        program = _result(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    except RuntimeError as why:
        raise ImportError(f"NVRTC is needed: pip install nvidia-cuda-nvrtc ({why})") from why
    (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ValueError(f"{name} does not compile for {arch}:\n{log}")
    ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx


def _headers() -> list[str]:
    if importlib.util.find_spec("cuda.pathfinder") is None:
        return []
    from cuda.pathfinder import find_nvidia_header_directory

    folders = (find_nvidia_header_directory(library) for library in HEADERS)
    return [f"-I{folder}" for folder in folders if folder]


def _result(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status):
        raise RuntimeError(str(status))
    return values[0]


def _text(size: Any, read: Any, program: Any) -> str:
    buffer = b" " * _result(size(program))
    read(program, buffer)
    return buffer.rstrip(b"\0 ").decode()
