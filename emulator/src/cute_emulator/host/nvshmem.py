"""NVSHMEM for emulated ranks: the device state that its linked code reads, and the bitcode to link.

NVSHMEM's device library is bitcode that the DSL links into a kernel. Its code for P2P-accessible peers runs
as any other PTX. It needs only `nvshmemi_device_state_d`, a constant that `nvshmemx_culibrary_init` fills on
a GPU. The offsets were determined by reading the inlined PTX of nvidia-nvshmem-cu13 3.8.0 and running it.
"""

from __future__ import annotations

import contextlib
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cute_emulator.errors import EmulatorError

DEVICE_STATE = "nvshmemi_device_state_d"
DEVICE_STATE_BYTES = 848
_GPU_LDST_ATOMICS, _GPU_PROXY = 1, 8  # nvshmemi_job_connectivity_t
_BITCODE = re.compile(r"libnvshmem_device_sm_(\d+)\.bc")


def device_state(
    rank: int, ranks: int, heap_base: int, heap_bytes: int, peer_table: int, reachable: bool
) -> bytes:
    """Returns the device state of one rank.

    Args:
        rank: Number of this rank.
        ranks: Number of ranks.
        heap_base: Base address of this rank's symmetric heap.
        heap_bytes: Size of the heap.
        peer_table: Address of `u64[ranks + 1]`: base address of each rank's heap in this rank's address
            space, 0 for peers that are not P2P-accessible. The last element is zero: no region of batched
            transfers is open.
        reachable: Whether all peers are P2P-accessible.
    """
    state = bytearray(DEVICE_STATE_BYTES)
    struct.pack_into(
        "<5i", state, 0, 1, rank, ranks, rank, ranks
    )  # version, my PE, PEs, the same on this node
    struct.pack_into("<i", state, 32, _GPU_LDST_ATOMICS if reachable else _GPU_PROXY)
    struct.pack_into("<QQQ", state, 40, heap_base, heap_bytes, peer_table)
    struct.pack_into("<Q", state, 832, peer_table + 8 * ranks)
    return bytes(state)


def bitcode_for(arch: str, folder: Path) -> Path:
    """Returns the newest device library in `folder` that is not newer than `arch` (such as ``"sm_100a"``).

    Raises:
        EmulatorError: The folder has no such library.
    """
    target = int(re.sub(r"\D", "", arch))
    libraries = {int(m.group(1)): p for p in folder.iterdir() if (m := _BITCODE.fullmatch(p.name))}
    compatible = [number for number in libraries if number <= target]
    if not compatible:
        raise EmulatorError(f"no NVSHMEM device library for {arch} in {folder}; it has {sorted(libraries)}")
    return libraries[max(compatible)]


@contextlib.contextmanager
def linked_for(arch: str) -> Iterator[None]:
    """Makes nvshmem4py's CuTe bindings, if imported, link the bitcode of a target instead of the device's."""
    bindings: Any = sys.modules.get("nvshmem.bindings.device.cute._bitcode")
    if bindings is None:
        yield
        return
    from cuda.pathfinder import find_nvidia_header_directory

    before = bindings._device_bitcode_path

    def path() -> str:
        headers = find_nvidia_header_directory("nvshmem")
        if headers is None:
            raise EmulatorError("NVSHMEM's device library is not installed (nvidia-nvshmem-cu13)")
        return str(bitcode_for(arch, Path(headers).parent / "lib"))

    bindings._device_bitcode_path = path
    try:
        yield
    finally:
        bindings._device_bitcode_path = before
