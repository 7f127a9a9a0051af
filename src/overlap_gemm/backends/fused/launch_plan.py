"""`Plan`: the launches, copies and waits that fused calls of one kind have in common, made at the first one.

stream            after the launch before   product, product ...        goes on after both
second stream                               what travels alongside      copy engines, or a relay kernel
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
        config: which kernel; its majors, dtypes and epilogue are those of the tensors.
        gemm: the compiled kernel.
        num_clusters: its grid.
    """

    config: GemmConfig
    gemm: Any
    num_clusters: int


class Travel(Protocol):
    """What leaves this rank on a second stream, alongside the products."""

    def stage(self, executor: Executor, second: int, own: tuple[int, int]) -> None:
        """Queues what must run before the products, which fill the SMs: within a GPU copies are kernels."""

    def send(self, executor: Executor, second: int, own: tuple[int, int], exchange: Any) -> None:
        """Queues the sending, after the first product; ``own``: addresses of rows and scales."""


class OwnShard(NamedTuple):
    """Pieces of this rank's shard, and their places at a peer.

    Attributes:
        row_bytes: bytes of all its rows.
        scale_bytes: bytes of their scales; 0 where there are none.
        scales: bytes from the shard's first row to its scales.
    """

    row_bytes: int
    scale_bytes: int = 0
    scales: int = 0

    def copy(self, executor: Executor, stream: int, target: int, own: tuple[int, int]) -> None:
        """Queues the copies of rows and scales from their addresses to those of the shard at ``target``."""
        rows, scales = own
        executor.copy(stream, target, rows, self.row_bytes)
        if self.scale_bytes:
            executor.copy(stream, target + self.scales, scales, self.scale_bytes)


@dataclass(frozen=True)
class Copies:
    """The own shard by copy engines, to one peer after the other, each copy followed by its flag.

    Nothing else is queued there while a kernel waits for shards: another kernel would starve.

    Attributes:
        places: addresses of the shard and its flag at each peer, in the order in which they want it.
        coming: address of what a flag is to say (`geometry.COMING_OFFSET`).
        shard: the own one.
    """

    places: tuple[tuple[int, int], ...]
    coming: int
    shard: OwnShard

    def stage(self, executor: Executor, second: int, own: tuple[int, int]) -> None:
        """Nothing."""

    def send(self, executor: Executor, second: int, own: tuple[int, int], exchange: Any) -> None:
        """See `Travel.send`."""
        for target, flag in self.places:
            self.shard.copy(executor, second, target, own)
            executor.copy(second, flag, self.coming, FLAG_BYTES)


@dataclass(frozen=True)
class Relayed:
    """What a relay kernel (`exchange.relay`) puts: staged tiles, or the own shard from its place.

    Attributes:
        relay: the compiled kernel.
        op: name of the op that is carried out.
        puts: two lists.
        place: address to which the own shard is copied first, since NVSHMEM puts from its own memory alone.
        shard: the own one; None where what is put is there.
    """

    relay: Any
    op: str
    puts: tuple[Puts, ...]
    place: int = 0
    shard: OwnShard | None = None

    def stage(self, executor: Executor, second: int, own: tuple[int, int]) -> None:
        """See `Travel.stage`."""
        if self.shard is not None:
            self.shard.copy(executor, second, self.place, own)

    def send(self, executor: Executor, second: int, own: tuple[int, int], exchange: Any) -> None:
        """See `Travel.send`."""
        self.relay(OPS[self.op].code, self.puts, exchange, second)


@dataclass(frozen=True)
class Plan:
    """All that calls of one op and kind have in common: a call is a plan and its tensors.

    In a group of one it is a plain GEMM's.

    Attributes:
        executor: where.
        pattern: who sends what to whom: a name of `overlap_gemm.spec.PATTERNS`.
        products: a launch for each weight; none where the caller multiplies, shard by shard (`copies`).
        workspace: what is exchanged through; None in a group of one.
        exchange: where that is and what bounds waits (`exchange.arguments`), without what belongs to a call.
        gathering: what kernels take that gather an operand (`gather.gathering`), likewise; else None.
        travel: what leaves on a second stream; None where the kernel sends everything.
        gate: the compiled kernel (`gather.gate`) that waits for a shard, and that ends a call of several
            products of which one could not be launched.
        signature: what the ranks' calls have in common (`runtime.identity`).
        counts: of the finished units of each row, zeros between calls; None where nothing is counted.
    """

    executor: Executor
    pattern: str
    products: tuple[Product, ...] = ()
    workspace: Workspace | None = None
    exchange: Any = None
    _: KW_ONLY
    gathering: Any = None
    travel: Travel | None = None
    gate: Any = None
    signature: int = 0
    counts: Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Whether it may still be launched: until its workspace is closed, or its emulator ends."""
        if not self.executor.is_open:
            return False
        return self.workspace is None or self.workspace.is_open

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """Rows of A, and of B, after which tiles begin anew, with another owner's; None: nowhere."""
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
            a: `[M, K]`, see `operands.aligned`; where it is gathered the own shard, `[max(rows, 1), K]`.
            weights: the rows of each weight that this rank multiplies, likewise; of a pair both.
            outs: the op's result for each, of one row at least, rows at multiples of 16 bytes.
            extras: what the epilogue's visitors of each read (`build`), see
                `operands.aligned_vector`; None where they read nothing. Of a gathered operand with scales the
                first are the own shard's, as they are sent.
            kept: `[M, K]`, contiguous: the gathered operand; None where nobody wants it.

        Raises:
            CommTimeoutError, OverlappingCallsError, MismatchedCallsError: an earlier call here failed.
        """
        executor = self.executor
        flat: Any = chain(*weights) if isinstance(weights[0], tuple) else weights
        used = a, *flat, *outs, *chain(*filter(None, extras)), kept
        with executor.active(*used) as stream:
            operands = tuple(zip(weights, outs, extras, strict=True))
            if self.workspace is None:  # waits for nobody, so it may run alongside whatever it likes
                for product, tensors in zip(self.products, operands, strict=True):
                    product.gemm(a, *tensors, None, product.num_clusters, stream)
                return
            self.workspace.raise_if_failed()
            with executor.order.lock:
                exchange = self.next_call(stream)
                scales = 0 if self.gathering is None else _scales_address(self.gathering, extras[0])
                if self.travel is None:
                    failure = self._multiply(exchange, a, scales, operands, kept, stream)
                else:
                    own, travel = (a.data_ptr(), scales), self.travel
                    with executor.fork() as second:
                        travel.stage(executor, second, own)
                        send = partial(travel.send, executor, second, own, exchange)
                        failure = self._multiply(exchange, a, scales, operands, kept, stream, send)
                if failure:
                    raise failure

    def next_call(self, stream: int) -> Any:
        """With the order's lock held: the next call's `exchange`, after every other fused launch."""
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
        """Launches the products; returns why not all of them. A call of which one was launched is ended.

        `send` follows the first launch. The next launch may load its kernel, which may block until the device
        is idle (CUDA programming guide, lazy loading). The first product waits for the peers' shards until
        then. If ranks sent their shards after all launches, they would wait for each other.
        """
        assert self.workspace is not None
        given, last = exchange, len(self.products) - 1
        if self.gathering is not None:
            flat = None if kept is None else kept.view(-1)
            after = self.gathering.after
            if after is not None:
                after = type(after)(scales, *after[1:])
            given = self.gathering._replace(exchange=exchange, own=a.data_ptr(), kept=flat, after=after)
        is_launched = False
        try:
            for i, (product, tensors) in enumerate(zip(self.products, operands, strict=True)):
                if last:
                    given = given._replace(is_first=int(i == 0), is_last=int(i == last))
                product.gemm(a, *tensors, given, product.num_clusters, stream)
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
    """Returns the address of the scales of a gathered operand, 0 where it has none."""
    if gathering.after is None:
        return 0
    assert extras is not None, "an operand with scales is gathered with them"
    return extras[0].data_ptr()
