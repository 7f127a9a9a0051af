"""`Emulator`: the machine, connected to CuTe DSL and torch."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from cute_emulator import clients
from cute_emulator.causes import FindingsError
from cute_emulator.errors import EmulatorError, Report
from cute_emulator.execution.launch import Dim3, Launch, Machine
from cute_emulator.host import nvshmem, triton
from cute_emulator.host.arguments import Arguments, entry_of, parameters, with_names
from cute_emulator.host.copies import copy_launch
from cute_emulator.host.device import DeviceProperties
from cute_emulator.host.dsl.hardware_info import hardware_info
from cute_emulator.host.dsl.runtime_api import KernelCall
from cute_emulator.host.dsl.seam import SEAM
from cute_emulator.host.graphs import Capture
from cute_emulator.host.memory import Symmetric, SymmetricHeap, extent, named, poison_
from cute_emulator.host.network import Network
from cute_emulator.host.registry import ARGUMENT, Registry
from cute_emulator.host.timelines import Timelines
from cute_emulator.machine.asyncq import Mode
from cute_emulator.machine.inject import Faults
from cute_emulator.machine.memory import Named
from cute_emulator.machine.streams import StreamEvent


@dataclass(frozen=True)
class _Pending:
    """Memory of a queued launch, which must outlive the launch."""

    rank: int
    keys: tuple[int, ...]
    owners: tuple[Any, ...]
    stream: int


class Emulator:
    """Context manager that runs compiled CuTe DSL functions on the CPU while it is open.

    A function compiled inside the block (or an earlier one), called with CPU tensors and any stream, runs in
    the emulator. With one rank a call runs before it returns, unless the host is recorded (`timelines`): then
    it runs when the host waits for the device. With several, calls inside ``with emu.rank(r):`` are queued,
    and `run` executes all queued launches of all ranks together: launches of one (rank, stream) in order,
    everything else concurrently. Launches that are still queued at the end of the block never run; they are
    an `EmulatorError`, unless an exception ends the block.

    Memory: a kernel may access the tensors of its call until its run ends. Memory that it accesses by another
    address (in a table, a raw pointer argument) must be passed to `register`, or allocated by `empty` or
    `symmetric`. Any other access is an error.

    Args:
        arch: Default target of ``cute.compile`` and architecture of the device. Kernels compiled for another
            target run, too.
        ranks: Number of ranks; each has one device.
        mode: When asynchronous operations complete: ``"immediate"``, at issue; ``"random"``, in random
            order and after random delays; ``"lazy"``, as late as the PTX ISA allows.
        seed: Seed of every random choice; a run is a function of its inputs and the seed.
        num_sms: Streaming multiprocessors of each rank's device, or one number for all devices; the default
            is that of the real device. Kernels of a rank that exceed them run in turn (`machine.residency`).
        heap_bytes: Address space of a rank's symmetric heap, of which no part is allocated twice.
        network: Whether NVSHMEM sends puts and signals over an emulated network
            (`cute_emulator.host.network`). False: all ranks have peer access to each other. True: no rank
            has.
        collect: Whether findings are kept in `report` instead of raised as `FindingsError` after a run.
        rewrite: Function that changes the PTX of each launch before it runs (`cute_emulator.mutate`).
        options: Further options of the machine, see `cute_emulator.execution.launch.Machine`.

    Attributes:
        machine: Machine that runs the launches.
        devices: Properties of each rank's device.
        captures: CUDA graphs in capture, by rank (`host.graphs`).
        timelines: Order of the streams' work, of ranks whose host is a script or a marked pytest test.
    """

    def __init__(
        self,
        arch: str = "sm_100a",
        ranks: int = 1,
        mode: Mode = "immediate",
        seed: int = 0,
        *,
        num_sms: int | Sequence[int] | None = None,
        heap_bytes: int = 1 << 30,
        network: bool = False,
        collect: bool = False,
        rewrite: Callable[[str], str] | None = None,
        **options: Any,
    ) -> None:
        self.machine = Machine(arch, ranks, mode, seed, num_sms=num_sms, **options)
        self.devices = tuple(DeviceProperties(arch, sms.num_sms) for sms in self.machine.residency)
        self.ranks = ranks
        self.captures: dict[int, Capture] = {}
        self.timelines = Timelines(self.machine)
        self._told = 0
        self._collect = collect
        self._rewrite = rewrite
        self._reachable = not network
        self._network: Network | None = None
        self._heap = SymmetricHeap(ranks, heap_bytes)
        self._registry = Registry(self.machine.memory)
        self._local = threading.local()
        self._lock = threading.RLock()
        self._pending: list[_Pending] = []
        self._peer_tables: torch.Tensor | None = None

    _current: ClassVar[Emulator | None] = None

    @classmethod
    def current(cls) -> Emulator | None:
        """Returns the emulator that is open in this process, or None."""
        return cls._current

    # --- life

    def __enter__(self) -> Emulator:
        with contextlib.ExitStack() as opened:
            SEAM.open(lambda: self.device, self._launch, self._pack, self._called)
            opened.callback(SEAM.close)
            Emulator._current = self
            opened.callback(setattr, Emulator, "_current", None)
            for change in hardware_info(lambda: self.device):
                opened.enter_context(change)
            opened.enter_context(triton.served(self))
            opened.callback(clients.call_closed)
            clients.call_opened(self)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._opened.close()
        queued = len(self._pending)
        self._heap.close()
        if queued and kind is None:
            raise EmulatorError(f"{queued} queued launches were never run: call run() before the block ends")

    @property
    def device(self) -> DeviceProperties:
        """Returns the device of the calling thread's rank; that of rank 0 outside of `rank`."""
        return self.devices[getattr(self._local, "rank", None) or 0]

    @property
    def report(self) -> Report:
        """Returns the record of all runs so far: findings, warp instructions, seconds, printed lines."""
        return self.machine.report

    @property
    def faults(self) -> Faults:
        """Returns the injected faults of stores, copies and ranks (`machine.inject`)."""
        return self.machine.faults

    # --- ranks and runs

    @contextlib.contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        """Assigns calls of this thread inside the block to a rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"{rank=} must be in 0..{self.ranks - 1}")
        before = getattr(self._local, "rank", None)
        self._local.rank = rank
        try:
            yield
        finally:
            self._local.rank = before

    def run(self) -> Report:
        """Executes all queued launches.

        Returns:
            `report`.

        Raises:
            EmulatorError: A fault, a deadlock, an instruction that is not modelled, or a trap ended a kernel.
            FindingsError: All kernels ended and there are new findings (not with ``collect=True``).
        """
        try:
            self.machine.run()
        finally:
            with self._lock:
                pending, self._pending = self._pending, []
                self.machine.memory.arguments.clear()
            for item in pending:
                self._registry.release(item.keys)
        self.raise_findings()
        return self.report

    def raise_findings(self) -> None:
        """Raises the findings since the last call.

        Raises:
            FindingsError: There are new findings (not with ``collect=True``).
        """
        before, self._told = self._told, len(self.report.findings)
        if self._told > before and not self._collect:
            raise FindingsError(self.report)

    def record_event(self, rank: int, stream: int) -> StreamEvent:
        """Returns an event that completes when all work launched to the stream before has ended."""
        with self._lock:
            return self.timelines.recorded(rank, stream, self.machine.record(rank, stream))

    def wait_event(self, rank: int, stream: int, event: StreamEvent) -> None:
        """Delays later launches on a stream until an event, of any stream and rank, completes."""
        with self._lock:
            self.timelines.waited(rank, stream, event)
            self.machine.wait(rank, stream, event)

    def wait_stream(self, rank: int, stream: int, other: int) -> None:
        """Delays later launches on a stream until earlier ones on another stream of the rank have ended."""
        self.wait_event(rank, stream, self.record_event(rank, other))

    def copy(self, rank: int, stream: int, target: int, source: int, nbytes: int) -> None:
        """Queues a copy by a copy engine, which runs concurrently with the rank's kernels (`host.copies`).

        Args:
            rank: Rank of the stream.
            stream: Handle of the stream.
            target: Address of any rank's memory that kernels may access.
            source: Source address; memory that is not registered belongs to the rank until the run ends.
            nbytes: A multiple of 16 (addresses, too), or 4 or 8 for a flag, which is ordered after all work
                before it in the stream.
        """
        with self._lock:
            key = self._registry.hold(source, nbytes, rank=rank, name="source of a copy")
            self._pending.append(_Pending(rank, (key,), (), stream))
            copy = copy_launch(rank, stream, target, source, nbytes)
            work = self.timelines.work(rank, stream, "a copy", self.wait_stream)
            self.machine.submit(replace(copy, work=work))

    def calling_rank(self) -> int:
        """Returns the rank of this thread's calls: that of the enclosing `rank` block.

        Raises:
            EmulatorError: There are several ranks and no enclosing block.
        """
        rank = getattr(self._local, "rank", None)
        if rank is None:
            if self.ranks > 1:
                raise EmulatorError(f"the emulator has {self.ranks} ranks: call inside `with emu.rank(r):`")
            return 0
        return int(rank)

    def launch(
        self,
        ptx: str,
        entry: str,
        grid: Dim3,
        block: Dim3,
        args: Arguments = (),
        *,
        cluster: Dim3 | None = None,
        shared: int = 0,
        stream: int = 0,
        cooperative: bool = False,
        programmatic: bool = False,
        reaches: Sequence[Any] = (),
        ignore: Collection[str] = (),
    ) -> None:
        """Launches a kernel of any PTX text, as a call of a compiled function does (`host.kernels.run`).

        Args:
            ptx: PTX text of the module.
            entry: Name of the kernel in it.
            grid: Number of CTAs along x, y, z.
            block: Threads of a CTA along x, y, z.
            args: For each parameter a NumPy array or torch CPU tensor (passed by address), a number, None (a
                null pointer), or bytes (structures); the keys of a mapping are names for findings.
            cluster: CTAs of a cluster along x, y, z; the default is the kernel's `.reqnctapercluster`.
            shared: Bytes of dynamic shared memory.
            stream: Launches of one stream run one after the other.
            cooperative: Whether every CTA must be resident at once.
            programmatic: Whether the kernel may begin before its predecessor in the stream has ended.
            reaches: Arrays and tensors that the kernel accesses by addresses inside of structures.
            ignore: Kinds of findings that are discarded for this kernel.

        Raises:
            ValueError: The module has no such kernel, arguments do not fit, or the launch cannot run.
        """
        kernel, pairs = entry_of(ptx, entry), with_names(args)
        params = parameters(kernel, pairs)
        x, y, z = cluster or (*kernel.directives.get("reqnctapercluster", ()), 1, 1, 1)[:3]
        flags = (cooperative, programmatic, frozenset(ignore))
        call = KernelCall(ptx, entry, grid, block, (x, y, z), shared, stream, params, *flags)
        memory = [value for _, value in pairs if isinstance(value, Named)]
        memory += [named(array, f"memory {n}") for n, array in enumerate(reaches)]
        owners = (*(args.values() if isinstance(args, Mapping) else args), *reaches)
        self._enqueue(call, memory, owners)
        self._called()

    # --- callbacks of the seam

    def _pack(self, tensor: Any) -> None:
        packed = self._local.__dict__.setdefault("packed", [])
        packed.append(tensor)

    def _launch(self, call: KernelCall) -> None:
        tensors = tuple(self._local.__dict__.get("packed", ()))
        self._enqueue(call, [named(tensor, f"argument {n}") for n, tensor in enumerate(tensors)], tensors)

    def _enqueue(self, call: KernelCall, memory: Sequence[Named], owners: tuple[Any, ...]) -> None:
        """Queues a launch, or stores it for each replay of the graph in capture."""
        rank = self.calling_rank()
        kept = tuple(map(self.timelines.kept, owners))
        submit = functools.partial(self._submit, call, rank, memory, kept)
        capture = self.captures.get(rank)
        if capture is not None:
            capture.keep(submit)
        else:
            submit()

    def _submit(self, call: KernelCall, rank: int, memory: Sequence[Named], owners: tuple[Any, ...]) -> None:
        with self._lock:
            keys = tuple(
                self._registry.hold(*where, rank=rank, name=ARGUMENT)
                for where in map(extent, memory)
                if where[1]
            )
            self._pending.append(_Pending(rank, keys, owners, call.stream))
            self.machine.memory.arguments.extend(memory)
            self.machine.submit(
                Launch(
                    self._rewrite(call.ptx) if self._rewrite is not None else call.ptx,
                    call.entry,
                    call.grid,
                    call.block,
                    call.cluster,
                    call.dynamic_smem,
                    call.params,
                    rank,
                    call.stream,
                    call.cooperative,
                    call.programmatic,
                    self._constants(call.ptx, rank),
                    ignore=call.ignore,
                    work=self.timelines.work(
                        rank, call.stream, f"kernel {call.entry[:60]}", self.wait_stream
                    ),
                )
            )

    def _called(self) -> None:
        self._local.__dict__.pop("packed", None)
        if self.ranks == 1 and self._pending and not self.timelines:
            self.run()

    def _constants(self, ptx: str, rank: int) -> dict[str, bytes]:
        """Returns initial `.const` bytes: NVSHMEM's device state, for kernels linked with NVSHMEM."""
        if nvshmem.DEVICE_STATE not in ptx:
            return {}
        bases = self._heap.bases
        if not self._reachable:
            self._network = self._network or Network(self.machine, bases)
            self._network.intercept(ptx)
        if self._peer_tables is None:
            self._peer_tables = torch.tensor([*bases, 0], dtype=torch.int64).repeat(self.ranks, 1)
            if not self._reachable:
                self._peer_tables *= torch.eye(self.ranks, self.ranks + 1, dtype=torch.int64)
            for r, table in enumerate(self._peer_tables):
                self._registry.hold(*extent(table), rank=r, name="NVSHMEM peer table")
        table = self._peer_tables[rank].data_ptr()
        state = nvshmem.device_state(rank, self.ranks, bases[rank], self._heap.size, table, self._reachable)
        return {nvshmem.DEVICE_STATE: state}

    # --- memory

    def adopt(
        self, storage: torch.UntypedStorage, rank: int, pinned: bool = False, pooled: bool = True
    ) -> None:
        """Lets kernels access a storage for its lifetime.

        `pooled` is set if torch's caching allocator allocated it.
        """
        base, nbytes, name = storage.data_ptr(), storage.nbytes(), "pinned memory" if pinned else "tensor"
        if nbytes:
            with self._lock:
                key = self._registry.hold(base, nbytes, rank=rank, name=name)
            weakref.finalize(storage, self._release, key, rank, base)
            self.timelines.allocated(rank, base, nbytes, pinned, pooled and rank not in self.captures)

    def _release(self, key: int, rank: int, base: int) -> None:
        with self._lock:
            self.timelines.freed(rank, base)
            self._registry.release([key])

    def finish(self) -> None:
        """Runs queued launches, if any."""
        if self._pending:
            self.run()

    def has_pending(self, rank: int) -> bool:
        """Returns whether launches of a rank are queued."""
        return any(item.rank == rank for item in self._pending)

    def register(self, tensor: torch.Tensor, rank: int = 0, name: str = "registered") -> torch.Tensor:
        """Lets kernels access a tensor by address until the emulator is deleted; returns the tensor.

        Args:
            tensor: CPU tensor; one without elements has no memory to access.
            rank: Rank that owns the memory.
            name: Name in reports.
        """
        address, nbytes = extent(tensor)
        if not nbytes:
            return tensor
        with self._lock:
            self._registry.hold(address, nbytes, rank=rank, name=name)
            self._registry.keep_alive(tensor)
            self.machine.memory.named.append(named(tensor, name))
        return tensor

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, rank: int = 0, name: str = "empty"
    ) -> torch.Tensor:
        """Returns a registered tensor, poisoned: every byte 0xFF."""
        return self.register(poison_(torch.empty(*shape, dtype=dtype)), rank, name)

    def symmetric(self, shape: Sequence[int], dtype: torch.dtype, name: str = "symmetric") -> Symmetric:
        """Allocates the same tensor on every rank, poisoned, registered for all, with a multicast address.

        Args:
            shape: Shape of each rank's tensor.
            dtype: Data type of each rank's tensor.
            name: Name in reports.
        """
        shape = tuple(shape)
        with self._lock:
            symmetric = self._heap.allocate(shape, dtype)
            if not symmetric.nbytes:
                return symmetric
            for rank, address in enumerate(symmetric.addresses):
                self.machine.memory.register(address, symmetric.nbytes, rank, name, kind="symmetric")
                self.machine.memory.named.append(named(symmetric[rank], name))
            self.machine.memory.register_multicast(
                symmetric.multicast, symmetric.nbytes, list(symmetric.addresses)
            )
        return symmetric
