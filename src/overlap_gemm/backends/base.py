"""`Backend`, the interface of an implementation of the ops, and `Problem`, the facts that select one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.scale_blocks import Blocks
from ..epilogues import Epilogue, epilogue_of
from ..runtime.group import Group
from ..runtime.order import is_capturing
from ..spec import OPS, OpSpec
from ..spec.promises import Promises
from ..spec.sharding import Shards, shard_rows
from ..tuning.measured import Measured
from .by_collective import run_by_collectives
from .collectives import all_gather_rows
from .epilogues import Applying
from .group_measurements import measurements_of, uses_measurements
from .op_call import FALLBACK, CallOperands, OpCall, bind_joined, operands_of, parts_of
from .peer_access import PeerAccess, peer_access_of
from .portable_arithmetic import Arithmetic, arithmetic_of
from .scales.product_types import ProductTypes
from .scales.scaling import Operand, dequantised, with_scales

VIRTUAL = "virtual ranks exchange tiles inside kernels; torch.distributed does not support them"
"""Reason for which a portable backend cannot run calls of virtual ranks."""


@dataclass(frozen=True)
class Problem:
    """Facts on which the choice of a backend may depend: those of a call, its tensors and its ranks.

    All facts are equal on every rank, so that all ranks choose alike. Local extents, such as N_local of
    all_gather_gemm, may differ; their sums over the ranks are in `call`, if the caller passed them.

    Attributes:
        op: Public name of the op.
        call: Lowered call: its extents are numbers, or None if they were not passed.
        dtype: Dtype of operands and result; of x alone if operands have scales.
        device_type: "cpu" or "cuda".
        world_size: Number of ranks of the group, P.
        virtual: Whether the ranks are virtual (`runtime.virtual`), so that torch.distributed cannot be used.
        peer_access: Facts of the ranks' GPUs and their peer access; None: not probed yet, or no GPUs.
        captured: Whether the call is being captured in a CUDA graph, which replays without host time.
        weight_dtypes: Dtypes of the weights if operands have scales; else empty.
        num_weights: Number of weights in a list.
        has_bias: Whether the call has a bias.
        measurements: Measurements of the group by kind of call (`autotuning`), the same on all ranks.
        input_dtypes: Dtypes of the epilogue's inputs, if there is an epilogue.
        widths: Rows of each weight, if every rank has all of them.
        parts: K over all ranks of each part of a `Joined` x, 0 if unknown; else empty.
    """

    op: str
    call: OpCall
    dtype: torch.dtype
    device_type: str
    world_size: int
    virtual: bool = False
    peer_access: PeerAccess | None = None
    captured: bool = False
    weight_dtypes: tuple[torch.dtype, ...] = ()
    num_weights: int = 1
    has_bias: bool = False
    measurements: Mapping[str, Measured | None] = field(default_factory=dict, repr=False, compare=False)
    input_dtypes: tuple[torch.dtype, ...] = ()
    widths: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        op: str,
        call: OpCall,
        operands: CallOperands,
        group: Group,
    ) -> "Problem":
        """Returns the problem of calling `op` in `group`.

        `deterministic=None` is replaced by torch's deterministic mode. The first call of a group is
        collective if `auto` may choose fused kernels, or if copy engines may send shards: it then probes the
        GPUs and their peer access.

        Args:
            op: Public name of the op.
            call: Lowered call.
            operands: Operands, for their dtypes, device and widths; the weight may be None without scales.
            group: Ranks that take part.
        """
        x, weight, bias, *_ = operands
        call = call.promising()
        if call.invariant is not None:
            call = call._replace(deterministic=True)
        elif call.deterministic is None:
            call = call._replace(deterministic=torch.are_deterministic_algorithms_enabled())
        requested = call.backend
        is_open = requested == "auto" or requested.endswith(FALLBACK)
        copies = OPS[op].gathers_operand and requested.startswith("decomposed")
        probes_access = (
            x.is_cuda
            and not group.is_virtual
            and (copies or (is_open and (x.dtype.itemsize == 2 or call.out_dtype is not None)))
        )
        weights = weight if isinstance(weight, (list, tuple)) else [weight]
        is_measured = uses_measurements(OPS[op], requested, group, call.promises)
        return cls(
            op,
            call,
            x.dtype,
            x.device.type,
            group.size,
            group.is_virtual,
            peer_access_of(group, x.device) if probes_access else None,
            is_capturing(x.device),
            () if call.out_dtype is None else tuple([one.dtype for one in weights]),
            len(weights),
            len(bias) > 0 if isinstance(bias, (list, tuple)) else bias is not None,
            measurements_of(group, x.device).kinds if is_measured else {},
            tuple([tensor.dtype for tensor in operands.inputs]),
            tuple([len(one) for one in weights]) if weight is not None and OPS[op].weight is None else (),
            parts_of(OPS[op], weights),
        )

    @property
    def applying(self) -> Applying | None:
        """Returns the call's epilogue with its dtypes; None if there is none."""
        if self.call.epilogue is None:
            return None
        return Applying(epilogue_of(self.call.epilogue), self.input_dtypes, self.out_dtype or self.dtype)

    @property
    def has_partial_epilogue(self) -> bool:
        """Returns whether an epilogue is applied to each rank's partial sum, before sums over ranks."""
        return self.applying is not None and self.applying.epilogue.is_partial(self.spec.sums)

    def with_epilogue(self, epilogue: Epilogue, dtypes: Sequence[torch.dtype]) -> "Problem":
        """Returns the problem of the same call with an epilogue whose inputs have these dtypes."""
        return replace(self, call=self.call._replace(epilogue=epilogue.key), input_dtypes=tuple(dtypes))

    def without_epilogue(self) -> "Problem":
        """Returns the problem without its epilogue."""
        if self.call.epilogue is None:
            return self
        return replace(self, call=self.call._replace(epilogue=None), input_dtypes=())

    @property
    def m(self) -> int:
        """Returns the rows of the product over all ranks."""
        rows = self.call.rows
        assert rows is not None and not isinstance(rows, str), self
        return rows

    @property
    def n(self) -> int | None:
        """Returns N over all ranks; None if it is unknown, which is allowed for all_gather_gemm."""
        return _number(self.call.columns)

    @property
    def k(self) -> int | None:
        """Returns K over all ranks; None if it is unknown, which is allowed for ops that shard K."""
        return _number(self.call.k)

    @property
    def is_empty(self) -> bool:
        """Returns whether the result has no elements: no rows, or no columns over all ranks."""
        return self.m == 0 or self.n == 0

    @property
    def local_columns(self) -> int:
        """Returns the rows of a weight of a rank with a full shard; 0 if N is unknown."""
        columns = self.n or 0
        return shard_rows(columns, self.world_size) if self.spec.weight == "n" else columns

    @property
    def deterministic(self) -> bool:
        """Returns whether the sums must be bitwise the same from call to call."""
        return bool(self.call.deterministic)

    @property
    def keep(self) -> bool:
        """Returns whether the caller also needs the communicated operand."""
        return self.call.keep

    @property
    def out_dtype(self) -> torch.dtype | None:
        """Returns the dtype of the result if operands have scales; else None."""
        return self.call.out_dtype

    @property
    def blocks(self) -> Blocks | None:
        """Returns the blocks that share a scale; None if scales are of rows or of a full operand."""
        return self.call.blocks

    @property
    def promises(self) -> Promises:
        """Returns the promises about the result's bits."""
        return Promises(self.call.partials, self.call.invariant)

    @property
    def shards(self) -> Shards:
        """Returns the division over the ranks of the rows, or of the columns if the output is gathered."""
        total = self.n if self.spec.gathers_output else self.m
        assert total is not None, self
        return Shards(total, self.world_size, self.call.chunk)

    def agreed(self) -> tuple[tuple[str, Any], ...]:
        """Returns (name, value) of all facts that must be the same on all ranks."""
        facts = ((name, value) for name, value in vars(self).items() if name not in ("call", "measurements"))
        return (*facts, *self.call.agreed(), ("measured", self.measured))

    @property
    def kind(self) -> str:
        """Returns the key of measurements: op, extents, types, device type and number of ranks."""
        extents = "x".join("?" if extent is None else str(extent) for extent in (self.m, self.n, self.k))
        words = f"{self.op} {extents}, {self.types}, {self.device_type}, P={self.world_size}"
        return f"{words}, deterministic" if self.deterministic else words

    @property
    def measured(self) -> Measured | None:
        """Returns the measurement of calls of this kind; None if there is none."""
        return self.measurements.get(self.kind)

    @property
    def spec(self) -> OpSpec:
        """Returns the definition of the op."""
        return OPS[self.op]

    @property
    def is_scaled(self) -> bool:
        """Returns whether the operands have scales."""
        return self.out_dtype is not None

    def __str__(self) -> str:
        """Returns a description of the problem for messages."""
        ranks = f"P={self.world_size}{' virtual ranks' if self.virtual else ''}"
        return (
            f"{self.op} of M={self.m}, width={self.width}, {self.types}, {self.device_type}, {ranks}"
            f"{', with deterministic sums' if self.deterministic else ''}"
            + "".join(f", {name}={value!r}" for name, value in self.promises._asdict().items() if value)
        )

    @property
    def types(self) -> ProductTypes:
        """Returns the types of the product with the first weight."""
        return ProductTypes(self.dtype, next(iter(self.weight_dtypes), None), self.out_dtype, self.blocks)

    @property
    def width(self) -> int:
        """Returns the number of columns of the tensor that is sent."""
        width = self.k if self.spec.width == "k" else self.n
        assert width is not None, self
        return width

    def dual(self) -> "Problem | None":
        """Returns the problem of the dual op, which computes the gradient of x; None if there is no dual.

        The gradient is `grad_out @ weight`, so N and K change places. It sends as many bytes as this problem.
        """
        if self.spec.dual not in OPS:
            return None
        call = self.call._replace(columns=self.k, k=self.n)
        parts = (self.widths or (0,) * self.num_weights) if self.num_weights > 1 else ()
        return replace(self, op=self.spec.dual, call=call, num_weights=1, widths=(), parts=parts)

    @property
    def bytes(self) -> int:
        """Returns the bytes of the communicated tensor; each rank sends (P - 1) / P of them."""
        sent = self.dtype if self.out_dtype is None or self.spec.operand_is_sent else self.out_dtype
        is_all_to_all = any(move.kind == "all_to_all" for move in self.spec.sent)
        return self.m * self.width * sent.itemsize // (self.world_size if is_all_to_all else 1)


def _number(extent: Any) -> int | None:
    assert not isinstance(extent, str), extent
    return extent  # type: ignore[no-any-return]


class Backend(Protocol):
    """Implementation of the ops.

    Attributes:
        name: Name in the public argument `backend=`.
        deterministic: Whether results are bitwise the same from call to call; False for "torch" only. If
            True, partial results (sent in the result's dtype, or float32 if promised) are summed in rank
            order in float32 (float64 for float64). Then the bias is added, and the sum is rounded once. If
            False, a collective of torch.distributed determines order and precision.
        verifies: Whether ranks compare their calls before every transfer (`runtime.agree.of_calls`). It must
            be True for transfers of torch.distributed. Fused kernels compare signatures themselves.
    """

    name: str
    deterministic: bool
    verifies: bool

    def why_not(self, problem: Problem) -> str | None:
        """Returns the reason this backend cannot run `problem`; None if it can."""

    def why_slower(self, problem: Problem) -> str | None:
        """Returns the reason `auto` excludes this backend without comparing times; None to compare them."""

    def why_after(self, problem: Problem, columns: int) -> str | None:
        """Returns the reason this backend cannot apply the epilogue of `problem` in the op; None if it can.

        Args:
            problem: Problem with an epilogue.
            columns: Rows of this rank's weight.
        """

    def bind(
        self, problem: Problem, operands: CallOperands, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """Returns a function that runs `problem` on tensors with the shapes, strides and dtypes of these.

        The argument of the returned function is one `CallOperands`; for scales see `scaling`. Its calls are
        collective over `group`, stream-ordered on CUDA (torch's current stream), and return new tensors,
        which the caller owns. The bias is added once, after the sum over the ranks. An op that takes lists
        returns (communicated operand, list of results); with an epilogue the results are [result,
        outputs...].

        `bind` computes everything that does not change between calls. The caller's `settings` at `bind` are
        those of the returned function.

        Args:
            problem: Problem to run; its shapes are validated.
            operands: Two-dimensional operands of any strides. A weight may be a transposed contiguous matrix,
                as in backward passes.
            shards: Division of the rows, or of the columns if the output is gathered.
            group: Ranks that take part, each of which must call.
        """


class Portable(ABC):
    """Base class of backends that use torch.distributed's transfers and torch's products.

    A method that implements an op has the op's name. `by_collective` runs ops that have no method. The
    methods take the operands of `Backend.bind`, but x is contiguous, and scales are part of x and of the
    weights (`with_scales`); and an `Arithmetic`, `how`, for products and sums.
    """

    name: str
    deterministic = verifies = True
    operand: Operand = staticmethod(dequantised)
    """Form in which products take an operand with scales, see `with_scales`."""

    def why_not(self, problem: Problem) -> str | None:
        """Returns a reason for virtual ranks and for epilogues of partial sums; else None."""
        if problem.has_partial_epilogue:
            return "an epilogue of partial sums needs the backend 'sequential' or a kernel"
        return VIRTUAL if problem.virtual else None

    @abstractmethod
    def why_slower(self, problem: Problem) -> str | None:
        """Returns the reason `auto` excludes this backend; see `Backend.why_slower`."""

    def why_after(self, problem: Problem, columns: int) -> str | None:
        """Returns a reason for every epilogue, because torch's products can only add a bias."""
        return "torch's products have no epilogue"

    def all_gather_gemm(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> tuple[Tensor, list[Tensor]]:
        """Gathers x `[shards.size(rank), K]` to `[M, K]` and multiplies it with each weight `[N_i, K]`.

        This implementation gathers first, then multiplies. Returns the gathered x (x itself in a group of
        one) and the products `[M, N_i]`.
        """
        gathered = all_gather_rows(operands.x, shards, group)
        return gathered, how.products(gathered, operands.weight, operands.bias)

    @abstractmethod
    def gemm_reduce_scatter(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Multiplies x `[M, K_local]` and weight `[N, K_local]`; returns this rank's rows of the sum.

        The result has shape `[shards.size(rank), N]`.
        """

    @abstractmethod
    def gemm_all_reduce(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Multiplies x `[M, K_local]` and weight `[N, K_local]`; returns the sum `[M, N]`.

        The sum is bitwise equal on all ranks. `shards` divides the rows among the ranks that sum them.
        """

    @abstractmethod
    def gemm_all_gather(
        self, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """Multiplies x `[M, K]` and weight `[shards.size(rank), K]`; returns the product `[M, N]`.

        `shards` divides the output columns. The bias `[shards.size(rank)]` is that of the local columns.
        """

    def by_collective(
        self, spec: OpSpec, operands: CallOperands, shards: Shards, group: Group, how: Arithmetic
    ) -> tuple[Any, list[Tensor]]:
        """Runs an op that has no method in this class; see `by_collective.run_by_collectives`."""
        return run_by_collectives(spec, operands, shards, group, how)

    def _by_collective(
        self, problem: Problem, shards: Shards, group: Group, how: Arithmetic
    ) -> Callable[[CallOperands], Any]:
        """Returns `by_collective` with the arguments of an op's method."""
        spec, common = problem.spec, (shards, group, how)
        if spec.takes_lists:
            return lambda operands: self.by_collective(spec, operands, *common)

        def run(operands: CallOperands) -> Tensor:
            weights, biases = operands.lists(spec)
            _, (result,) = self.by_collective(spec, operands._replace(weight=weights, bias=biases), *common)
            return result

        return run

    def bind(
        self, problem: Problem, operands: CallOperands, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """Returns the op's method, with the arguments that do not change; see `Backend.bind`."""
        if problem.parts and problem.spec.sums:
            return bind_joined(self.bind, problem, operands, shards, group)
        how = arithmetic_of(problem.promises, group.size)
        method: Callable[..., Any] = self._by_collective(problem, shards, group, how)
        if hasattr(self, problem.op):
            method = partial(getattr(self, problem.op), shards=shards, group=group, how=how)
        if problem.is_scaled:
            gather = partial(all_gather_rows, shards=shards, group=group) if problem.keep else None
            method = with_scales(method, problem.types, self.operand, gather)
        if operands.x.is_contiguous():
            return method
        return lambda operands: method(operands_of((operands.x.contiguous(), *operands[1:])))
