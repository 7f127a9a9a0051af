"""`run`: executes a kernel of any PTX text with NumPy arrays, torch tensors and numbers as arguments."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cute_emulator.errors import Report
from cute_emulator.execution.launch import Dim3
from cute_emulator.host.arguments import Arguments, is_memory, with_names
from cute_emulator.host.device import ALIGNMENT
from cute_emulator.host.emulator import Emulator
from cute_emulator.host.memory import extent
from cute_emulator.machine.memory import Named

Extents = int | Iterable[int]
"""Extents along x, or along x, y and z; missing ones are 1."""


def run(
    ptx: str,
    entry: str,
    grid: Extents,
    block: Extents,
    args: Arguments = (),
    *,
    cluster: Extents | None = None,
    shared: int = 0,
    arch: str | None = None,
    **options: Any,
) -> Report:
    """Runs a kernel of any PTX text once: CUDA C++, Triton, or written by hand.

    Arrays are copied to device memory and back, as in a CUDA program. If an `Emulator` of one rank is open,
    the kernel runs in it, unless `arch` or options are passed. ``python -m cute_emulator check script.py``
    opens one. Otherwise it runs in a new emulator, which returns findings and does not raise them.

    Args:
        ptx: PTX text of the module.
        entry: Name of the kernel in it.
        grid: Number of CTAs, along x or along x, y, z.
        block: Threads of a CTA.
        args: For each parameter a NumPy array or torch CPU tensor (a pointer), a number, None (a null
            pointer), or bytes (structures). The keys of a mapping are names for findings.
        cluster: CTAs of a cluster; the default is that of the kernel's directives.
        shared: Bytes of dynamic shared memory.
        arch: Device; the default is the target of the PTX.
        options: Options of `Emulator`: mode, seed, checks, limit and others. `Setting.options()` returns them
            for an element of `settings.settings()`.

    Returns:
        Record of all runs of the emulator; `findings` is empty for a kernel without findings.

    Raises:
        EmulatorError: A fault, a deadlock, a trap, or an instruction that is not modelled ended the kernel.
        FindingsError: There are findings, in an emulator that was open without `collect`.
        ValueError: The launch cannot run, an argument does not fit its parameter, or an array is not writable
            or has negative strides (`host.memory.named`).
    """
    emulator = Emulator.current()
    if emulator is None or emulator.ranks > 1 or arch is not None or options:
        emulator = Emulator(arch or device_of(ptx), collect=True, **options)
    launch_once(emulator, ptx, entry, grid, block, args, cluster, shared)
    return emulator.report


def launch_once(
    emulator: Emulator, ptx: str, entry: str, grid: Extents, block: Extents, args: Arguments,
    cluster: Extents | None, shared: int,
) -> None:  # fmt: skip
    """Executes `run` in an emulator."""
    with _on_device(args) as placed:
        clusters = None if cluster is None else _three(cluster)
        emulator.launch(ptx, entry, _three(grid), _three(block), placed, cluster=clusters, shared=shared)
        emulator.finish()


def device_of(ptx: str) -> str:
    """Returns the architecture to run a module on: that of its target, or the oldest that is emulated."""
    target = re.search(r"^\s*\.target\s+sm_(\d+)", ptx, re.M)
    number = int(target[1]) if target else 0
    return (
        "sm_120a"
        if number >= 120
        else "sm_103a"
        if number == 103
        else "sm_100a"
        if number >= 100
        else "sm_90a"
    )


def _three(extents: Extents) -> Dim3:
    some = (extents,) if isinstance(extents, int) else tuple(extents)
    if not 1 <= len(some) <= 3:
        raise ValueError(f"{some} must be extents along x, or along x and y, or along x, y and z")
    x, y, z = (*some, 1, 1)[:3]
    return int(x), int(y), int(z)


@contextlib.contextmanager
def _on_device(args: Arguments) -> Iterator[dict[str, Any]]:
    """Copies the arguments to device memory, with the alignment of `cudaMalloc`, and back at the end.

    Arrays that share memory share their copy, at the same distances from its start.
    """
    values = args.values() if isinstance(args, Mapping) else args
    places = {id(a): _owner(a) for a in values if is_memory(a)}
    merged: list[tuple[int, int]] = []
    for begin, end in sorted({place for place in places.values() if place[0] < place[1]}):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    buffers = {place: _device_buffer(place) for place in merged}

    def moved(value: Any) -> Any:
        if isinstance(value, Named):
            for (begin, end), buffer in buffers.items():
                if begin <= value.address < end:
                    return replace(value, address=buffer.ctypes.data + value.address - begin)
        return value

    try:
        yield {name: moved(value) for name, value in with_names(args)}
    finally:
        for (begin, end), buffer in buffers.items():
            ctypes.memmove(begin, buffer.ctypes.data, end - begin)


def _owner(array: Any) -> tuple[int, int]:
    """Returns beginning and end of the memory of which an array is a view."""
    if isinstance(array, torch.Tensor):
        storage = array.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    while isinstance(array.base, np.ndarray):
        array = array.base
    begin, nbytes = extent(array)
    return begin, begin + nbytes


def _device_buffer(place: tuple[int, int]) -> np.ndarray:
    begin, end = place
    raw = np.empty(end - begin + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    buffer = raw[start : start + end - begin]
    ctypes.memmove(buffer.ctypes.data, begin, end - begin)
    return buffer
