"""Global memory: a registry of host allocations, and views of them for warps and async units.

Global addresses are raw host pointers, so peers in one process can access each other's memory as GPUs over
NVLink do. Only registered memory can be accessed: a stray address raises a `MemoryFault`, without a
segmentation fault.

Address windows (generic addresses): shared `1 << 56`, kernel parameters `1 << 57`, local `1 << 58`, constants
`1 << 59`, functions `1 << 60`; below them global. A shared address is `cta_rank << 24 | offset`: kernels
clear bit 24 for the address in the leader CTA of a pair, and use shared::cta and shared::cluster addresses
interchangeably.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cute_emulator.errors import MemoryFault

SHARED, PARAM, LOCAL, CONST, FUNCTION = (1 << n for n in (56, 57, 58, 59, 60))
WINDOW_SHIFT = 56
_DTYPE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def host_bytes(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Returns a view of host memory; the caller keeps it alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@dataclass
class Allocation:
    """Registered range of global memory.

    Attributes:
        base: First address.
        nbytes: Size.
        rank: Rank that owns the memory.
        name: Name in messages.
        kind: `device`, `symmetric`, or `module` for a module's variables.
        owner: Registry that contains it, None after `unregister`. A cache of allocations must compare it: the
            host reuses addresses for other tensors, and for other machines.
    """

    base: int
    nbytes: int
    rank: int = 0
    name: str = ""
    kind: str = "device"
    owner: GlobalMemory | None = field(default=None, repr=False)
    raw: NDArray[np.uint8] = field(init=False, repr=False)
    _views: dict[tuple[int, int], Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.raw = host_bytes(self.base, self.nbytes)

    @property
    def end(self) -> int:
        """Returns the address one past the last."""
        return self.base + self.nbytes

    def __str__(self) -> str:
        label = self.name or self.kind
        return f"{label} of rank {self.rank} [{self.base:#x}, {self.end:#x})"

    def view(self, width: int, count: int = 1) -> Any:
        """Returns `[n]` elements of `width` bytes, or `[n, count]` if `count` > 1.

        None if the allocation does not begin at a multiple of `width * count`.
        """
        key = (width, count)
        view = self._views.get(key)
        if view is None:
            size = width * count
            if self.base % size:
                return None
            view = self.raw[: self.nbytes // size * size].view(_DTYPE[width])
            view = view.reshape(-1, count) if count > 1 else view
            self._views[key] = view
        return view


@dataclass(frozen=True)
class Named:
    """Tensor that a finding may name.

    Attributes:
        name: Name of the tensor.
        address: Address of its first element.
        bits: Bits of an element.
        shape: Extents.
        strides: Strides in elements.
    """

    name: str
    address: int
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def element(self, address: int) -> str:
        """Returns the element at an address; empty if there is none."""
        left, index = (address - self.address) * 8 // self.bits, [0] * len(self.shape)
        for n in sorted(range(len(self.shape)), key=lambda n: -self.strides[n]):
            if self.shape[n] > 1 and self.strides[n] > 0:
                index[n] = min(left // self.strides[n], self.shape[n] - 1)
                left -= index[n] * self.strides[n]
        return "" if left or address < self.address else f"element {index} of {self.name}"


@dataclass(frozen=True)
class Multicast:
    """Multicast range: one address for the same bytes in several ranks' memory."""

    base: int
    nbytes: int
    targets: tuple[int, ...]


class GlobalMemory:
    """Registry of allocations."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._live: dict[int, Allocation] = {}
        self._freed: list[Allocation] = []
        self._multicast: list[Multicast] = []
        self.named: list[Named] = []
        self.arguments: list[Named] = []  # arguments of calls that have not ended

    def register(
        self, address: int, nbytes: int, rank: int = 0, name: str = "", kind: str = "device"
    ) -> Allocation:
        """Makes `[address, address + nbytes)` accessible.

        Raises:
            ValueError: The range overlaps another one, or is empty.
        """
        if nbytes <= 0:
            raise ValueError(f"cannot register {nbytes} bytes at {address:#x}: the size must be positive")
        i = bisect_right(self._bases, address)
        neighbours = [self._live[b] for b in self._bases[max(0, i - 1) : i + 1]]
        for other in neighbours:
            if address < other.end and other.base < address + nbytes:
                raise ValueError(f"[{address:#x}, {address + nbytes:#x}) overlaps {other}")
        allocation = Allocation(address, nbytes, rank, name, kind, self)
        insort(self._bases, address)
        self._live[address] = allocation
        return allocation

    def unregister(self, address: int) -> None:
        """Ends an allocation; a later access raises a `MemoryFault` that names the use after free.

        The last 256 ended allocations are remembered.
        """
        allocation = self._live.pop(address)
        self._bases.remove(address)
        allocation.owner = None
        self._freed = [*self._freed[-255:], allocation]

    def register_multicast(self, address: int, nbytes: int, targets: list[int]) -> None:
        """Maps `nbytes` bytes at `address` to those at each of `targets` (which must be registered)."""
        self._multicast.append(Multicast(address, nbytes, tuple(targets)))

    def multicast_targets(self, address: int, nbytes: int = 1) -> list[int]:
        """Returns the target addresses of a multicast address, or the address itself."""
        for m in self._multicast:
            if m.base <= address and address + nbytes <= m.base + m.nbytes:
                return [t + address - m.base for t in m.targets]
        return [address]

    def is_multicast(self, address: int) -> bool:
        """Returns whether an address is in a multicast range."""
        return any(m.base <= address < m.base + m.nbytes for m in self._multicast)

    def allocations(self) -> Iterator[Allocation]:
        """Returns all live allocations by address."""
        return (self._live[b] for b in self._bases)

    def lookup(self, address: int) -> Allocation | None:
        """Returns the live allocation that contains an address, or None."""
        i = bisect_right(self._bases, address)
        if i:
            allocation = self._live[self._bases[i - 1]]
            if address < allocation.end:
                return allocation
        return None

    def find(self, address: int, nbytes: int) -> Allocation:
        """Returns the allocation that contains a complete range.

        Raises:
            MemoryFault: There is none; the message names the nearest one.
        """
        allocation = self.lookup(address)
        if allocation is not None and address + nbytes <= allocation.end:
            return allocation
        raise MemoryFault(self.describe_fault(address, nbytes))

    def describe_fault(self, address: int, nbytes: int) -> str:
        """Returns the reason why a range cannot be accessed."""
        for old in reversed(self._freed):
            if old.base <= address < old.end and self.lookup(address) is None:
                return f"use after free: {nbytes} bytes at {address:#x}, inside the freed {old}"
        if self.is_multicast(address):
            return f"{address:#x} is a multicast address; only multimem and bulk stores may use it"
        i = bisect_right(self._bases, address)
        nearest = min(
            (self._live[b] for b in self._bases[max(0, i - 1) : i + 1]),
            key=lambda a: min(abs(address - a.base), abs(address - a.end)),
            default=None,
        )
        hint = "nothing is allocated" if nearest is None else f"the nearest allocation is {nearest}"
        if nearest is not None and nearest.base <= address < nearest.end:
            hint = f"{address + nbytes - nearest.end} bytes beyond {nearest}"
        return f"out of bounds: {nbytes} bytes at {address:#x} ({hint})"

    def bytes_at(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Returns a view of a complete range inside one allocation."""
        allocation = self.find(address, nbytes)
        start = address - allocation.base
        return allocation.raw[start : start + nbytes]

    def spot(self, address: int) -> str:
        """Returns an address for messages: with the element of a named tensor there, and the allocation."""
        elements = (tensor.element(address) for tensor in (*self.named, *reversed(self.arguments)))
        element = next(filter(None, elements), "")
        return f"{address:#x} ({', '.join(filter(None, (element, str(self.lookup(address)))))})"

    # -- chunks, for tiled async operations ------------------------------------------------------

    def gather(
        self, addresses: NDArray[np.int64], chunk: int, bounds: tuple[int, int] | None = None
    ) -> NDArray[np.generic]:
        """Reads aligned chunks of `chunk` bytes: `[n]` of the dtype of that size.

        Args:
            addresses: Addresses of the chunks.
            chunk: Bytes of each chunk.
            bounds: Lowest and highest address, if known.
        """
        out: np.ndarray = np.empty(addresses.shape, _DTYPE[chunk])
        for allocation, where in self.spans(addresses, chunk, bounds):
            if where.__class__ is slice:
                view, index = self._indexed(allocation, addresses, chunk)
                return view[index]
            view, index = self._indexed(allocation, addresses[where], chunk)
            out[where] = view[index]
        return out

    def gather_box(
        self, origin: int, steps: NDArray[np.int64], chunk: int, bounds: tuple[int, int]
    ) -> NDArray[np.generic]:
        """Reads chunks as `gather` does, by their distances from an address in chunks."""
        allocation = self.lookup(origin)
        view = None if allocation is None else allocation.view(chunk)
        if view is None or allocation is None or bounds[1] + chunk > allocation.end:
            return self.gather(steps * chunk + origin, chunk, bounds)
        chunks: NDArray[np.generic] = view[(origin - allocation.base) // chunk :][steps]
        return chunks

    def scatter(
        self, addresses: NDArray[np.int64], chunk: int, values: NDArray[np.generic], bounds: tuple[int, int]
    ) -> None:
        """Writes aligned chunks; other arguments as for `gather`."""
        for allocation, where in self.spans(addresses, chunk, bounds):
            view, index = self._indexed(allocation, addresses[where], chunk)
            view[index] = values[where]

    @staticmethod
    def _indexed(
        allocation: Allocation, addresses: NDArray[np.int64], chunk: int
    ) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
        shift = chunk.bit_length() - 1
        view = allocation.view(chunk)
        if view is not None:
            return view, (addresses - allocation.base) >> shift
        skew = -allocation.base % chunk
        view = allocation.raw[skew : skew + (allocation.nbytes - skew) // chunk * chunk].view(_DTYPE[chunk])
        return view, (addresses - allocation.base - skew) >> shift

    def spans(
        self, addresses: NDArray[np.int64], chunk: int, bounds: tuple[int, int] | None = None
    ) -> Iterator[tuple[Allocation, NDArray[np.bool_] | slice]]:
        """Splits addresses by allocation; raises for addresses outside of all."""
        low, high = bounds or (int(addresses.min()), int(addresses.max()))
        allocation = self.lookup(low)
        if allocation is not None and high + chunk <= allocation.end:
            yield allocation, slice(None)
            return
        rest = np.ones(addresses.shape, np.bool_)
        while rest.any():
            first = int(addresses[rest].min())
            allocation = self.find(first, chunk)
            where = rest & (addresses >= allocation.base) & (addresses + chunk <= allocation.end)
            yield allocation, where
            rest &= ~where
