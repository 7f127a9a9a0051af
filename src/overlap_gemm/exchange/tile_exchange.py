"""Common part of the ops whose tiles are exchanged: each op defines only what is specific to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

from cutlass import cute

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.exchange.call import Call, end_warp
from overlap_gemm.exchange.receive import Receiver
from overlap_gemm.exchange.send import send_role
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.protocols import Order, Output
from overlap_gemm.kernel.work import Share, Work
from overlap_gemm.transports.interface import Transport


@dataclass(frozen=True)
class TileExchange(ABC):
    """An op (`protocols.KernelOp`) whose tiles are sent to peers, and whose A is complete.

    Attributes:
        config: The kernel's configuration.
        transport: Transport of a tile to a rank.
    """

    config: GemmConfig
    transport: Transport

    gate = None

    code: ClassVar[int]
    """Code of the op, for failure records."""

    @property
    @final
    def stage_dtype(self) -> str:
        """Returns the slot type: a subtile in the ring is a part of the sent data."""
        return self.config.slot_dtype

    @property
    @abstractmethod
    def order(self) -> Order:
        """Returns the order of the tiles."""

    @property
    @abstractmethod
    def receive(self) -> Receiver:
        """Returns the receive role."""

    @abstractmethod
    def share(self, exchange: Any, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """Returns this rank's share of the product; see `protocols.KernelOp.share`."""

    @final
    def view_of_b(self, b: cute.Tensor, exchange: Any, part: int) -> cute.Tensor:
        """Returns B."""
        return b

    @final
    def more_sources(self, mainloop: Any, exchange: Any) -> None:
        """Returns None: A is the only source."""
        assert self.gate is None

    @abstractmethod
    def output(self, out: cute.Tensor, exchange: Any) -> Any:
        """Returns the destination of the result; on the host."""

    def begin(self, exchange: Any, peer_table: Any) -> Call:
        """Reads the epoch; see `Call.begin`."""
        return Call.begin(exchange, peer_table=self.transport.select_peer_table(peer_table))

    @abstractmethod
    def sender(self, stages: Stages, work: Work, call: Call, output: Any) -> Any:
        """Returns the sender of tiles: a ``TileSender`` with attributes ``config`` and ``transport``."""

    def comm_role(self, ring: Any, stages: Stages, work: Work, call: Call, output: Any) -> None:
        """Sends every tile of the ring; all lanes of the comm warp."""
        send_role(ring, self.sender(stages, work, call, output), call, self.code)

    @final
    def end(self, call: Call, counters: Any, warps: int) -> None:
        """Ends a warp's access to the workspace, after its last role."""
        end_warp(call, counters, warps)


@dataclass(frozen=True)
class PartialExchange(TileExchange):
    """An op whose tiles are partial sums, which the receive role adds up and stores."""

    @property
    @final
    def visits(self) -> Visits:
        """Returns visits of partial sums: an accumulator is not a complete sum."""
        return Visits(self.config, ("partial",))

    def output(self, out: cute.Tensor, exchange: Any) -> Any:
        """Returns the output for ordinary stores."""
        return Output(None, out)
