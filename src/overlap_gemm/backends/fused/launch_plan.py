"""`Plan`: the launches, copies and waits that fused calls of one signature share, made at the first of them.

stream            after the preceding launch   product, product ...        continues after both
second stream                                  copies or a relay kernel, alongside the products
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ...config.gemm_config import GemmConfig
from ...exchange.geometry import END, FLAG_BYTES, Puts
from ...runtime.executor import Executor
from ...runtime.identity import after_skipped
from ...runtime.memory.workspace import Workspace
from ...spec import OPS, PATTERNS

Weight: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""A weight; or a pair of one shape, which a kernel reads as one (`kernel.operand_views.interleaved`)."""


class Product(NamedTuple):
    """The launch of one weight's product.

    Attributes:
        config: Configuration of the kernel; its majors, dtypes and epilogue are those of the tensors.
        gemm: Compiled kernel.
        num_clusters: Grid of the launch, in clusters.
    """

    config: GemmConfig
    gemm: Any
    num_clusters: int


class SideStreamWork(Protocol):
    """Work on a second stream, alongside the products, that sends data of this rank."""

    def stage(self, executor: Executor, second: int, addresses: tuple[int, int]) -> None:
        """Queues the work that must run before the products, which fill the SMs.

        Copies within a GPU are kernels, so they need SMs.
        """

    def send(self, executor: Executor, second: int, addresses: tuple[int, int], exchange: Any) -> None:
        """Queues the sending, after the first product; `own`: addresses of the shard's rows and scales."""


class OwnShard(NamedTuple):
    """Sizes of the pieces of this rank's shard, and the offset of the scales at a peer.

    Attributes:
        row_bytes: Bytes of all rows.
        scale_bytes: Bytes of the rows' scales; 0 if there are none.
        scales: Bytes from the shard's first row to its scales.
    """

    row_bytes: int
    scale_bytes: int = 0
    scales: int = 0

    def copy(self, executor: Executor, stream: int, target: int, addresses: tuple[int, int]) -> None:
        """Queues the copies of rows and scales (`own`: their addresses) to the shard at address `target`."""
        rows, scales = addresses
        executor.copy(stream, target, rows, self.row_bytes)
        if self.scale_bytes:
            executor.copy(stream, target + self.scales, scales, self.scale_bytes)


@dataclass(frozen=True)
class Copies:
    """The local shard sent by copy engines to one peer after the other, each copy followed by its flag.

    Nothing else is queued there while a kernel waits for shards: another kernel would starve.

    Attributes:
        places: Addresses of the shard and its flag at each peer, in the order in which peers read them.
        coming: Address of the value of the next flag (`geometry.COMING_OFFSET`).
        shard: Local shard.
    """

    places: tuple[tuple[int, int], ...]
    coming: int
    shard: OwnShard

    def stage(self, executor: Executor, second: int, addresses: tuple[int, int]) -> None:
        """Does nothing: the copies read the shard where it is."""

    def send(self, executor: Executor, second: int, addresses: tuple[int, int], exchange: Any) -> None:
        """Queues the copies of shard and flag to each peer; see `Travel.send`."""
        for target, flag in self.places:
            self.shard.copy(executor, second, target, addresses)
            executor.copy(second, flag, self.coming, FLAG_BYTES)


@dataclass(frozen=True)
class RelayKernel:
    """Puts of a relay kernel (`exchange.relay`): staged tiles, or the local shard.

    Attributes:
        relay: Compiled kernel.
        op: Name of the op.
        puts: Two lists of puts.
        place: Address to which the local shard is copied first: NVSHMEM puts from its own memory alone.
        shard: Local shard; None if the data to put is there already.
    """

    relay: Any
    op: str
    puts: tuple[Puts, ...]
    place: int = 0
    shard: OwnShard | None = None

    def stage(self, executor: Executor, second: int, addresses: tuple[int, int]) -> None:
        """Copies the local shard to its place, if there is one; see `Travel.stage`."""
        if self.shard is not None:
            self.shard.copy(executor, second, self.place, addresses)

    def send(self, executor: Executor, second: int, addresses: tuple[int, int], exchange: Any) -> None:
        """Launches the relay kernel; see `Travel.send`."""
        self.relay(OPS[self.op].code, self.puts, exchange, second)


@dataclass(frozen=True)
class Plan:
    """Everything that calls of one op and signature have in common: a call is a plan and its tensors.

    In a group of one it is the plan of a plain GEMM.

    Attributes:
        executor: Executor that launches the kernels.
        pattern: Name of the communication pattern in `overlap_gemm.spec.PATTERNS`.
        products: A launch for each weight; none if the caller multiplies, shard by shard (`by_shards`).
        workspace: Workspace of the exchange; None in a group of one.
        exchange: The kernels' `Exchange` (`exchange.arguments`), without the fields of a single call.
        gathering: The kernels' `Gathering` (`gather.gathering`), without the fields of a single call; None
            if no operand is gathered.
        side_work: Work that sends on a second stream; None if the kernel sends everything.
        gate: Compiled kernel (`gather.gate`) that waits for a shard. It also ends a call of several products
            of which one could not be launched.
        signature: Digest of the facts that the ranks' calls have in common (`runtime.identity`).
        counts: Counts of the finished units of each row, zeros between calls; None if nothing is counted.
    """

    executor: Executor
    pattern: str
    products: tuple[Product, ...] = ()
    workspace: Workspace | None = None
    exchange: Any = None
    _: KW_ONLY
    gathering: Any = None
    side_work: SideStreamWork | None = None
    gate: Any = None
    signature: int = 0
    counts: Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Returns whether the plan may be launched: until its workspace is closed, or its emulator ends."""
        if not self.executor.is_open:
            return False
        return self.workspace is None or self.workspace.is_open

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """Returns the rows of A, and of B, after which tiles restart with another owner's; None: nowhere."""
        pattern = PATTERNS[self.pattern]
        step = None if self.workspace is None or pattern.to_all else self.exchange.shard_rows
        return step if pattern.cut == "rows" else None, step if pattern.cut == "columns" else None

    def launch(
        self,
        a: Tensor,
        weights: Sequence[Weight],
        outs: Sequence[Tensor],
        extras: Sequence[tuple[Tensor, ...] | None],
        kept: Tensor | None = None,
    ) -> None:
        """Starts a call of this rank, after every other fused launch of its device.

        Args:
            a: `[M, K]`, see `tma_operands.aligned`; if gathered, the local shard, `[max(rows, 1), K]`.
            weights: Rows of each weight that this rank multiplies, aligned like `a`; of a pair both.
            outs: Result of the op for each weight, of at least one row, with rows at multiples of 16 bytes.
            extras: Operands of each product's epilogue (`build`), see `tma_operands.aligned_vector`; None if
                there are none. If a gathered operand has scales, the first are the local shard's, in the
                layout in which they are sent.
            kept: `[M, K]`, contiguous: destination of the gathered operand; None if it is not needed.

        Raises:
            CommTimeoutError, OverlappingCallsError, MismatchedCallsError: An earlier call here failed.
        """
        executor = self.executor
        flat: Any = chain(*weights) if isinstance(weights[0], tuple) else weights
        used = a, *flat, *outs, *chain(*filter(None, extras)), kept
        with executor.active(*used) as stream:
            operands = tuple(zip(weights, outs, extras, strict=True))
            if self.workspace is None:  # waits for no peer, so it may run alongside any kernel
                for product, tensors in zip(self.products, operands, strict=True):
                    product.gemm(a, *tensors, None, product.num_clusters, stream)
                return
            self.workspace.raise_if_failed()
            with executor.order.lock:
                exchange = self.next_call(stream)
                scales = 0 if self.gathering is None else _scales_address(self.gathering, extras[0])
                if self.side_work is None:
                    failure = self._multiply(exchange, a, scales, operands, kept, stream)
                else:
                    addresses, side_work = (a.data_ptr(), scales), self.side_work
                    with executor.fork() as second:
                        side_work.stage(executor, second, addresses)
                        send = partial(side_work.send, executor, second, addresses, exchange)
                        failure = self._multiply(exchange, a, scales, operands, kept, stream, send)
                if failure:
                    raise failure

    def next_call(self, stream: int) -> Any:
        """Returns the next call's `exchange`, after every other fused launch; the order's lock is held."""
        workspace, order = self.workspace, self.executor.order
        assert workspace is not None, "a group of one exchanges nothing"
        if order.follow(stream):
            workspace.captured = True
        signature = after_skipped(self.signature, workspace.group.progress.skipped)
        return self.exchange.of_call(order.next_call(), signature)

    def _multiply(
        self,
        exchange: Any,
        a: Tensor,
        scales: int,
        operands: Sequence[tuple[Weight, Tensor, tuple[Tensor, ...] | None]],
        kept: Tensor | None,
        stream: int,
        send: Callable[[], None] | None = None,
    ) -> BaseException | None:
        """Launches the products; returns the error if one failed. A call with a launched product is ended.

        `send` follows the first launch. The next launch may load its kernel, which may block until the device
        is idle (CUDA programming guide, lazy loading). The first product waits for the peers' shards until
        then. If ranks sent their shards after all launches, they would wait for each other.
        """
        assert self.workspace is not None
        arguments, last = exchange, len(self.products) - 1
        if self.gathering is not None:
            flat = None if kept is None else kept.view(-1)
            after = self.gathering.after
            if after is not None:
                after = type(after)(scales, *after[1:])
            arguments = self.gathering._replace(
                exchange=exchange, local_shard=a.data_ptr(), kept=flat, after=after
            )
        is_launched = False
        try:
            for i, (product, tensors) in enumerate(zip(self.products, operands, strict=True)):
                if last:
                    arguments = arguments._replace(is_first=int(i == 0), is_last=int(i == last))
                product.gemm(a, *tensors, arguments, product.num_clusters, stream)
                if i == 0:
                    is_launched = True
                    self.workspace.group.progress.events += 1
                    if send is not None:
                        send()
        except BaseException as error:
            if not (is_launched and last):
                raise
            self.gate(END, 0, exchange, stream)
            return error
        return None


def _scales_address(gathering: Any, extras: tuple[Tensor, ...] | None) -> int:
    """Returns the address of the scales of a gathered operand; 0 if it has none."""
    if gathering.after is None:
        return 0
    assert extras is not None, "an operand with scales is gathered with them"
    return extras[0].data_ptr()
