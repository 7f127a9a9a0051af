"""Network of NVSHMEM peers that are not P2P-accessible: puts arrive late, in any allowed order.

If a peer's heap base is zero in the device state, NVSHMEM's device code passes every operation to functions
named ``nvshmemi_transfer_*``. On a GPU these use a NIC or a proxy. Here they are intercepted by name
(signatures: ``nvshmemi_transfer_api.cuh`` of nvidia-nvshmem-cu13 3.8.0) and become events of the async
engine. In mode ``immediate`` events happen at issue, in ``random`` at random times, in ``lazy`` as late as
the OpenSHMEM ordering rules allow:

- ``put`` returns when its source was read; the source of a ``put_nbi`` is read at any later time;
- a signal of ``put_signal`` is ordered after the data of the same call, and after no other operation;
- ``fence`` orders earlier operations to a PE before later ones; ``quiet`` waits for all earlier operations.

Also modelled are atomics of 8 bytes without result that set or add, such as ``signal_op``. Any other
transfer, such as a get, raises an `EmulatorError` when a kernel calls it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cute_emulator.errors import EmulatorError
from cute_emulator.execution.launch import Machine
from cute_emulator.instructions.emit import BLOCK_RESULT
from cute_emulator.machine.asyncq import Event
from cute_emulator.machine.warp import Group
from cute_emulator.machine.watching import notify
from cute_emulator.numbers.lanes import lane_list

_FUNCTION = re.compile(r"\.func\b[^;{]*?\b_Z(\d+)(nvshmemi_transfer_\w+)\s*\(([^)]*)\)")
_PUT_SIGNAL_NBI = re.compile(r"\.func\b[^;{]*?\bnvshmemx?_\w+_put_signal_nbi")
_SCOPE = re.compile(r"threadgroup_t(\d)E")
_OPERATION = re.compile(r"nvshmemi_op_t(\d+)E")
_THREAD, _WARP = 0, 1  # threadgroup_t; a block is 3
_PUT = 1  # nvshmemi_op_t
_SET, _ADD = (3, 9), (4, 10)  # nvshmemi_amo_t: SET and SIGNAL_SET, ADD and SIGNAL_ADD
_ARGUMENTS = {
    "nvshmemi_transfer_rma": 4,
    "nvshmemi_transfer_rma_nbi": 4,
    "nvshmemi_transfer_put_signal_dispatch": 7,
    "nvshmemi_transfer_amo_nonfetch": 4,
}
"""Least number of arguments of a call after the compiler has removed constant ones."""
_EIGHT_BYTES = {"Im", "Il", "Iy", "Ix"}  # mangled template arguments: (unsigned) long, (unsigned) long long
_MEMORY_ONLY = {
    "nvshmemi_transfer_syncapi_update_mem",
    "nvshmemi_transfer_enforce_consistency_at_target",
    "nvshmemi_transfer_region_end",
    "nvshmemi_transfer_submit_active_region_slow",
}
"""Functions without effect here, because every delivery is visible at once."""


class Network:
    """Executes transfers between the symmetric heaps of a machine's ranks.

    Args:
        machine: Machine of the ranks.
        bases: Base address of each rank's heap.
    """

    def __init__(self, machine: Machine, bases: Sequence[int]) -> None:
        self._machine = machine
        self._bases = bases
        self._pending: dict[tuple[int, int], list[Event]] = {}  # by (rank, PE)
        self._fenced: dict[tuple[int, int], tuple[Event, ...]] = {}
        self._quiet: dict[int, list[Group]] = {}
        self._known: set[str] = set()

    def intercept(self, ptx: str) -> None:
        """Intercepts the transfer functions that a module declares."""
        if ptx in self._known:
            return
        self._known.add(ptx)
        nbi = int(_PUT_SIGNAL_NBI.search(ptx) is not None)
        for length, rest, parameters in set(_FUNCTION.findall(ptx)):
            symbol, base, template = f"_Z{length}{rest}", rest[: int(length)], rest[int(length) :]
            handler = self._handler(base, template, nbi)
            if parameters.count(".param") < _ARGUMENTS.get(base, 0):
                handler = _not_served(f"{base} from which the compiler took constant arguments")
            self._machine.intercept(symbol, handler)

    def _handler(self, base: str, template: str, nbi: int) -> Callable[..., Any]:
        match = _SCOPE.search(template)
        scope = int(match.group(1)) if match else _THREAD
        operation = _OPERATION.search(template)
        if base in _MEMORY_ONLY:
            return lambda group, *_: None
        if base == "nvshmemi_transfer_quiet":
            return lambda group, *_: self._wait_quiet(group)
        if base == "nvshmemi_transfer_fence":
            return lambda group, *_: self._fence(group)
        if base == "nvshmemi_transfer_amo_nonfetch" and template[:2] in _EIGHT_BYTES:
            return _each_thread_of(_THREAD, self._atomic)
        if base == "nvshmemi_transfer_put_signal_dispatch":
            # If all calls of a module have the same is_nbi, the compiler removes the argument.
            return _each_thread_of(scope, lambda *a: self._put_signal(*(a if len(a) > 8 else (*a, nbi))))
        puts = operation is not None and int(operation.group(1)) % 100 == _PUT
        if puts and base == "nvshmemi_transfer_rma":
            return _each_thread_of(scope, self._put)
        if puts and base == "nvshmemi_transfer_rma_nbi":
            return _each_thread_of(scope, self._put_nbi)
        return _not_served(base)

    # --- operations

    def _put(self, group: Group, remote: int, local: int, nbytes: int, pe: int, *_: Any) -> None:
        data = bytes(self._machine.memory.bytes_at(local, nbytes))
        self._send(group, pe, f"put of {nbytes} bytes", lambda: self._write(remote, pe, group, data))

    def _put_nbi(self, group: Group, remote: int, local: int, nbytes: int, pe: int, *_: Any) -> None:
        self._send_late(group, remote, local, nbytes, pe)

    def _send_late(self, group: Group, remote: int, local: int, nbytes: int, pe: int) -> Event:
        read: list[bytes] = []
        what = f"put_nbi of {nbytes} bytes"
        source = self._send(
            group,
            pe,
            f"source read of a {what}",
            lambda: read.append(bytes(self._machine.memory.bytes_at(local, nbytes))),
            kind="read",
        )
        return self._send(group, pe, what, lambda: self._write(remote, pe, group, read[0]), after=(source,))

    def _put_signal(
        self, group: Group, remote: int, local: int, nbytes: int, signal: int, value: int, operation: int,
        pe: int, nbi: int, *_: Any,
    ) -> None:  # fmt: skip
        if nbi & 1:
            data = self._send_late(group, remote, local, nbytes, pe)
        else:
            content = bytes(self._machine.memory.bytes_at(local, nbytes))
            data = self._send(
                group, pe, f"data of a put_signal, {nbytes} bytes",
                lambda: self._write(remote, pe, group, content),
            )  # fmt: skip
        self._update(group, signal, value, operation, pe, after=(data,))

    def _atomic(self, group: Group, remote: int, value: int, pe: int, operation: int, *_: Any) -> None:
        self._update(group, remote, value, operation, pe)

    def _update(
        self, group: Group, remote: int, value: int, operation: int, pe: int, after: tuple[Event, ...] = ()
    ) -> None:
        if operation not in (*_SET, *_ADD):
            raise EmulatorError(
                f"{group.where()}: the emulated network does not model nvshmemi_amo_t {operation}"
            )

        def deliver() -> None:
            target = self._translated(remote, pe, group)
            (old,) = struct.unpack("<Q", bytes(self._machine.memory.bytes_at(target, 8)))
            new = value if operation in _SET else (old + value) & (2**64 - 1)
            self._write(remote, pe, group, struct.pack("<Q", new))

        self._send(group, pe, "signal", deliver, after=after)

    def _fence(self, group: Group) -> None:
        rank = group.warp.grid.launch.rank
        for (source, pe), events in self._pending.items():
            if source == rank:
                self._fenced[rank, pe] = tuple(e for e in events if not e.done)

    def _wait_quiet(self, group: Group) -> Any:
        rank = group.warp.grid.launch.rank
        left = [e for events in self._of(rank) for e in events if not e.done]
        if not left:
            return None
        self._quiet.setdefault(rank, []).append(group)
        group.park(f"nvshmem_quiet: {len(left)} transfers, first the {left[0].what}")
        return BLOCK_RESULT

    # --- delivery

    def _of(self, rank: int) -> Iterator[list[Event]]:
        return (events for (source, _), events in self._pending.items() if source == rank)

    def _send(
        self,
        group: Group,
        pe: int,
        what: str,
        run: Callable[[], None],
        after: tuple[Event, ...] = (),
        kind: str = "write",
    ) -> Event:
        rank = group.warp.grid.launch.rank
        if not 0 <= pe < len(self._bases):
            raise EmulatorError(f"{group.where()}: PE {pe} must be in 0..{len(self._bases) - 1}")

        def happen() -> None:
            run()
            for waiting in self._quiet.pop(rank, ()):
                waiting.wake()

        pending = self._pending.setdefault((rank, pe), [])
        pending[:] = [e for e in pending if not e.done]
        before = tuple(e for e in self._fenced.get((rank, pe), ()) if not e.done)
        event = Event(happen, group.warp.grid, None, what, kind, after=(*before, *after))
        pending.append(event)
        return self._machine.engine.submit(event)

    def _translated(self, remote: int, pe: int, group: Group) -> int:
        return remote - self._bases[group.warp.grid.launch.rank] + self._bases[pe]

    def _write(self, remote: int, pe: int, group: Group, data: bytes) -> None:
        address = self._translated(remote, pe, group)
        target = self._machine.memory.bytes_at(address, len(data))
        target[:] = memoryview(data)
        notify(self._machine.watch, range(address >> 4, (address + len(data) - 1 >> 4) + 1))


def _each_thread_of(scope: int, operate: Callable[..., None]) -> Callable[..., None]:
    """Calls `operate` for each calling thread, or, for a warp or block scope, for its first thread alone."""

    def run(group: Group, *arguments: Any) -> None:
        for lane in lane_list(group.mask):
            if scope == _THREAD or (lane == 0 and (scope == _WARP or group.warp.index == 0)):
                operate(group, *(_of_lane(a, lane) for a in arguments))

    return run


def _of_lane(value: Any, lane: int) -> int:
    return int(value[lane]) if hasattr(value, "__len__") else int(value)


def _not_served(base: str) -> Callable[..., Any]:
    def refuse(group: Group, *_: Any) -> Any:
        raise EmulatorError(f"{group.where()}: the emulated network does not model {base}")

    return refuse
