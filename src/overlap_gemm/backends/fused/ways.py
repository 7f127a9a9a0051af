"""`Way`: the host's part of a transport: its workspace, its table of peers, and its kernels.

The way of a call follows from the requested transport (`spec.TransportSpec`), from the kernel's configuration
(`GemmConfig.sends_ll`), and from the peers' P2P access. The device's part (`overlap_gemm.transports`) sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ...config.arch import arch_of
from ...config.gemm_config import GemmConfig
from ...exchange.geometry import (
    COMING_OFFSET,
    MAX_WORLD,
    SHARD_PIECES,
    SLOT_BUFFERS,
    STAGING_BUFFERS,
    ExchangeShape,
    slots_offset,
)
from ...runtime.memory.symmetric import SymmetricMemory, why_no_puts
from ...runtime.memory.workspace import SizeClass, Workspace, obtain, why_no_put_memory
from ...runtime.peers import Peers
from ...spec import EMPTY_BYTE, TransportSpec

SMALLEST_BUFFER = 1 << 20
SMALLEST_FLAGS = 1 << 12
"""Size classes begin with this slot buffer (bytes) and these flags; each further class has twice as much."""


@dataclass(frozen=True)
class Way:
    """The host's part of a transport.

    Attributes:
        device: Name of the device's part, in `transports.DEVICE`.
        kind: Kind of workspaces that this way shares with no other one. Other ways must not write where LL
            packets are awaited, nor put into memory that is staged for all peers.
        buffers: Number of buffers for slots and staged tiles together, in every workspace.
        staging: Number of further buffers if some peer is not P2P-accessible.
        filled: Initial value of every byte of a new workspace's buffers; None: undefined.
        needs_reach: Whether every rank must be P2P-accessible to every other one.
        relays: Whether a relay kernel puts the tiles that the GEMM stages.
        in_library: Whether the GEMM itself calls NVSHMEM.
        peers: Function from a workspace's memory to the table of peers that the kernel reads.
    """

    device: str
    kind: str = ""
    buffers: int = SLOT_BUFFERS
    staging: int = 0
    filled: int | None = None
    needs_reach: bool = False
    relays: bool = False
    in_library: bool = False
    peers: Callable[[SymmetricMemory], Tensor | None] = lambda memory: memory.bases

    @property
    def puts(self) -> bool:
        """Returns whether NVSHMEM puts the data for peers without P2P access."""
        return self.relays or self.in_library

    def tiles_class(self, config: GemmConfig, shape: ExchangeShape) -> SizeClass:
        """Returns the smallest class of workspace that holds a call's flags, slots and staged tiles."""
        flags = slots_offset(power_of_two(max(shape.num_flags(config), SMALLEST_FLAGS)))
        buffer = power_of_two(max(shape.buffer_bytes(config), SMALLEST_BUFFER))
        return SizeClass(flags, buffer, self.buffers, self.staging, self.kind or "slots", filled=self.filled)

    def shards_class(self, nbytes: int) -> SizeClass:
        """Returns the smallest class of workspace that holds one gather buffer of `nbytes` bytes."""
        buffer, flags = power_of_two(max(nbytes, SMALLEST_BUFFER)), slots_offset(SHARD_PIECES * MAX_WORLD)
        return SizeClass(flags, buffer, 1, 0, f"gather {self.kind}".strip(), COMING_OFFSET)


STORES = Way("peer_bulk", staging=STAGING_BUFFERS)
"""Bulk stores followed by flags."""

LL_WORDS = Way("ll", "words", filled=EMPTY_BYTE, needs_reach=True)
"""The LL protocol: packets that contain their flag."""

PUTS = Way(
    "nvshmem", "puts", SLOT_BUFFERS + STAGING_BUFFERS, in_library=True, peers=lambda memory: memory.by_put
)
"""Puts to all peers, P2P-accessible or not: tiles are always staged."""


def wanted(requested: TransportSpec | None, config: GemmConfig | None = None) -> Way:
    """Returns the way of a call if all peers are P2P-accessible.

    Args:
        requested: Requested transport; None: the default.
        config: Configuration of the kernel; None for shards, which do not depend on it.

    Raises:
        ValueError: Values of 32 bits, by a transport that sends values of 16 bits.
    """
    if requested is None:
        return LL_WORDS if config is not None and config.sends_ll else STORES
    if requested.is_flag and config is not None and "f32" in (config.slot_dtype, config.out_dtype):
        raise ValueError(
            f"transport={requested.name!r} sends values of 16 bits; got slot_dtype={config.slot_dtype!r}, "
            f"out_dtype={config.out_dtype!r}"
        )
    if requested.puts:
        return PUTS
    return LL_WORDS if requested.is_flag else STORES


def obtain_way(peers: Peers, way: Way, class_of: Callable[[Way], SizeClass]) -> tuple[Workspace, Way]:
    """Returns a call's workspace, and its way: the requested one, unless some peer is not P2P-accessible.

    Args:
        peers: This rank's view of the group.
        way: Requested way.
        class_of: Function that returns the call's size class by a way.

    Raises:
        RuntimeError: Puts are needed or requested, and cannot be linked.
        SymmetricMemoryError, CaptureError: See `runtime.memory.workspace.obtain`.
    """
    arch = peers.agreed.arch
    if way.puts:

        def check_memory() -> None:
            if reason := why_no_put_memory(peers.group):
                raise RuntimeError(f"transport='nvshmem': {reason}")
            putting(way, arch, "puts are asked for (transport='nvshmem')")

        peers.prepare("puts", "asking for puts", check_memory)  # before anything is allocated
    workspace = obtain(peers, class_of(way))
    if way.needs_reach and not workspace.reaches_all:
        way, workspace = STORES, obtain(peers, class_of(STORES))
    if way.puts:
        why = "puts are asked for (transport='nvshmem')"
    elif not workspace.reaches_all:
        why = "some ranks do not reach each other's memory by loads and stores"
    else:
        return workspace, way
    return workspace, peers.prepare(why, "sending by puts", lambda: putting(way, arch, why))


def putting(way: Way, arch: str, why: str) -> Way:
    """Returns the way with puts: in the GEMM if the architecture allows it, else by a relay kernel.

    On sm_90 calls of NVSHMEM in the GEMM would cost it its registers (ptxas C7506, C7510).

    Raises:
        RuntimeError: The kernel would need puts, and the installed NVSHMEM cannot be linked.
    """
    if reason := why_no_puts():
        raise RuntimeError(f"{why}, and {reason}")
    if arch_of(arch).calls_keep_registers:
        return replace(way, device="nvshmem", in_library=True, relays=False)
    return replace(way, device="staged", in_library=False, relays=True)


def power_of_two(number: int) -> int:
    """Returns the least power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()
