"""`TransportHost`: host part of a transport: its workspace, its table of peers and its choice of kernels.

The transport of a call depends on the configured transport (`spec.TransportSpec`), on the configuration
(`GemmConfig.sends_ll`), and on the P2P access between the ranks. It is the same on all ranks of a call. The
device part, which stores and signals, is in `overlap_gemm.transports`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ...config.arch import arch_of
from ...config.gemm_config import GemmConfig
from ...exchange.geometry import (
    MAX_WORLD,
    NEXT_EPOCH_OFFSET,
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
"""Extents of the smallest size class: bytes of a buffer, and number of flags; others are powers of two."""


@dataclass(frozen=True)
class TransportHost:
    """Host part of a transport.

    Attributes:
        device: Name of the device part, as `transports.device_part` takes it.
        kind: Kind of its workspaces; "": those of bulk stores. LL packets and puts need separate workspaces:
            other transports must not write where packets are awaited, nor where tiles are staged for all
            peers.
        buffers: Number of equal buffers in every workspace: of slots, and for `PUTS` of staged tiles.
        staging: Number of further buffers, allocated only if some peer is not P2P-accessible.
        filled: Value of every byte of the buffers at allocation; None: undefined.
        needs_p2p: Whether all ranks must have P2P access to each other.
        relays: Whether a relay kernel puts the tiles that the GEMM stages.
        in_library: Whether the GEMM itself calls NVSHMEM.
        peers: Function from a workspace's memory to the tensor of peers' addresses that the kernel reads.
    """

    device: str
    kind: str = ""
    buffers: int = SLOT_BUFFERS
    staging: int = 0
    filled: int | None = None
    needs_p2p: bool = False
    relays: bool = False
    in_library: bool = False
    peers: Callable[[SymmetricMemory], Tensor | None] = lambda memory: memory.bases

    @property
    def puts(self) -> bool:
        """Returns whether NVSHMEM puts data, from a relay kernel or from the GEMM."""
        return self.relays or self.in_library

    def tiles_class(self, config: GemmConfig, shape: ExchangeShape) -> SizeClass:
        """Returns the size class of a call that exchanges tiles: flags, slots and staged tiles.

        Args:
            config: Configuration of the kernel, which determines the tiles.
            shape: Shape of the call.
        """
        flags = slots_offset(power_of_two(max(shape.num_flags(config), SMALLEST_FLAGS)))
        buffer = power_of_two(max(shape.buffer_bytes(config), SMALLEST_BUFFER))
        return SizeClass(flags, buffer, self.buffers, self.staging, self.kind or "slots", filled=self.filled)

    def shards_class(self, nbytes: int) -> SizeClass:
        """Returns the size class of a call that sends x: one gather buffer of at least `nbytes` bytes."""
        buffer, flags = power_of_two(max(nbytes, SMALLEST_BUFFER)), slots_offset(SHARD_PIECES * MAX_WORLD)
        return SizeClass(flags, buffer, 1, 0, f"gather {self.kind}".strip(), NEXT_EPOCH_OFFSET)


STORES = TransportHost("peer_bulk", staging=STAGING_BUFFERS)
"""Bulk stores to P2P-accessible peers, each followed by a flag; the fallback of `LL_PACKETS`."""

LL_PACKETS = TransportHost("ll", "words", filled=EMPTY_BYTE, needs_p2p=True)
"""LL protocol: each packet contains its flag. The buffers are filled with the value of an empty packet."""

PUTS = TransportHost(
    "nvshmem", "puts", SLOT_BUFFERS + STAGING_BUFFERS, in_library=True, peers=lambda memory: memory.by_put
)
"""NVSHMEM puts to all peers, P2P-accessible or not: every workspace has staging buffers."""


def requested_transport(requested: TransportSpec | None, config: GemmConfig | None = None) -> TransportHost:
    """Returns the transport of a call before P2P access is taken into account (`obtain_transport`).

    Args:
        requested: Configured transport; None: LL packets if the configuration sends them, else stores.
        config: Configuration of the kernel; None if x is sent, which does not depend on it.

    Raises:
        ValueError: The configuration has slots or results of 32 bits, and LL packets are configured.
    """
    if requested is None:
        return LL_PACKETS if config is not None and config.sends_ll else STORES
    if requested.is_flag and config is not None and "f32" in (config.slot_dtype, config.out_dtype):
        raise ValueError(
            f"transport={requested.name!r} sends values of 16 bits; got slot_dtype={config.slot_dtype!r}, "
            f"out_dtype={config.out_dtype!r}"
        )
    if requested.puts:
        return PUTS
    host = LL_PACKETS if requested.is_flag else STORES
    return replace(host, device=requested.device) if requested.device else host


def obtain_transport(
    peers: Peers, transport: TransportHost, class_of: Callable[[TransportHost], SizeClass]
) -> tuple[Workspace, TransportHost]:
    """Returns the workspace of a call and its final transport. Collective at the first call of a size class.

    LL packets are replaced by stores, and stores by puts, if some ranks have no P2P access to each other. The
    workspace belongs to `peers` and is shared by all calls that fit into it.

    Args:
        peers: State of this rank in the group.
        transport: Result of `requested_transport`.
        class_of: Function from the host part of a transport to the size class of the call.

    Raises:
        RuntimeError: On every rank: puts are needed or configured, and NVSHMEM cannot be linked. If that is
            so on some ranks only, the error is a DisagreementError.
        SymmetricMemoryError: On every rank, if one of them cannot allocate
            (`runtime.memory.workspace.obtain`).
        CaptureError: An allocation is needed, and a CUDA graph is being captured.
    """
    arch = peers.agreed.arch
    if transport.puts:

        def check_memory() -> None:
            if reason := why_no_put_memory(peers.group):
                raise RuntimeError(f"transport='nvshmem': {reason}")
            with_puts(transport, arch, "puts are requested (transport='nvshmem')")

        peers.prepare("puts", "requesting puts", check_memory)  # before anything is allocated
    workspace = obtain(peers, class_of(transport))
    if transport.needs_p2p and not workspace.has_p2p:
        transport, workspace = STORES, obtain(peers, class_of(STORES))
    if transport.puts:
        why = "puts are requested (transport='nvshmem')"
    elif not workspace.has_p2p:
        why = "some ranks have no P2P access to each other's memory"
    else:
        return workspace, transport
    return workspace, peers.prepare(why, "sending by puts", lambda: with_puts(transport, arch, why))


def with_puts(transport: TransportHost, arch: str, why: str) -> TransportHost:
    """Returns the transport with puts by the GEMM if the architecture allows calls in it, else by a relay.

    On sm_90 a call of NVSHMEM in the GEMM disables the transfer of registers between warps (ptxas C7506,
    C7510).

    Args:
        transport: Host part to change.
        arch: Architecture of all ranks.
        why: Reason that puts are needed, for the error message.

    Raises:
        RuntimeError: The installed NVSHMEM cannot be linked.
    """
    if reason := why_no_puts():
        raise RuntimeError(f"{why}, and {reason}")
    if arch_of(arch).calls_keep_registers:
        return replace(transport, device="nvshmem", in_library=True, relays=False)
    return replace(transport, device="staged", in_library=False, relays=True)


def power_of_two(number: int) -> int:
    """Returns `number` rounded up to a power of two; `number` is at least 1."""
    return 1 << (number - 1).bit_length()
