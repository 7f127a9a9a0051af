"""A kernel in a file of PTX or CUDA C++, and its launch in a file of JSON."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (registers names such as bfloat16 with NumPy)
import numpy as np

from cute_emulator.host.arguments import entries_of, with_names
from cute_emulator.host.emulator import Emulator
from cute_emulator.host.kernels import launch_once
from cute_emulator.host.nvrtc import compile_cuda

SUFFIXES = (".ptx", ".cu")
LAUNCH = ("entry", "grid", "block", "args", "cluster", "shared")
ARRAY = ("file", "shape", "dtype", "fill", "save")


def run_file(emulator: Emulator, kernel: str, launch: str) -> None:
    """Runs a kernel from a file in an open emulator.

    The launch is an object of `grid`, `block`, `args`, `cluster`, `shared` (as in `kernels.run`) and `entry`,
    which a module of one kernel does not need. An argument is a number, null, or an object: an array from a
    `file` (.npy), or one of a `shape`, with `dtype` (float32) and `fill`: a number, "arange" or "random"; its
    bytes are 0xFF without. `save` names the file that an array is written to in the end.

    Args:
        emulator: Open.
        kernel: Path of its text, one of `SUFFIXES`.
        launch: Path of the launch. Files that it names are relative to its folder.

    Raises:
        ValueError: The launch is not as described, or cannot run.
    """
    text, path = Path(kernel).read_text(), Path(launch)
    ptx = compile_cuda(text, emulator.machine.arch, kernel) if kernel.endswith(".cu") else text
    wanted = json.loads(path.read_text())
    _check_keys(launch, wanted, LAUNCH)
    if missing := {"grid", "block"} - set(wanted):
        raise ValueError(f"{launch}: no {', no '.join(sorted(missing))}")
    entries = entries_of(ptx)
    entry = wanted.get("entry", entries[0] if len(entries) == 1 else "")
    described = dict(with_names(wanted.get("args", [])))
    args = {name: _argument(f"{path.name}: {name}", a, path.parent) for name, a in described.items()}
    launch_once(
        emulator, ptx, entry, wanted["grid"], wanted["block"], args, wanted.get("cluster"),
        wanted.get("shared", 0),
    )  # fmt: skip
    for name, a in described.items():
        if isinstance(a, dict) and "save" in a:
            np.save(path.parent / a["save"], args[name])


def _check_keys(where: str, value: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(value, dict) or set(value) - set(keys):
        raise ValueError(f"{where}: must be an object with keys among {', '.join(keys)}, got {value!r:.200}")


def _argument(where: str, described: Any, folder: Path) -> Any:
    if described is None or isinstance(described, int | float):
        return described
    _check_keys(where, described, ARRAY)
    if ("file" in described) == ("shape" in described):
        raise ValueError(f"{where}: an array has either file or shape, got {described}")
    dtype = np.dtype(described.get("dtype", "float32"))
    if "file" in described:
        array = np.load(folder / described["file"])
        return array.view(dtype) if "dtype" in described else array  # .npy has no bfloat16
    array = np.empty(described["shape"], dtype)
    match described.get("fill", None):
        case None:
            array.reshape(-1).view(np.uint8)[:] = 0xFF
        case "arange":
            array.reshape(-1)[:] = np.arange(array.size)
        case "random":
            random = np.random.default_rng(zlib.crc32(where.encode()))
            array[...] = (
                random.integers(0, 100, array.shape)
                if dtype.kind in "iub"
                else random.standard_normal(array.shape)
            )
        case int() | float() as number:
            array[...] = number
        case other:
            raise ValueError(f'{where}: fill must be a number, "arange" or "random", got {other!r}')
    return array
