"""The parts of a fused GEMM, as Protocols: the interfaces of mainloop, op and transport.

- An **order** lists the tiles, and a **mainloop** accumulates them.
- An **epilogue** fills a ring of shared-memory stages.
- A **comm role** empties the ring through a **transport**.
- If peers send something, a **receive role** finishes what has arrived.

An op is an object that has these (`plain_gemm.PlainGemm`, `reduce_scatter.ReduceScatter`, ...).
`fused_gemm.FusedGemm` composes them with a mainloop and is independent of the op.

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
    """Order in which tiles are computed: integer arithmetic, see :mod:`overlap_gemm.config.orders`."""

    def num_tiles(self, work: WorkList) -> Any:
        """Returns the number of positions in the work list of all clusters together."""

    def place(self, t: Scalar, work: WorkList) -> TilePlace:
        """Returns the tile at position ``t``."""

    def tile(self, index: Scalar, work: WorkList) -> tuple[Any, Any]:
        """Returns ``(m, n)`` of the tile with this index in its shard, the same on every rank."""


class Output(NamedTuple):
    """Destination of an op's result: this, or another object that its comm role supports.

    Attributes:
        tma: TMA store atom, or None if the result is stored by ordinary stores.
        tensor: Coordinate tensor of the output for ``tma``, or the output itself.
    """

    tma: Any
    tensor: Any


class ReceiveRole(Protocol):
    """Finishes what peers have sent; run by full warps, alongside the mainloop.

    Attributes:
        with_epilogue: Whether the epilogue warps run it, too, after their last tile.
    """

    @property
    def with_epilogue(self) -> bool:
        """Returns whether the epilogue warps run the role, too."""

    def __call__(self, call: Any, work: Work, counters: Any, out: Any, extras: Extras) -> None:
        """Runs one warp's loop, until no unit is left for this CTA."""


class Gate(Protocol):
    """Wait of the load role before a tile of A that peers send: acquire at system scope, proxy fence."""

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
        """Waits and loads, from A or from ``more`` sources; ``opened`` is the previous result, at first -1.

        ``early``: Number of k tiles of B in flight, as in `loads.load_k_tiles`.

        Returns:
            The load pipeline's state after the tile, and the next ``opened``.
        """

    def end(self, call: Any) -> None:
        """Ends the loads of a call; all lanes of the load warp, after the last load."""


class KernelOp(Protocol):
    """The parts of a fused GEMM that are specific to an op.

    Attributes:
        config: The kernel's configuration.
        stage_dtype: Element type of a subtile in the ring.
        order: Order of the tiles.
        visits: Visits of accumulators before they enter the ring: as partial sums, complete sums, or both.
        gate: Wait of the load role, or None if A is complete.
        receive: Receive role, or None if nothing arrives.
    """

    @property
    def config(self) -> GemmConfig:
        """Returns the kernel's configuration."""

    @property
    def stage_dtype(self) -> str:
        """Returns the element type of a subtile in the ring."""

    @property
    def order(self) -> Order:
        """Returns the order of the tiles."""

    @property
    def visits(self) -> Visits:
        """Returns the visits of accumulators before they enter the ring."""

    @property
    def gate(self) -> Gate | None:
        """Returns the wait of the load role, or None."""

    @property
    def receive(self) -> ReceiveRole | None:
        """Returns the receive role, or None."""

    def share(self, exchange: Any, rows: Scalar, cols: Scalar, out: Any) -> Share:
        """Returns this rank's share of the product.

        ``rows`` and ``cols`` are those of A and B; of several matrices B ``cols`` and ``out`` are tuples.
        """

    def view_of_b(self, b: cute.Tensor, exchange: Any, part: int) -> cute.Tensor:
        """Returns B, or B cut along K for the gate, ``(N, K of a slice, slices)``; on the host.

        ``part``: Number of the matrix along K (`OperandViews.parts_of_k`).
        """

    def more_sources(self, mainloop: Mainloop, exchange: Any) -> Any:
        """Returns sources of the gate in addition to A; on the host."""

    def output(self, out: cute.Tensor, exchange: Any) -> Any:
        """Returns the destination of the result; on the host."""

    def begin(self, exchange: Any, peer_table: Any) -> Any:
        """Returns the call's run-time values; every thread, before a barrier of the CTA.

        ``peer_table``: ``Int64`` shared memory for the ranks' addresses, from `shared_words.smem_peer_table`.
        """

    def comm_role(self, ring: Any, stages: Stages, work: Work, call: Any, output: Any) -> None:
        """Empties the ring; all lanes of the comm warp."""

    def end(self, call: Any, counters: Any, warps: int) -> None:
        """Ends a warp's access to the workspace; all lanes, after a role that accesses the workspace.

        There are ``warps`` such calls in a CTA (`FusedGemm`). Each adds one to ``counters.ended`` (acquire
        and release, CTA scope). The warp that gets ``warps - 1`` is the last, and ends the CTA's part of the
        call.
        """


class Mainloop(Protocol):
    """Computes accumulator tiles: loads, MMA, and the layout of accumulators in registers.

    Attributes:
        config: The kernel's configuration.
        load_warp, comm_warp: Numbers of the warps of these roles.
        first_epilogue_warp, num_epilogue_warps: The epilogue's warps.
        num_barriers: Number of 8-byte words of barrier storage that `setup` needs.
    """

    @property
    def config(self) -> GemmConfig:
        """Returns the kernel's configuration."""

    @property
    def load_warp(self) -> int:
        """Returns the number of the load warp."""

    @property
    def comm_warp(self) -> int:
        """Returns the number of the comm warp."""

    @property
    def first_epilogue_warp(self) -> int:
        """Returns the number of the first epilogue warp."""

    @property
    def num_epilogue_warps(self) -> int:
        """Returns the number of epilogue warps."""

    @property
    def num_barriers(self) -> int:
        """Returns the number of 8-byte words of barrier storage that `setup` needs."""

    def operands(self, a: cute.Tensor, b: cute.Tensor, extras: Extras) -> OperandViews:
        """Returns TMA descriptors of A (M x K) and B (N x K), and of scales of blocks; on the host."""

    def tma_of_a(self, a: cute.Tensor) -> tuple[Any, Any]:
        """Returns atom and coordinate tensor of an A, whose further modes the load slices; on the host."""

    def tma_of_scales(self, scales: cute.Tensor) -> tuple[Any, Any]:
        """Returns atom and coordinate tensor of scales of blocks of an A; on the host."""

    def setup(self, ops: OperandViews, barriers: Any, smem: Any) -> Any:
        """Creates pipelines and stages; the caller synchronises the cluster afterwards."""

    def adjust_registers(self, is_epilogue: bool) -> None:
        """Moves registers between the producer warps and the others."""

    def load_state(self) -> pipeline.PipelineState:
        """Returns the initial state of the load warp."""

    def loads(self, res: Any, ops: OperandViews, row: Int32, col: Int32) -> tuple[Any, Any, Any, Any]:
        """Returns the loads of the cluster tile at ``row`` of A and ``col`` of B, and this part's k tiles.

        These are arguments of `loads.load_k_tiles`: A's and B's `loads.OperandLoads`, the first k tile, and
        the number of k tiles.
        """

    def load_tail(self, res: Any, state: Any) -> None:
        """Waits until every stage was consumed."""

    def private_roles(self) -> tuple[tuple[int, Any], ...]:
        """Returns roles that only this mainloop has: (warp, role)."""

    def epilogue_state(self, res: Any, ops: OperandViews, group: Int32) -> Any:
        """Returns the initial state of an epilogue thread."""

    def accumulate(self, res: Any, ops: OperandViews, state: Any) -> tuple[Any, Any]:
        """Returns the next accumulator of this epilogue group, and the state after it."""

    def drain(self, res: Any, acc: Any, state: Any, writer: Any, ring_state: Any) -> tuple[Any, Any]:
        """Passes an accumulator to ``writer`` by subtiles; returns both states after it."""

    def store_to_stage(
        self, res: Any, ops: OperandViews, thread: Int32, fragment: Fragment, stage: Any
    ) -> None:
        """Writes a fragment, converted to the stage's type, into the swizzled stage."""

    def fragment_part(self, res: Any, ops: OperandViews, thread: Int32, subtile: Scalar) -> Any:
        """Returns this thread's part of a tensor shaped as a subtile, in the order of its fragment."""


__all__ = [
    "Gate",
    "KernelOp",
    "Mainloop",
    "Order",
    "Output",
    "ReceiveRole",
    "TileSender",
]
