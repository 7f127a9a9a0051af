"""Symmetric memory: a block of the same size on every rank of a group, at addresses its peers can reach.

Three providers behind one surface, `SymmetricMemory`:

- `TorchSymmetric`: ``torch.distributed._symmetric_memory``, CUDA backend. Inside one NVLink domain; per
  process group; needs no further package. The default.
- `NvshmemSymmetric`: nvshmem4py. Beyond peer access; world-collective (every rank of the job allocates
  together).
- `VirtualSymmetric`: all ranks in this process on one device, or in the emulator
(`runtime.memory.virtual_ranks`).

Allocation and `close` are collective and explicit; nothing is freed by the garbage collector, because a free
that one rank's collector starts alone hangs the others. Before any rank goes on, all ranks have agreed that
every allocation worked (`agree.together`), so one rank's failure is an error on every rank and not a hang.
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
"""The oldest NVSHMEM whose puts CuTe DSL links. Its compiler refuses a section marker in those of 3.4.5,
which torch 2.10 to 2.14 bring."""


class SymmetricMemoryError(DisagreementError):
    """A rank of the group could not allocate or map its block; raised on every rank, with who failed."""


class SymmetricMemory(Protocol):
    """A block of ``nbytes`` bytes on every rank.

    Attributes:
        local: this rank's block, uint8 ``[nbytes]``.
        bases: int64 ``[P]`` on the block's device: the address at which this rank's kernels reach each rank's
            block; -1 - (its NVSHMEM PE) where they cannot.
        by_put: the same with every peer as one that they cannot; None where the memory is not NVSHMEM's.
    """

    local: Tensor
    bases: Tensor
    by_put: Tensor | None

    def close(self) -> None:
        """Frees the block. Collective; no rank's kernel may still use it."""


NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@contextmanager
def without_multicast() -> Iterator[None]:
    """Keeps torch from making a multicast object of the blocks that meet here.

    Nothing here uses one, they are a resource of the whole host, and making one can take its GPUs out of
    service. Whoever has set torch's variable has decided.
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
        group: its ranks must share one NVLink (peer access) domain.
        nbytes: size of each rank's block.
        device: this rank's CUDA device.

    Raises:
        SymmetricMemoryError: on every rank, if any of them could not allocate or map.
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
        # It communicates, with a time-out of torch's own, so it is entered only by ranks that all have their
        # block. After it every peer's mapping exists, and anybody may store through it.
        together(group, f"mapping the peers' {nbytes} bytes", rendezvous, SymmetricMemoryError)

    @staticmethod
    def reaches_all(group: Group, device: torch.device) -> bool:
        """Always: where a peer cannot be mapped, the constructor raises."""
        return True

    @staticmethod
    def why_not(group: Group) -> str | None:
        """Serves every group."""
        return None

    def close(self) -> None:
        """Frees the block after all ranks' work on it has ended."""
        torch.cuda.synchronize(self.local.device)
        dist.barrier(self._group.process_group)
        del self._handle, self.local, self.bases


class NvshmemSymmetric:
    """A block of NVSHMEM's symmetric heap.

    NVSHMEM is one world per process: allocation and `close` are collective over all ranks of the job, in the
    same order and of the same sizes. So it serves the group of all ranks (`why_not`): a part of them cannot
    know when the others allocate, and stages of a pipeline need different sizes. PEs are world ranks
    (`Group.global_rank`).

    Args:
        group: the ranks that will use the block.
        nbytes: size of each rank's block.
        device: this rank's CUDA device; NVSHMEM must be initialised on it (`init_nvshmem`).
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
        # Collective in NVSHMEM itself, which fails on all PEs together.
        self.local = nvshmem.tensor((nbytes,), dtype=torch.uint8)
        # bindings.ptr, not get_peer_tensor: the latter leaks for the own PE and cannot say "not reachable".
        address = self.local.data_ptr()
        pes = [group.global_rank(rank) for rank in range(group.size)]
        reached = [bindings.ptr(address, pe) or -1 - pe for pe in pes]
        put_to = [address if rank == group.rank else -1 - pe for rank, pe in enumerate(pes)]
        self.bases = torch.tensor(reached, dtype=torch.int64, device=device)
        self.by_put = torch.tensor(put_to, dtype=torch.int64, device=device)

    @staticmethod
    def why_not(group: Group) -> str | None:
        """Why it cannot serve a group, None if it can."""
        ranks = dist.get_world_size() if dist.is_initialized() else group.size
        if group.size == ranks:
            return None
        members = ", ".join(str(group.global_rank(rank)) for rank in range(group.size))
        return (
            f"NVSHMEM allocates on all {ranks} ranks of the job at once, and this group is ranks {members}: "
            f"its neighbours need not call when it does, and would be waited for. For groups that are parts "
            f"of the job (TP alongside DP or PP) use OVERLAP_GEMM_SYMMETRIC=torch, inside one NVLink domain"
        )

    @staticmethod
    def reaches_all(group: Group, device: torch.device) -> bool:
        """Whether every rank of ``group`` reaches every other; found out with a block of one word.

        Collective over all ranks of the job. ``NVSHMEM_DISABLE_P2P=1`` makes it False.
        """
        probe = NvshmemSymmetric(group, 8, device)
        reached = bool((probe.bases >= 0).all())
        probe.close()
        return all(group.all_gather_object(reached))

    def close(self) -> None:
        """Frees the block; collective over all ranks of the job."""
        import nvshmem.core as nvshmem

        torch.cuda.synchronize(self._device)
        nvshmem.free_tensor(self.local)
        del self.local, self.bases, self.by_put


def why_no_puts() -> str | None:
    """Why kernels cannot be linked with NVSHMEM's device code, None if they can."""
    try:
        version = importlib.metadata.version("nvidia-nvshmem-cu13")
    except importlib.metadata.PackageNotFoundError:
        return "NVSHMEM's device code is missing: pip install nvidia-nvshmem-cu13 (the extra 'nvshmem')"
    if numbers(version) < PUTS_SINCE:
        least = ".".join(map(str, PUTS_SINCE))
        return (
            f"CuTe DSL's compiler cannot link the device code of NVSHMEM {version}: install "
            f"nvidia-nvshmem-cu13>={least} (torch 2.15 brings it)"
        )
    return None


def numbers(version: str) -> tuple[int, ...]:
    """The first three of a version, for comparing."""
    return tuple(map(int, version.split(".")[:3]))


def check_network_writes(device: torch.device) -> None:
    """Refuses a GPU on which a signal that a network delivers does not vouch for the data before it.

    What NVSHMEM's own waits do after a signal from a network (its target-side consistency operation), our
    kernels leave out: an sm_90 GEMM may hold no NVSHMEM call. It is needed where the writes of a NIC may
    become visible to the GPU out of order; CUDA says where they may not, from Hopper on.

    Raises:
        RuntimeError: they may.
    """
    from cuda.bindings import driver

    ordering = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
    owner = driver.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    if _cuda(driver.cuDeviceGetAttribute(ordering, device.index)) < int(owner):
        raise RuntimeError(f"{device} does not order a NIC's writes for its own kernels, which tiles rely on")


def init_nvshmem(device: torch.device) -> None:
    """Initialises NVSHMEM over torch.distributed's world, once. Collective.

    Args:
        device: this rank's CUDA device, made current here (NVSHMEM binds the current one).
    """
    import nvshmem.core as nvshmem
    from cuda.core import Device

    if nvshmem.init_status() >= nvshmem.InitStatus.STATUS_IS_INITIALIZED:
        return
    # Nothing here uses its collectives, and multicast objects are a resource of the whole host.
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
    """Gives a compiled kernel that calls NVSHMEM the device state it reads; once, before its first launch.

    Its kernels are loaded here and not at their first launch, because loading may wait for the device, and a
    relay kernel is first launched while a GEMM waits for it (CUDA programming guide, lazy loading).

    Args:
        compiled: the DSL's compiled function. Loaded here, and to be kept until NVSHMEM is finalised.
    """
    import nvshmem.core as nvshmem
    from cuda.bindings import driver

    library = int(compiled.library)
    nvshmem.library_init(nvshmem.NvshmemKernelObject.from_handle(library))
    count = _cuda(driver.cuLibraryGetKernelCount(library))
    for kernel in _cuda(driver.cuLibraryEnumerateKernels(count, library)):
        _cuda(driver.cuFuncLoad(_cuda(driver.cuKernelGetFunction(kernel))))


def _cuda(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call; raises RuntimeError for an error."""
    error, *values = answer
    if int(error):
        raise RuntimeError(f"CUDA driver: {error!r}")
    return values[0] if values else None
