"""Symmetric memory: a block of the same size on every rank of a group, accessible by its peers.

| provider | memory | ranks |
|---|---|---|
| `TorchSymmetric` (default) | ``torch.distributed._symmetric_memory`` | a process group in an NVLink domain |
| `NvshmemSymmetric` | nvshmem4py | all ranks of the job, with or without P2P access |
| `VirtualSymmetric` | one device, or the emulator | all in this process (`virtual_ranks.py`) |

Allocation and `close` are collective and explicit. The garbage collector frees nothing: a collective free
that one rank's collector starts alone would hang. Before any rank continues, all ranks have agreed that every
allocation succeeded (`agree.together`). So one rank's failure is an error on every rank instead of a hang.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..agree import DisagreementError, together
from ..group import Group

PUTS_SINCE = (3, 7, 2)
"""Oldest NVSHMEM version whose puts CuTe DSL can link.

Its compiler refuses a section marker in the device code of 3.4.5, which torch 2.10 to 2.14 install.
"""


class SymmetricMemoryError(DisagreementError):
    """A rank of the group could not allocate or map its block.

    Raised on every rank; names the failed ranks.
    """


class SymmetricMemory(Protocol):
    """A block of ``nbytes`` bytes on every rank.

    Attributes:
        local: This rank's block, uint8 ``[nbytes]``.
        bases: Int64 ``[P]`` on the block's device: address of each rank's block for this rank's kernels. If
            it is not P2P-accessible, ``-1 - pe``, where the NVSHMEM PE ``pe`` is the world rank.
        by_put: `bases` with every peer treated as not P2P-accessible; None if the memory is not NVSHMEM's.
    """

    local: Tensor
    bases: Tensor
    by_put: Tensor | None

    def close(self) -> None:
        """Frees the block. Collective; no kernel of any rank may still use it."""


NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@contextmanager
def without_multicast() -> Iterator[None]:
    """Disables torch's multicast objects for blocks mapped here, unless the user has set the variable.

    Nothing here uses multicast. Its objects are a resource of the host, and creating one can make GPUs of the
    host unusable.
    """
    if NO_MULTICAST in os.environ:
        yield
        return
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        del os.environ[NO_MULTICAST]


class TorchSymmetric:
    """A block of torch's symmetric memory, CUDA backend.

    Args:
        group: Group whose ranks share one NVLink (peer access) domain.
        nbytes: Size of each rank's block.
        device: This rank's CUDA device.

    Raises:
        SymmetricMemoryError: On every rank, if one of them could not allocate or map.
    """

    name = "torch"
    by_put = None

    def __init__(self, group: Group, nbytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        assert group.process_group is not None, "a group of one needs no symmetric memory"
        self._group = group

        def allocate() -> Tensor:
            return symm_mem.empty(nbytes, dtype=torch.uint8, device=device)

        def rendezvous() -> None:
            with without_multicast():
                handle = symm_mem.rendezvous(self.local, group.process_group)
            self._handle = handle
            offset = self.local.data_ptr() - int(handle.buffer_ptrs[group.rank])
            bases = [int(base) + offset for base in handle.buffer_ptrs]
            self.bases = torch.tensor(bases, dtype=torch.int64, device=device)

        self.local = together(group, f"allocating {nbytes} bytes", allocate, SymmetricMemoryError)
        # rendezvous communicates (with torch's own timeout), so it begins only after all ranks have their
        # block. After it every peer's mapping exists, and every rank may store to its peers.
        together(group, f"mapping the peers' {nbytes} bytes", rendezvous, SymmetricMemoryError)

    @staticmethod
    def has_p2p(group: Group, device: torch.device) -> bool:
        """Returns True: if a peer cannot be mapped, the constructor raises."""
        return True

    @staticmethod
    def why_not(group: Group) -> str | None:
        """Returns None: it supports every group."""
        return None

    def close(self) -> None:
        """Frees the block after all ranks' work on it has ended."""
        torch.cuda.synchronize(self.local.device)
        dist.barrier(self._group.process_group)
        del self._handle, self.local, self.bases


class NvshmemSymmetric:
    """A block of NVSHMEM's symmetric heap.

    NVSHMEM is one world per process: allocation and `close` are collective over all ranks of the job, in the
    same order and with the same sizes. So it supports only the group of all ranks (`why_not`): the other
    ranks do not know when a subgroup allocates, and stages of a pipeline need different sizes. PEs are world
    ranks (`Group.global_rank`).

    Args:
        group: Group that will use the block.
        nbytes: Size of each rank's block.
        device: This rank's CUDA device, on which NVSHMEM must be initialised (`init_nvshmem`).
    """

    name = "nvshmem"

    def __init__(self, group: Group, nbytes: int, device: torch.device) -> None:
        def install() -> None:
            import nvshmem.bindings
            import nvshmem.core  # noqa: F401

        together(group, "loading NVSHMEM", install, SymmetricMemoryError)
        import nvshmem.core as nvshmem
        from nvshmem import bindings

        init_nvshmem(device)
        self._device = device
        # NVSHMEM's allocation is collective and fails on all PEs together.
        self.local = nvshmem.tensor((nbytes,), dtype=torch.uint8)
        # bindings.ptr, not get_peer_tensor, which leaks for this PE and cannot express "not accessible".
        address = self.local.data_ptr()
        pes = [group.global_rank(rank) for rank in range(group.size)]
        reached = [bindings.ptr(address, pe) or -1 - pe for pe in pes]
        put_to = [address if rank == group.rank else -1 - pe for rank, pe in enumerate(pes)]
        self.bases = torch.tensor(reached, dtype=torch.int64, device=device)
        self.by_put = torch.tensor(put_to, dtype=torch.int64, device=device)

    @staticmethod
    def why_not(group: Group) -> str | None:
        """Returns why NVSHMEM does not support a group, or None if it does."""
        ranks = dist.get_world_size() if dist.is_initialized() else group.size
        if group.size == ranks:
            return None
        members = ", ".join(str(group.global_rank(rank)) for rank in range(group.size))
        return (
            f"NVSHMEM allocates on all {ranks} ranks of the job at once, but this group is ranks {members}: "
            f"it would wait for ranks that make no call. For groups that are parts of the job (TP with DP "
            f"or PP) use OVERLAP_GEMM_SYMMETRIC=torch, inside one NVLink domain"
        )

    @staticmethod
    def has_p2p(group: Group, device: torch.device) -> bool:
        """Returns whether every rank of ``group`` has P2P access to every other.

        It is tested with a block of one word. Collective over all ranks of the job. With
        ``NVSHMEM_DISABLE_P2P=1`` the result is False.
        """
        probe = NvshmemSymmetric(group, 8, device)
        is_accessible = bool((probe.bases >= 0).all())
        probe.close()
        return all(group.all_gather_object(is_accessible))

    def close(self) -> None:
        """Frees the block; collective over all ranks of the job."""
        import nvshmem.core as nvshmem

        torch.cuda.synchronize(self._device)
        nvshmem.free_tensor(self.local)
        del self.local, self.bases, self.by_put


def why_no_puts() -> str | None:
    """Returns why kernels cannot be linked with NVSHMEM's device code, or None if they can."""
    try:
        version = importlib.metadata.version("nvidia-nvshmem-cu13")
    except importlib.metadata.PackageNotFoundError:
        return "NVSHMEM's device code is missing: pip install nvidia-nvshmem-cu13 (the extra 'nvshmem')"
    if numbers(version) < PUTS_SINCE:
        least = ".".join(map(str, PUTS_SINCE))
        return (
            f"CuTe DSL's compiler cannot link the device code of NVSHMEM {version}: install "
            f"nvidia-nvshmem-cu13>={least} (torch 2.15 installs it)"
        )
    return None


def numbers(version: str) -> tuple[int, ...]:
    """Returns the first three numbers of a version, for comparisons."""
    return tuple(map(int, version.split(".")[:3]))


def check_network_writes(device: torch.device) -> None:
    """Refuses a GPU on which a NIC's signal does not guarantee that the data before it is visible.

    NVSHMEM's own waits run a target-side consistency operation after a signal from a network. Our kernels
    omit it, because an sm_90 GEMM must contain no NVSHMEM call. It is needed if a NIC's writes may become
    visible to the GPU out of order. CUDA reports the ordering; from Hopper on, writes are ordered.

    Raises:
        RuntimeError: The writes may become visible out of order.
    """
    from cuda.bindings import driver

    ordering = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
    owner = driver.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    if _cuda(driver.cuDeviceGetAttribute(ordering, device.index)) < int(owner):
        raise RuntimeError(
            f"{device} does not order a NIC's writes for its kernels, which the exchange of tiles over a "
            f"network needs: use a Hopper GPU or newer"
        )


def init_nvshmem(device: torch.device) -> None:
    """Initialises NVSHMEM over torch.distributed's world, once. Collective.

    Args:
        device: This rank's CUDA device; it becomes the current one, which NVSHMEM binds.
    """
    import nvshmem.core as nvshmem
    from cuda.core import Device

    if nvshmem.init_status() >= nvshmem.InitStatus.STATUS_IS_INITIALIZED:
        return
    # No NVSHMEM collective is used here, and multicast objects are a resource of the host.
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # NVSHMEM expects a live CUDA context
    rank, size = dist.get_rank(), dist.get_world_size()
    box = [nvshmem.get_unique_id() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    current = Device(device.index)
    current.set_current()
    nvshmem.init(device=current, uid=box[0], rank=rank, nranks=size, initializer_method="uid")


def init_nvshmem_library(compiled: Any) -> None:
    """Initialises the NVSHMEM device state of a compiled kernel, once, before its first launch.

    The kernels are also loaded here. Loading may wait for the device; a relay kernel is first launched while
    a GEMM waits for it (CUDA programming guide, lazy loading).

    Args:
        compiled: The DSL's compiled function. The caller keeps it until NVSHMEM is finalised.
    """
    import nvshmem.core as nvshmem
    from cuda.bindings import driver

    library = int(compiled.library)
    nvshmem.library_init(nvshmem.NvshmemKernelObject.from_handle(library))
    count = _cuda(driver.cuLibraryGetKernelCount(library))
    for kernel in _cuda(driver.cuLibraryEnumerateKernels(count, library)):
        _cuda(driver.cuFuncLoad(_cuda(driver.cuKernelGetFunction(kernel))))


def _cuda(result: tuple[Any, ...]) -> Any:
    """Returns the value of a driver call's result; raises RuntimeError for an error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error!r}")
    return values[0] if values else None
