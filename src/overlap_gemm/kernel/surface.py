"""The parts of a fused GEMM, as Protocols: what a mainloop, an op, a transport must have to be put together.

A kernel is an **order** of tiles, a **mainloop** that accumulates them, an **epilogue** that fills a ring of
shared-memory stages, a **comm role** that empties it through a **transport**, and, if peers send something, a
**receive role** that finishes what has arrived. An op is an object that fills these in
(`plain_gemm.PlainGemm`, `reduce_scatter.ReduceScatter`, ...); `fused_gemm.FusedGemm` composes them with a
mainloop and knows no op.

Values of type ``Any`` are traced: run-time values of the kernel, or tuples and dataclasses of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from cutlass import Int32, cute, pipeline

from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import TilePlace, WorkList
from overlap_gemm.device.traced import Extras, Fragment, Scalar, Stages
from overlap_gemm.kernel.epilogue import Visits
from overlap_gemm.kernel.operand_views import OperandViews
from overlap_gemm.kernel.work import Share, Work
from overlap_gemm.pipelines.ring import TileSender


class Order(Protocol):
    """In which order the tiles are computed: integer arithmetic, see :mod:`overlap_gemm.config.orders`."""

    def num_tiles(self, work: WorkList) -> Any:
        """Positions in the work list of all clusters together."""

    def place(self, t: Scalar, work: WorkList) -> TilePlace:
        """The tile at position ``t``."""

    def tile(self, index: Scalar, work: WorkList) -> tuple[Any, Any]:
        """``(m, n)`` of the tile with this index in its shard, the same on every rank."""


class Output(NamedTuple):
    """How an op stores its result: this, or what else its comm role understands.

    Attributes:
        tma: TMA store atom, or None where the result is stored by ordinary stores.
        tensor: the output's coordinate tensor for ``tma``, or the output itself.
    """

    tma: Any
    tensor: Any


class ReceiveRole(Protocol):
    """Finishes what peers have sent; run by whole warps, alongside the mainloop.

    Attributes:
        with_epilogue: whether the epilogue warps run it, too, after their last tile.
    """

    @property
    def with_epilogue(self) -> bool:
        """See the attributes."""

    def __call__(self, call: Any, work: Work, tally: Any, out: Any, extras: Extras) -> None:
        """One warp's loop, until nothing is left to do for this CTA."""


class Gate(Protocol):
    """What the load role waits for in front of a tile of A that others send."""

    def load(
        self,
        mainloop: Mainloop,
        res: Any,
        ops: OperandViews,
        more: Any,
        state: Any,
        place: TilePlace,
        call: Any,
        opened: Any,
        early: Any,
    ) -> tuple[Any, Any]:
        """Waits and loads, from A or from ``more`` sources; ``opened`` is what it returned before, first -1.

        ``early``: as for `loads.load_k_tiles`.

        Returns:
            The load pipeline's state after the tile, and the next ``opened``.
        """

    def end(self, call: Any) -> None:
        """All lanes of the load warp, after the last load."""


class KernelOp(Protocol):
    """What makes a fused GEMM this op.

    Attributes:
        config: the kernel's configuration.
        stage_dtype: element type of a subtile in the ring.
        order: which tile when.
        visits: what accumulators are visited as before they enter the ring: partial sums, complete, or both.
        gate: what the load role waits for, or None if A is there.
        receive: the receive role, or None if nothing arrives.
    """

    @property
    def config(self) -> GemmConfig:
        """See the attributes."""

    @property
    def stage_dtype(self) -> str:
        """See the attributes."""

    @property
    def order(self) -> Order:
        """See the attributes."""

    @property
    def visits(self) -> Visits:
        """See the attributes."""

    @property
    def gate(self) -> Gate | None:
        """See the attributes."""

    @property
    def receive(self) -> ReceiveRole | None:
        """See the attributes."""

    def share(self, exchange: Any, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """What of the product this rank computes; ``rows`` and ``cols`` are those of A and B as given."""

    def more_sources(self, mainloop: Mainloop, exchange: Any) -> Any:
        """Host side: what the gate loads from in addition to A."""

    def output(self, out: cute.Tensor, exchange: Any) -> Any:
        """Host side: how the result will be stored."""

    def begin(self, exchange: Any, near: Any) -> Any:
        """The call's run-time values; every thread, before a barrier of the CTA.

        ``near``: ``Int64``, `shared_words.near_table`: room in shared memory for the ranks' addresses.
        """

    def comm_role(self, ring: Any, stages: Stages, work: Work, call: Any, output: Any) -> None:
        """All lanes of the comm warp: empties the ring."""

    def end(self, call: Any, tally: Any, warps: int) -> None:
        """All lanes of each of a CTA's ``warps`` warps that touch the workspace, after its last role."""


class Mainloop(Protocol):
    """Computes accumulator tiles: loads, MMA, and how an accumulator lies in registers.

    Attributes:
        config: the kernel's configuration.
        load_warp, comm_warp: the warps of these roles.
        first_epilogue_warp, num_epilogue_warps: the epilogue's.
        num_barriers: 8-byte words of barrier storage that `setup` needs.
    """

    @property
    def config(self) -> GemmConfig:
        """See the attributes."""

    @property
    def load_warp(self) -> int:
        """See the attributes."""

    @property
    def comm_warp(self) -> int:
        """See the attributes."""

    @property
    def first_epilogue_warp(self) -> int:
        """See the attributes."""

    @property
    def num_epilogue_warps(self) -> int:
        """See the attributes."""

    @property
    def num_barriers(self) -> int:
        """See the attributes."""

    def operands(self, a: cute.Tensor, b: cute.Tensor, extras: Extras) -> OperandViews:
        """Host side: the TMA descriptors of A (M x K) and B (N x K), and scales of blocks."""

    def tma_of_a(self, a: cute.Tensor) -> tuple[Any, Any]:
        """Host side: atom and coordinate tensor of an A; whoever loads slices further modes away."""

    def tma_of_scales(self, scales: cute.Tensor) -> tuple[Any, Any]:
        """Host side: the same of scales of blocks of an A."""

    def setup(self, ops: OperandViews, barriers: Any, smem: Any) -> Any:
        """Pipelines and stages; the caller synchronises the cluster afterwards."""

    def adjust_registers(self, is_epilogue: bool) -> None:
        """Moves registers between the producer warps and the others."""

    def load_state(self) -> pipeline.PipelineState:
        """State of the load warp at the start."""

    def loads(self, res: Any, ops: OperandViews, row: Int32, col: Int32) -> tuple[Any, Any, Any, Any]:
        """A's and B's loads of the cluster tile at ``row`` of A and ``col`` of B, and this part's k tiles.

        What `loads.load_k_tiles` takes: two `loads.OperandLoads`, the first k tile, and how many.
        """

    def load_tail(self, res: Any, state: Any) -> None:
        """Waits until every stage was consumed."""

    def private_roles(self) -> tuple[tuple[int, Any], ...]:
        """Roles that only this mainloop has: (warp, role)."""

    def epilogue_state(self, res: Any, ops: OperandViews, group: Int32) -> Any:
        """State of an epilogue thread at the start."""

    def accumulate(self, res: Any, ops: OperandViews, state: Any) -> tuple[Any, Any]:
        """The next accumulator of this epilogue group, and the state after it."""

    def drain(self, res: Any, acc: Any, state: Any, writer: Any, ring_state: Any) -> tuple[Any, Any]:
        """Hands an accumulator to ``writer`` by subtiles; returns both states after it."""

    def store_to_stage(
        self, res: Any, ops: OperandViews, thread: Int32, fragment: Fragment, stage: Any
    ) -> None:
        """Writes a fragment, converted to the stage's type, into the swizzled stage."""

    def fragment_part(self, res: Any, ops: OperandViews, thread: Int32, subtile: Scalar) -> Any:
        """This thread's part of a tensor shaped as a subtile, in the order of its fragment."""


__all__ = [
    "Gate",
    "KernelOp",
    "Mainloop",
    "Order",
    "Output",
    "ReceiveRole",
    "TileSender",
]
