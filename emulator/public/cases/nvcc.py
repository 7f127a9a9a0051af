"""PTX of CUDA C++ kernels of other packages, by the wheels nvidia-cuda-nvcc and nvidia-nvvm."""

import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from cute_emulator import run


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in spec.submodule_search_locations] if spec else []


def instantiated(
    includes: list[str], function: str, parameters: str, folders: list[Path], before: str = ""
) -> str:
    """Returns PTX of one instance of a kernel template, for the open emulator's device.

    Args:
        includes: Headers to include.
        function: Kernel with its template arguments.
        parameters: Types of its parameters.
        folders: Folders of headers, in addition to those of CUDA and CCCL.
        before: Declarations before the instance.
    """
    lines = [f'#include "{name}"' for name in includes]
    lines += [before, f"template __global__ void {function}({parameters});"]
    return compiled("\n".join(lines) + "\n", folders)


def compiled(source: str, folders: list[Path]) -> str:
    """Returns PTX of CUDA C++ for the open emulator's device."""
    return _compiled(source, tuple(folders), torch.cuda.get_device_capability())


@functools.cache
def _compiled(source: str, folders: tuple[Path, ...], capability: tuple[int, int]) -> str:
    major, minor = capability
    cuda = [folder / "cu13" for folder in _folders("nvidia") if (folder / "cu13").exists()]
    (nvcc,) = (folder / "bin" / "nvcc" for folder in cuda if (folder / "bin" / "nvcc").exists())
    headers = [*folders, *(folder / "include" / last for folder in cuda for last in ("", "cccl"))]
    with tempfile.TemporaryDirectory() as name:
        file, ptx = Path(name) / "kernel.cu", Path(name) / "kernel.ptx"
        file.write_text(source)
        for absent in ("cublasLt.h", "cublas_v2.h"):  # included, and not used by kernels
            (Path(name) / absent).touch()
        words = [
            nvcc,
            "-ptx",
            "-lineinfo",
            "-std=c++20",
            "--expt-relaxed-constexpr",
            f"-arch=sm_{major}{minor}a",
            "-w",
            "-I",
            name,
        ]
        words += [f"-DSGL_CUDA_ARCH={major}{minor}0", *(f"-I{folder}" for folder in headers), file, "-o", ptx]
        tools = [str(nvcc.parent), str(nvcc.parents[1] / "nvvm" / "bin"), os.environ["PATH"]]
        environment = {**os.environ, "PATH": os.pathsep.join(tools)}
        subprocess.run([*map(str, words)], check=True, env=environment, timeout=300)
        return ptx.read_text()


def call(ptx: str, grid: Any, block: Any, args: Any, shared: int = 0, named: str = "") -> None:
    """Runs the only kernel of a module whose name has a part."""
    (name,) = (name for name in re.findall(r"\.entry (\w+)", ptx) if named in name)
    run(ptx, name, grid, block, args, shared=shared)
