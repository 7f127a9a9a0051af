"""torch.distributed, torch symmetric memory and nvshmem.core's host calls, for ranks that are threads.

Process groups are torch's threaded ones (made for its tests). Their collectives here end a turn instead of
blocking a thread. Symmetric allocations come from the emulator's symmetric heap: the n-th allocations of all
ranks form one symmetric allocation.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from cute_emulator.errors import EmulatorError
from cute_emulator.host.memory import Symmetric
from cute_emulator.host.replace import replaced
from cute_emulator.host.torch.torch_mode import set_mark
from cute_emulator.host.torch.turns import Turns

if TYPE_CHECKING:
    from cute_emulator.host.emulator import Emulator


SIGNAL_PAD_BYTES = 2048
"""Torch's default; `set_signal_pad_size` has no effect."""


class SymmetricAllocator:
    """Returns each rank's part of collective allocations.

    Memory that a GPU's driver allocates for the first time is zero, and scripts rely on it.

    Args:
        emulator: Emulator with the heap.
        poison: Whether the memory stays poisoned instead, to detect such scripts.
    """

    def __init__(self, emulator: Emulator, poison: bool) -> None:
        self._emulator = emulator
        self._poison = poison
        self._made: list[Symmetric] = []
        self._taken = [0] * emulator.ranks
        self._owner: dict[int, Symmetric] = {}
        self._pads: dict[int, Symmetric] = {}

    def adopt(self, tensor: torch.Tensor, rank: int) -> None:
        """Lets kernels access a rank's tensor."""
        self._emulator.adopt(tensor.untyped_storage(), rank)

    def signal_pads(self, symmetric: Symmetric) -> Symmetric:
        """Returns the flags by which ranks signal each other about an allocation; zero at the first call."""
        key = symmetric.addresses[0]
        if key not in self._pads:
            self._pads[key] = pads = self._emulator.symmetric((SIGNAL_PAD_BYTES,), torch.uint8, "signal pad")
            for tensor in pads.tensors:
                tensor.zero_()
        return self._pads[key]

    def take(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the next allocation of a rank.

        Raises:
            EmulatorError: Another rank's allocation of the same number has another size.
        """
        number = self._taken[rank]
        self._taken[rank] += 1
        if number == len(self._made):
            made = self._emulator.symmetric(shape, dtype)
            if not self._poison:
                for tensor in made.tensors:
                    tensor.zero_()
            self._made.append(made)
        symmetric = self._made[number]
        if (tuple(symmetric[rank].shape), symmetric[rank].dtype) != (shape, dtype):
            raise EmulatorError(
                f"symmetric allocation {number} must be equal on all ranks: rank {rank} requests {shape} "
                f"{dtype}, another rank {tuple(symmetric[rank].shape)} {symmetric[rank].dtype}"
            )
        tensor = set_mark(symmetric[rank])
        self._owner[tensor.data_ptr()] = symmetric
        return tensor

    def of(self, tensor: torch.Tensor) -> Symmetric:
        """Returns the allocation that begins at a tensor.

        Raises:
            EmulatorError: No allocation begins there.
        """
        if tensor.data_ptr() not in self._owner:
            raise EmulatorError("the tensor is not the base of a symmetric allocation")
        return self._owner[tensor.data_ptr()]

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns the same tensor of another rank."""
        return set_mark(self.of(tensor)[rank])


def changes(
    emulator: Emulator, turns: Turns, synchronize: Callable[[], None], poison_symmetric: bool
) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Yields every replacement as a context manager; its exit restores the original."""
    allocator = SymmetricAllocator(emulator, poison_symmetric)
    yield from _process_groups(emulator.ranks, turns, synchronize)
    yield from _torch_symmetric_memory(allocator, emulator.ranks, turns)
    if importlib.util.find_spec("nvshmem") is not None:
        yield from _nvshmem_core(allocator, emulator.ranks, turns, synchronize)


def _process_groups(
    ranks: int, turns: Turns, synchronize: Callable[[], None]
) -> Iterator[contextlib.AbstractContextManager[None]]:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    store = dist.HashStore()
    real_init = dist.init_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        real_init(backend="threaded", rank=turns.rank, world_size=ranks, store=store)

    def join(collective: Any, rank: int, data: Any) -> Any:
        synchronize()
        collective._data[rank] = data
        collective._count += 1
        if collective._count == collective._world_size:
            collective._collective.work(collective._data)
            collective._done = True
        else:
            turns.block(lambda: bool(collective._done))
        return threaded.ret_work(data)

    @contextlib.contextmanager
    def threaded_world() -> Iterator[None]:
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        try:
            yield
        finally:
            threaded._uninstall_threaded_pg()
            torch._C._distributed_c10d._set_thread_isolation_mode(False)

    yield threaded_world()
    for module in (dist, device_mesh):
        yield replaced(module, "init_process_group", init_process_group)
    group = threaded.ProcessLocalGroup  # declares no device
    devices = [torch.device("cpu"), torch.device("cuda")]
    yield replaced(group, "_device_types", property(lambda _: devices))
    yield replaced(group, "_get_backend", lambda self, _device: self)
    yield replaced(threaded, "_store_based_barrier", lambda *_, **__: None)
    yield replaced(threaded.Collective, "join", join)


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns the shape of `f(2, 3)`, `f((2, 3))` and `f(6)`."""
    flat = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    return tuple(int(n) for n in flat)


def _torch_symmetric_memory(
    allocator: SymmetricAllocator, ranks: int, turns: Turns
) -> Iterator[contextlib.AbstractContextManager[None]]:
    import torch.distributed._symmetric_memory as symm_mem
    from torch._C._distributed_c10d import _SymmetricMemory

    def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        return allocator.take(turns.rank, _shape(size), dtype or torch.get_default_dtype())

    def rendezvous(tensor: torch.Tensor, group: Any = None) -> Any:
        symmetric, rank = allocator.of(tensor), turns.rank

        def get_buffer(peer: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
            flat = allocator.peer(tensor, peer).view(-1).view(torch.uint8)[storage_offset * dtype.itemsize :]
            return flat[: torch.Size(sizes).numel() * dtype.itemsize].view(dtype).view(*sizes)

        def on_device(addresses: list[int]) -> torch.Tensor:
            table = set_mark(torch.tensor(addresses, dtype=torch.int64))
            allocator.adopt(table, rank)
            return table

        pads = allocator.signal_pads(symmetric)
        tables = [on_device([*symmetric.addresses]), on_device([*pads.addresses])]

        def get_signal_pad(peer: int, sizes: Any = (), dtype: Any = None, storage_offset: int = 0) -> Any:
            flat = set_mark(pads[peer])[storage_offset * (dtype or torch.uint32).itemsize :]
            if not sizes:
                return flat.view(dtype or torch.uint32)
            count = torch.Size(sizes).numel() * (dtype or torch.uint32).itemsize
            return flat[:count].view(dtype or torch.uint32).view(*sizes)

        return SimpleNamespace(
            rank=rank,
            world_size=ranks,
            buffer_ptrs=list(symmetric.addresses),
            buffer_ptrs_dev=tables[0].data_ptr(),
            signal_pad_ptrs=list(pads.addresses),
            signal_pad_ptrs_dev=tables[1].data_ptr(),
            signal_pad_size=pads.nbytes,
            get_signal_pad=get_signal_pad,
            device_tables=tables,  # keeps the memory of the addresses above alive
            multicast_ptr=symmetric.multicast,
            buffer_size=symmetric.nbytes,
            get_buffer=get_buffer,
            get_remote_tensor=get_buffer,
            barrier=lambda *_, **__: dist.barrier(),
        )

    def multimem_all_reduce_(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        if reduce_op != "sum":
            raise EmulatorError(f"multimem_all_reduce_({reduce_op!r}) is not modelled; use 'sum'")
        dist.all_reduce(tensor)
        return tensor

    yield replaced(symm_mem, "empty", empty)
    yield replaced(symm_mem, "rendezvous", rendezvous)
    yield replaced(_SymmetricMemory, "has_multicast_support", staticmethod(lambda *_: True))
    yield replaced(torch.ops.symm_mem, "multimem_all_reduce_", multimem_all_reduce_)


def _nvshmem_core(
    allocator: SymmetricAllocator, ranks: int, turns: Turns, synchronize: Callable[[], None]
) -> Iterator[contextlib.AbstractContextManager[None]]:
    import nvshmem.core as core
    from cutlass.torch import as_tensor

    def tensor(shape: Any, dtype: torch.dtype = torch.float32, **_: Any) -> torch.Tensor:
        return allocator.take(turns.rank, _shape((shape,)), dtype)

    def get_multicast_tensor(_team: Any, local: torch.Tensor) -> torch.Tensor:
        return as_tensor(allocator.of(local).multicast, tuple(local.shape), local.dtype)

    def barrier(*_: Any, **__: Any) -> None:
        synchronize()
        dist.barrier()

    def accept(*_: Any, **__: Any) -> None:
        return None

    for name, function in {
        "init": accept,
        "finalize": accept,
        "library_init": accept,
        "library_finalize": accept,
        "tensor": tensor,
        "free_tensor": accept,
        "get_peer_tensor": allocator.peer,
        "get_multicast_tensor": get_multicast_tensor,
        "my_pe": lambda: turns.rank,
        "n_pes": lambda: ranks,
        "barrier": barrier,
        "barrier_all": barrier,
    }.items():
        if hasattr(core, name):
            yield replaced(core, name, function)
