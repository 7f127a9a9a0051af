"""`Plan`: launches, copies and waits of a fused call. Calls of one signature share a plan.

stream            after the preceding fused launch   product, product ...   continues after both streams
second stream                                        copies or a relay kernel, alongside the products
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ...config.gemm_config import GemmConfig
from ...exchange.geometry import END, FLAG_BYTES, Puts
from ...runtime.executor import Executor
from ...runtime.identity import after_skipped, with_options
from ...runtime.memory.workspace import Workspace
from ...spec import OPS, PATTERNS

Weight: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""A weight `[N, K]`; or two of one shape that a kernel reads as one (`kernel.operand_views.interleaved`)."""


class Product(NamedTuple):
    """Launch of one weight's product.

    Attributes:
        config: Configuration of the kernel, for the layouts and dtypes of the call's tensors.
        gemm: Compiled kernel.
        num_clusters: Number of clusters in the persistent grid; all are resident at once.
    """

    config: GemmConfig
    gemm: Any
    num_clusters: int


class SideStreamWork(Protocol):
    """Work on a second stream that sends data of this rank while the products run."""

    def stage(self, executor: Executor, second: int, addresses: tuple[int, ...]) -> None:
        """Queues the work that must precede the products.

        Copies within a GPU are kernels, which need SMs; the products occupy all of them.

        Args:
            executor: Executor that launches the kernels.
            second: Handle of the second stream.
            addresses: Addresses of A, or of each part of a list, and of its scales (0 without scales).
        """

    def send(self, executor: Executor, second: int, addresses: tuple[int, ...], exchange: Any) -> None:
        """Queues the transfers, after the launch of the first product.

        Args:
            executor: Executor that launches the kernels.
            second: Handle of the second stream.
            addresses: As in `stage`.
            exchange: The call's `Exchange` (`exchange.arguments`).
        """


class LocalShard(NamedTuple):
    """Layout of the local shard of a gathered operand, for copies to a gather buffer.

    Attributes:
        row_bytes: Bytes of all local rows.
        scale_bytes: Bytes of their scales; 0 if there are none.
        scales: Bytes from the shard's start to its scales in the gather buffer.
    """

    row_bytes: int
    scale_bytes: int = 0
    scales: int = 0

    def copy(self, executor: Executor, stream: int, target: int, addresses: tuple[int, ...]) -> None:
        """Queues copies of rows and scales.

        Args:
            executor: Executor that copies.
            stream: Handle of the stream.
            target: Address of the shard in the local or a peer's gather buffer.
            addresses: Addresses of the local rows and scales.
        """
        rows, scales = addresses
        executor.copy(stream, target, rows, self.row_bytes)
        if self.scale_bytes:
            executor.copy(stream, target + self.scales, scales, self.scale_bytes)


@dataclass(frozen=True)
class Copies:
    """Transfer of the local shard by copy engines to each peer in turn, followed by its flag there.

    Copy engines use no SM. The second stream has nothing else: a kernel there would find no free SM while a
    product waits for shards.

    Attributes:
        places: Addresses of the shard and its flag at each peer; the peer that reads it first comes first.
        next_epoch: Local address of the next flag's value (`geometry.NEXT_EPOCH_OFFSET`), which is copied.
        shard: Layout of the local shard.
    """

    places: tuple[tuple[int, int], ...]
    next_epoch: int
    shard: LocalShard

    def stage(self, executor: Executor, second: int, addresses: tuple[int, ...]) -> None:
        """Does nothing: the copies read x of the caller."""

    def send(self, executor: Executor, second: int, addresses: tuple[int, ...], exchange: Any) -> None:
        """Queues for each peer the copy of the shard, then of the flag; see `SideStreamWork.send`."""
        for target, flag in self.places:
            self.shard.copy(executor, second, target, addresses)
            executor.copy(second, flag, self.next_epoch, FLAG_BYTES)


@dataclass(frozen=True)
class RelayKernel:
    """Puts by a relay kernel (`exchange.relay`), of staged tiles or of the local shard.

    Attributes:
        relay: Compiled relay kernel.
        op: Name of the op.
        puts: Two lists of puts; the kernel finishes its share of the first before the second.
        place: Address in the local workspace to which the shard is copied first, since NVSHMEM puts from
            symmetric memory only; 0 if tiles are put.
        shard: Layout of the local shard; None if it is empty, or if tiles are put.
    """

    relay: Any
    op: str
    puts: tuple[Puts, ...]
    place: int = 0
    shard: LocalShard | None = None

    def stage(self, executor: Executor, second: int, addresses: tuple[int, ...]) -> None:
        """Queues the copy of the local shard to `place`, if there is a shard; see `SideStreamWork.stage`."""
        if self.shard is not None:
            self.shard.copy(executor, second, self.place, addresses)

    def send(self, executor: Executor, second: int, addresses: tuple[int, ...], exchange: Any) -> None:
        """Launches the relay kernel, which waits for the data itself; see `SideStreamWork.send`."""
        self.relay(OPS[self.op].code, self.puts, exchange, second)


@dataclass(frozen=True)
class Plan:
    """Everything that calls of one op and signature share; a call adds only its tensors.

    A plan does not own its workspace: that belongs to the group, and other plans use it, too. In a group of
    one the plan launches plain GEMMs.

    Attributes:
        executor: Executor that launches the kernels.
        pattern: Communication pattern, a name of `spec.PATTERNS`.
        products: A launch for each weight; none if the caller multiplies each shard separately (`by_shards`).
        workspace: Workspace of the exchange; None in a group of one.
        exchange: The kernels' `Exchange` (`exchange.arguments`), without the fields that each call sets.
        gathering: The kernels' `Gathering` (`gather.gathering`), without the fields that each call sets; None
            if x is not sent.
        side_work: Transfers on a second stream; None if the product's kernel sends everything.
        gate: Compiled gate kernel (`gather.gate`), which waits for a shard or ends a call; None if neither
            occurs.
        signature: Digest of the facts that are equal in all ranks' calls (`runtime.identity`).
        counts: Counts of finished units of each row, int32, zeros between calls; None if no epilogue counts.
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
        """Returns whether the plan can be launched: its workspace is not closed, nor its emulator."""
        if not self.executor.is_open:
            return False
        return self.workspace is None or self.workspace.is_open

    def signed(self, options: str) -> Plan:
        """Returns the plan of calls with these options (`runtime.identity.with_options`)."""
        if self.workspace is None:
            return self
        return replace(self, signature=with_options(self.signature, options))

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """Returns (rows of A, rows of B) after which tiles restart at a shard; None: they do not."""
        pattern = PATTERNS[self.pattern]
        step = None if self.workspace is None or pattern.to_all else self.exchange.shard_rows
        return step if pattern.cut == "rows" else None, step if pattern.cut == "columns" else None

    def launch(
        self,
        a: Tensor | tuple[Tensor, ...],
        weights: Sequence[Weight],
        outs: Sequence[Tensor],
        extras: Sequence[tuple[Tensor, ...] | None],
        kept: Tensor | tuple[Tensor, ...] | None = None,
    ) -> None:
        """Launches a call on the current stream; in a group, after all other fused launches of the device.

        Every rank must launch. The host does not wait. The caller owns all tensors; their memory is not
        reused before the kernels end.

        Args:
            a: A `[M, K]` as from `tma_operands.aligned`. If x is sent: the local part, of at least one row. A
                tuple for a list along K (`parts_of_k`), whose weights are a tuple, too.
            weights: Weights that this rank multiplies, aligned like `a`, one (or a pair) for each product.
            outs: Destination of each product, at least one row, with a row pitch that is a multiple of 16
                bytes.
            extras: Operands of each product's epilogue, in the kernel's order (`build`); None if there are
                none. If x is sent with scales, the first operand is the scales of the local shard, as they
                are sent.
            kept: Destination of the sent operand, contiguous: `[M, K]`, or of an all-to-all this rank's rows
                of it (a tuple if `a` is one). None if it is not needed.

        Raises:
            CommTimeoutError, OverlappingCallsError, MismatchedCallsError: An earlier kernel of this rank
                failed.
        """
        executor = self.executor
        with executor.active(a, weights, outs, extras, kept) as stream:
            operands = tuple(zip(weights, outs, extras, strict=True))
            if self.workspace is None:  # it waits for no peer, so no order is needed
                for product, tensors in zip(self.products, operands, strict=True):
                    product.gemm(a, *tensors, None, product.num_clusters, stream)
                return
            self.workspace.raise_if_failed()
            with executor.order.lock:
                exchange = self.next_call(stream)
                scale_address = 0 if self.gathering is None else _scales_address(self.gathering, extras[0])
                if self.side_work is None:
                    failure = self._multiply(exchange, a, scale_address, operands, kept, stream)
                else:
                    parts, side_work = a if isinstance(a, tuple) else (a,), self.side_work
                    addresses = *map(Tensor.data_ptr, parts), scale_address
                    with executor.fork(stream) as second:
                        side_work.stage(executor, second, addresses)
                        send = partial(side_work.send, executor, second, addresses, exchange)
                        failure = self._multiply(exchange, a, scale_address, operands, kept, stream, send)
                if failure:
                    raise failure

    def next_call(self, stream: int) -> Any:
        """Returns the `Exchange` of the next call, with number and signature; needs the lock of the order.

        The stream first waits for the last fused launch of the device. A captured call marks the workspace,
        whose memory is then never freed.
        """
        workspace, order = self.workspace, self.executor.order
        assert workspace is not None, "a group of one exchanges nothing"
        if order.follow(stream):
            workspace.captured = True
        signature = after_skipped(self.signature, workspace.group.progress.skipped)
        return self.exchange.of_call(order.next_call(), signature)

    def _multiply(
        self,
        exchange: Any,
        a: Tensor | tuple[Tensor, ...],
        scale_address: int,
        operands: Sequence[tuple[Weight, Tensor, tuple[Tensor, ...] | None]],
        kept: Any,
        stream: int,
        send: Callable[[], None] | None = None,
    ) -> BaseException | None:
        """Launches the products, and `send` after the first; returns an error that follows a launch, or None.

        A launch can load its kernel, which can block the host until the device is idle (CUDA programming
        guide, lazy loading). The first product ends only after the peers' shards arrive. So every rank sends
        before its second launch; otherwise ranks could wait for each other.

        An error is raised if nothing is launched yet, or if there is one product. Otherwise the gate kernel
        ends the call, so that peers do not wait for this rank, and the error is returned.
        """
        assert self.workspace is not None
        arguments, last = exchange, len(self.products) - 1
        if self.gathering is not None:
            if isinstance(a, tuple):
                flats = None if kept is None else [one.view(-1) for one in kept]
                arguments = self.gathering.of_parts(exchange, [one.data_ptr() for one in a], flats)
            else:
                flat = None if kept is None else kept.view(-1)
                arguments = self.gathering.of_call(exchange, a.data_ptr(), flat, scale_address)
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
    """Returns the address of the local shard's scales; 0 if x has none."""
    if gathering.after is None:
        return 0
    assert extras is not None, "an operand with scales is gathered with them"
    return extras[0].data_ptr()
