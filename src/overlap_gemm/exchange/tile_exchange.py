"""What the ops have in common whose tiles are exchanged, so that each of them says what is its own."""

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
from overlap_gemm.kernel.surface import Order, Output
from overlap_gemm.kernel.work import Share, Work
from overlap_gemm.transports.interface import Transport


@dataclass(frozen=True)
class TileExchange(ABC):
    """An op (`surface.KernelOp`) whose tiles go to peers, and whose A is there.

    Attributes:
        config: the kernel's configuration.
        transport: how a tile reaches a rank.
    """

    config: GemmConfig
    transport: Transport

    gate = None

    code: ClassVar[int]
    """The op's, for failure records."""

    @property
    @final
    def stage_dtype(self) -> str:
        """A subtile in the ring is a part of what travels."""
        return self.config.slot_dtype

    @property
    @abstractmethod
    def order(self) -> Order:
        """See `surface.KernelOp`."""

    @property
    @abstractmethod
    def receive(self) -> Receiver:
        """See `surface.KernelOp`."""

    @abstractmethod
    def share(self, exchange: Any, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """See `surface.KernelOp`."""

    @final
    def more_sources(self, mainloop: Any, exchange: Any) -> None:
        """A is all there is to load."""
        assert self.gate is None

    @abstractmethod
    def output(self, out: cute.Tensor, exchange: Any) -> Any:
        """See `surface.KernelOp`."""

    def begin(self, exchange: Any, near: Any) -> Call:
        """Reads the epoch."""
        return Call.begin(exchange, near=self.transport.looks_up_in(near))

    @abstractmethod
    def sender(self, stages: Stages, work: Work, call: Call, output: Any) -> Any:
        """Where tiles go: a ``TileSender`` with attributes ``config`` and ``transport``."""

    def comm_role(self, ring: Any, stages: Stages, work: Work, call: Call, output: Any) -> None:
        """See `surface.KernelOp`."""
        send_role(ring, self.sender(stages, work, call, output), call, self.code)

    @final
    def end(self, call: Call, tally: Any, warps: int) -> None:
        """See `surface.KernelOp`."""
        end_warp(call, tally, warps)


@dataclass(frozen=True)
class PartialExchange(TileExchange):
    """An op whose tiles are partial sums, which the receive role adds up and stores."""

    @property
    @final
    def visits(self) -> Visits:
        """An accumulator is no complete sum."""
        return Visits(self.config, ("partial",))

    def output(self, out: cute.Tensor, exchange: Any) -> Any:
        """By ordinary stores."""
        return Output(None, out)
