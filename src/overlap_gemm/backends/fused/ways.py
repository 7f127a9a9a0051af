"""`Way`: the host's half of a transport: in which workspace, by which table of peers, with which kernels.

Which one a call has follows from what the caller asks for (`spec.TransportSpec`), from what the kernel was
chosen for (`GemmConfig.sends_ll`), and from whom loads and stores reach. The device's half
(`overlap_gemm.transports`) does the sending.
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
    """How what a call sends travels.

    Attributes:
        device: name of the device's half, in `transports.DEVICE`.
        kind: of the workspaces that no other way may use: nobody else may write where LL words are waited
            for, nor put into what is staged for all.
        buffers: of slots and staged tiles together, of every workspace.
        staging: more of them, where some peer is beyond reach.
        filled: what every byte of a new workspace's buffers is; None: anything.
        needs_reach: whether loads and stores of every rank must reach every other.
        relays: whether a relay kernel puts what the GEMM stages.
        in_library: whether the GEMM itself calls NVSHMEM.
        peers: of a workspace's memory, the table of peers that the kernel looks up.
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
        """Whether NVSHMEM puts what goes to peers beyond reach."""
        return self.relays or self.in_library

    def tiles_class(self, config: GemmConfig, shape: ExchangeShape) -> SizeClass:
        """The smallest class of workspace that holds a call's flags, slots and staged tiles."""
        flags = slots_offset(power_of_two(max(shape.num_flags(config), SMALLEST_FLAGS)))
        buffer = power_of_two(max(shape.buffer_bytes(config), SMALLEST_BUFFER))
        return SizeClass(flags, buffer, self.buffers, self.staging, self.kind or "slots", filled=self.filled)

    def shards_class(self, nbytes: int) -> SizeClass:
        """The smallest class of workspace that holds a gather buffer of so many bytes: one buffer for all."""
        buffer, flags = power_of_two(max(nbytes, SMALLEST_BUFFER)), slots_offset(SHARD_PIECES * MAX_WORLD)
        return SizeClass(flags, buffer, 1, 0, f"gather {self.kind}".strip(), COMING_OFFSET)


STORES = Way("peer_bulk", staging=STAGING_BUFFERS)
"""Bulk stores, and flags after them."""

LL_WORDS = Way("ll", "words", filled=EMPTY_BYTE, needs_reach=True)
"""The LL protocol: words that are their own flag."""

PUTS = Way(
    "nvshmem", "puts", SLOT_BUFFERS + STAGING_BUFFERS, in_library=True, peers=lambda memory: memory.by_put
)
"""To all peers, whoever is within reach: every peer counts as beyond it, and tiles are staged always."""


def wanted(asked: TransportSpec | None, config: GemmConfig | None = None) -> Way:
    """What a call goes by where everybody is within reach; of shards, which no configuration knows, None.

    Raises:
        ValueError: values of 32 bits, by what sends those of 16.
    """
    if asked is None:
        return LL_WORDS if config is not None and config.sends_ll else STORES
    if asked.is_flag and config is not None and "f32" in (config.slot_dtype, config.out_dtype):
        raise ValueError(
            f"transport={asked.name!r} sends values of 16 bits; got slot_dtype={config.slot_dtype!r}, "
            f"out_dtype={config.out_dtype!r}"
        )
    if asked.puts:
        return PUTS
    return LL_WORDS if asked.is_flag else STORES


def obtain_way(peers: Peers, way: Way, class_of: Callable[[Way], SizeClass]) -> tuple[Workspace, Way]:
    """A call's workspace, and its way: the wanted one, unless somebody is beyond reach.

    Args:
        peers: the rank's side of the group.
        way: what is wanted.
        class_of: the call's size class by a way.

    Raises:
        RuntimeError: puts are needed or asked for, and there are none.
        SymmetricMemoryError, CaptureError: see `runtime.memory.workspace.obtain`.
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
    """The way with puts: in the GEMM, or on sm_90, where they would cost it its registers, by a relay kernel.

    (ptxas C7506, C7510.)

    Raises:
        RuntimeError: the kernel would need puts, and the installed NVSHMEM's cannot be linked.
    """
    if reason := why_no_puts():
        raise RuntimeError(f"{why}, and {reason}")
    if arch_of(arch).calls_keep_registers:
        return replace(way, device="nvshmem", in_library=True, relays=False)
    return replace(way, device="staged", in_library=False, relays=True)


def power_of_two(number: int) -> int:
    """The least one that is not less."""
    return 1 << (number - 1).bit_length()
