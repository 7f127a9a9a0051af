"""What the ops have in common whose tiles are exchanged, so that each of them says what is its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

from cutlass import cute

from overlap_gemm.device.traced import Scalar, Stages
from overlap_gemm.kernels.call import Call, end_warp
from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.epilogue import Visits
from overlap_gemm.kernels.own import OwnSums
from overlap_gemm.kernels.receive import Receiver
from overlap_gemm.kernels.send import send_role
from overlap_gemm.kernels.surface import Order, Output
from overlap_gemm.kernels.work import Share, Work
from overlap_gemm.transports.base import Transport


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
        sent, own = self._sent(work), None
        if self.own_sums is not None:
            own = partial(self._drain_own, ring, stages, work.after(sent.num_tiles), call, output)
        send_role(ring, self.sender(stages, sent, call, output), call, self.code, own)

    @final
    def publish_role(self, ring: Any, stages: Stages, work: Work, call: Call, output: Any) -> None:
        """See `surface.KernelOp`."""
        self.transport.publish_all(ring, self.sender(stages, self._sent(work), call, output))

    @property
    def own_sums(self) -> OwnSums | None:
        """How the epilogue reduces own tiles, which come last; None: they are sent to the own slots."""
        return None

    def own_sender(self, stages: Stages, own: Work, call: Call, output: Any) -> Any:
        """Where own tiles go from the ring's stages (a ``TileSender``); None: the epilogue has stored them.

        They are published by the comm lane itself, whoever publishes those of others.
        """
        return None

    def _drain_own(self, ring: Any, stages: Stages, own: Work, call: Call, output: Any, state: Any) -> None:
        sender = self.own_sender(stages, own, call, output)
        if sender is None:
            ring.pass_on(state, own.num_tiles * self.config.subtiles)
        else:
            replace(ring, publisher=None).drain(state, self.config.subtiles, sender)

    def _sent(self, work: Work) -> Work:
        """The tiles that are sent."""
        if self.own_sums is None:
            return work
        order: Any = self.order
        return work._replace(num_tiles=work.before(order.num_sent(work.whole)))

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
