"""The surface every backend has: the seam at which a new way to carry out the ops plugs in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.scale_blocks import Blocks, in_words
from ..epilogues import epilogue_of
from ..runtime.group import Group
from ..runtime.order import is_capturing
from ..spec import OPS, OpSpec
from ..spec.promises import Promises
from ..spec.sharding import Shards
from ..tuning.measured import Measured
from .by_collective import multiplied_and_moved
from .collectives import all_gather_rows
from .epilogues import Applying
from .known import known_of, may_know
from .op_call import FALLBACK, OpCall
from .portable_arithmetic import Arithmetic, arithmetic_of
from .reach import Reach, reach_of
from .scales.scaling import Operand, dequantised, with_scales

VIRTUAL = "virtual ranks exchange tiles inside kernels; torch.distributed does not know them"
"""Why a portable backend does not serve virtual ranks."""


@dataclass(frozen=True)
class Problem:
    """What a choice of backend may depend on: a call, and the facts of its tensors and ranks.

    All of it is equal on every rank, so that all ranks choose alike. The local extents (N_local of
    all_gather_gemm, K_local of gemm_reduce_scatter) are left out on purpose: with uneven shards they differ
    between ranks. What they sum up to is in the call where the caller said it.

    Attributes:
        op: The op's public name.
        call: As lowered: its extents are numbers, or None where nobody said them.
        dtype: Of operands and result; of x alone where operands have scales.
        device_type: "cpu" or "cuda".
        world_size: Ranks of the group, P.
        virtual: Whether the ranks are virtual (`runtime.virtual`), which torch.distributed does not know.
        reach: What the ranks found out about each other's GPUs; None where they have not been probed.
        captured: Whether the call is being captured in a CUDA graph, which replays without the host's time.
        weight_dtype: Of the weight, where operands have scales; else None.
        num_weights: Weights in a list.
        has_bias: Whether there is one.
        known: What was measured in the group by kind of call (`autotuning`), the same on all ranks.
        input_dtypes: Of what the epilogue reads, where there is one.
        widths: Rows of each weight, where every rank has all of them.
    """

    op: str
    call: OpCall
    dtype: torch.dtype
    device_type: str
    world_size: int
    virtual: bool = False
    reach: Reach | None = None
    captured: bool = False
    weight_dtype: torch.dtype | None = None
    num_weights: int = 1
    has_bias: bool = False
    known: Mapping[str, Measured | None] = field(default_factory=dict, repr=False, compare=False)
    input_dtypes: tuple[torch.dtype, ...] = ()
    widths: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        op: str,
        call: OpCall,
        x: Tensor,
        group: Group,
        weight: Any = None,
        bias: Any = None,
        inputs: Sequence[Tensor] = (),
    ) -> "Problem":
        """The problem of calling `op` with `x` in `group`.

        `deterministic` None asks torch's own switch. Where `auto` may choose fused kernels, or shards may go
        by copy engines, the group's first call finds out what its GPUs reach, which is collective.

        Args:
            op: The op's name.
            call: As lowered.
            x: The operand, for its type and device.
            group: The ranks.
            weight: The weight, or a list; may be left out where operands have no scales.
            bias: The bias, a list, or None.
            inputs: What the epilogue reads.
        """
        call = call.promising()
        if call.invariant is not None:
            call = call._replace(deterministic=True)
        elif call.deterministic is None:
            call = call._replace(deterministic=torch.are_deterministic_algorithms_enabled())
        requested = call.backend
        is_open = requested == "auto" or requested.endswith(FALLBACK)
        copies = OPS[op].gathers_operand and requested.startswith("decomposed")
        asks = (
            x.is_cuda
            and not group.is_virtual
            and (copies or (is_open and (x.dtype.itemsize == 2 or call.out_dtype is not None)))
        )
        weights = weight if isinstance(weight, (list, tuple)) else [weight]
        knows = may_know(requested, group) and call.invariant is None  # measured kernels differ in bits
        return cls(
            op,
            call,
            x.dtype,
            x.device.type,
            group.size,
            group.is_virtual,
            reach_of(group, x.device) if asks else None,
            is_capturing(x.device),
            None if call.out_dtype is None else weights[0].dtype,
            len(weights),
            len(bias) > 0 if isinstance(bias, (list, tuple)) else bias is not None,
            known_of(group, x.device).kinds if knows else {},
            tuple([tensor.dtype for tensor in inputs]),
            tuple([len(one) for one in weights]) if weight is not None and OPS[op].weight is None else (),
        )

    @property
    def applying(self) -> Applying | None:
        """The epilogue that sums go through, None where there is none."""
        if self.call.epilogue is None:
            return None
        return Applying(epilogue_of(self.call.epilogue), self.input_dtypes, self.out_dtype or self.dtype)

    def without_epilogue(self) -> "Problem":
        """The same with nothing after the sums: what a backend is chosen for."""
        if self.call.epilogue is None:
            return self
        return replace(self, call=self.call._replace(epilogue=None), input_dtypes=())

    @property
    def m(self) -> int:
        """Rows of the product over all ranks."""
        rows = self.call.rows
        assert rows is not None and not isinstance(rows, str), self
        return rows

    @property
    def n(self) -> int | None:
        """Columns over all ranks; None if they are not known, which all_gather_gemm's need not be."""
        return _number(self.call.columns)

    @property
    def k(self) -> int | None:
        """K over all ranks; None likewise, of the other ops."""
        return _number(self.call.k)

    @property
    def deterministic(self) -> bool:
        """Whether the sums must come out bitwise the same from call to call."""
        return bool(self.call.deterministic)

    @property
    def keep(self) -> bool:
        """Whether the operand that is communicated is wanted, too."""
        return self.call.keep

    @property
    def out_dtype(self) -> torch.dtype | None:
        """Of the result, where operands have scales; else None."""
        return self.call.out_dtype

    @property
    def blocks(self) -> Blocks | None:
        """Which blocks the scales are of; None: of rows, or of all of an operand."""
        return self.call.blocks

    @property
    def promises(self) -> Promises:
        """Of the result's bits."""
        return Promises(self.call.partials, self.call.invariant)

    @property
    def shards(self) -> Shards:
        """Division of the rows, or where the output is gathered of its columns."""
        total = self.n if self.spec.gathers_output else self.m
        assert total is not None, self
        return Shards(total, self.world_size, self.call.chunk)

    def agreed(self) -> tuple[tuple[str, Any], ...]:
        """What must be the same on all ranks, extents and options by the names of users' arguments."""
        facts = ((name, value) for name, value in vars(self).items() if name not in ("call", "known"))
        return (*facts, *self.call.agreed(), ("measured", self.measured))

    @property
    def kind(self) -> str:
        """What a measurement of this problem holds for: its extents and types, not who calls how."""
        extents = "x".join("?" if extent is None else str(extent) for extent in (self.m, self.n, self.k))
        words = f"{self.op} {extents}, {self.types}, {self.device_type}, P={self.world_size}"
        return f"{words}, deterministic" if self.deterministic else words

    @property
    def measured(self) -> Measured | None:
        """What was measured of calls of this kind; None: nothing."""
        return self.known.get(self.kind)

    @property
    def spec(self) -> OpSpec:
        """The op."""
        return OPS[self.op]

    @property
    def is_scaled(self) -> bool:
        """Whether the operands have scales."""
        return self.out_dtype is not None

    def __str__(self) -> str:
        """What it is, in words, for messages."""
        ranks = f"P={self.world_size}{' virtual ranks' if self.virtual else ''}"
        return (
            f"{self.op} of M={self.m}, width={self.width}, {self.types}, {self.device_type}, {ranks}"
            f"{', with deterministic sums' if self.deterministic else ''}"
            + "".join(f", {name}={value!r}" for name, value in self.promises._asdict().items() if value)
        )

    @property
    def types(self) -> str:
        """Those of operands and result."""
        if not self.is_scaled:
            return str(self.dtype)
        blocks = f", scales of {in_words(self.blocks)}" if self.blocks else ""
        return f"{self.dtype} x {self.weight_dtype} to {self.out_dtype}{blocks}"

    @property
    def width(self) -> int:
        """Columns of the tensor that travels."""
        width = self.k if self.spec.width == "k" else self.n
        assert width is not None, self
        return width

    def dual(self) -> "Problem | None":
        """That of the gradient of x, where its exchange moves as much: `grad_out @ weight`, so N is its K."""
        if self.spec.dual not in OPS:
            return None
        call = self.call._replace(columns=self.k, k=self.n)
        return replace(self, op=self.spec.dual, call=call, widths=())

    @property
    def bytes(self) -> int:
        """Size S of the tensor of which the collective sends (P - 1) / P from each rank."""
        travels = self.dtype if self.out_dtype is None or self.spec.operand_is_sent else self.out_dtype
        is_dealt = any(move.kind == "all_to_all" for move in self.spec.sent)
        return self.m * self.width * travels.itemsize // (self.world_size if is_dealt else 1)


def _number(extent: Any) -> int | None:
    assert not isinstance(extent, str), extent
    return extent  # type: ignore[no-any-return]


class Backend(Protocol):
    """One way to carry out the ops.

    Attributes:
        name: What users call it.
        deterministic: Whether partial results are summed over the ranks in rank order in float32 (float64 for
            float64), with the bias, and converted once, bitwise the same from call to call. If not, order and
            precision are those of torch.distributed's collective.
        verifies: Whether ranks compare what they call before every transfer (`runtime.agree.of_calls`): of
            known calls nothing else would notice that they differ.
    """

    name: str
    deterministic: bool
    verifies: bool

    def why_not(self, problem: Problem) -> str | None:
        """The reason this backend cannot carry out `problem`, None if it can."""

    def why_slower(self, problem: Problem) -> str | None:
        """The reason `auto` need not compare its time with others', None if it is worth it."""

    def why_after(self, problem: Problem, weight: Tensor) -> str | None:
        """The reason torch applies the epilogue of `problem` after the op; None where the op does it."""

    def bind(
        self, problem: Problem, x: Tensor, weight: Any, bias: Any, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """What carries `problem` out on tensors laid out as these: a function of `(x, weight, bias)`.

        Where `problem.is_scaled`, of `(x, weight, bias, scale_x, scale_w)`, see `scaling`; where
        `problem.applying`, of `(x, weight, bias, inputs)`, see `epilogues.applied_after`. Everything that a
        call need not find out again is found out here, under the caller's `settings`, which hold for what is
        returned. All tensors are 2-D, on one device and of one dtype; x may be any matrix; a weight is
        `[N, K]` and may be the transpose of a contiguous matrix (the backward passes call with `weight.t()`).
        Shapes are validated before. Calls are collective over `group`, stream-ordered on CUDA, and return new
        tensors. The bias is added once, after the sum over the ranks.
        """


class Portable(ABC):
    """A `Backend` of torch.distributed's transfers and torch's products.

    A method for an op has the op's name; others go by their collective (`by_collective`). Tensors of methods
    are those of `Backend.bind`, but x is contiguous; `how` multiplies and sums.
    """

    name: str
    deterministic = verifies = True
    operand: Operand = staticmethod(dequantised)
    """What products take of an operand with scales, see `with_scales`."""

    def why_not(self, problem: Problem) -> str | None:
        """Carries out everything that torch.distributed has a group for."""
        return VIRTUAL if problem.virtual else None

    @abstractmethod
    def why_slower(self, problem: Problem) -> str | None:
        """See `Backend`."""

    def why_after(self, problem: Problem, weight: Tensor) -> str | None:
        """See `Backend`: torch's products have no epilogue but a bias."""
        return "torch's products have no epilogue"

    def all_gather_gemm(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        shards: Shards,
        group: Group,
        how: Arithmetic,
    ) -> tuple[Tensor, list[Tensor]]:
        """Gathers x `[shards.size(rank), K]` to `[M, K]` and multiplies it with each weight `[N_i, K]`.

        `biases` holds one `[N_i]` per weight, or nothing. Returns the gathered x (x itself in a group of one)
        and the products `[M, N_i]`. Here the one after the other.
        """
        gathered = all_gather_rows(x, shards, group)
        return gathered, how.products(gathered, weights, biases)

    @abstractmethod
    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """X `[M, K_local]`, weight `[N, K_local]` -> this rank's rows `[shards.size(rank), N]` of the sum."""

    @abstractmethod
    def gemm_all_reduce(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """X `[M, K_local]`, weight `[N, K_local]` -> `[M, N]`, bitwise equal on all ranks.

        `shards` divides the rows among the ranks that sum them.
        """

    @abstractmethod
    def gemm_all_gather(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group, how: Arithmetic
    ) -> Tensor:
        """X `[M, K]`, weight `[shards.size(rank), K]` -> `[M, N]`: `shards` divides the output columns.

        `bias` `[shards.size(rank)]` goes with the weight's rows.
        """

    def by_collective(
        self,
        spec: OpSpec,
        x: Any,
        weights: Sequence[Any],
        biases: Sequence[Tensor],
        shards: Shards,
        group: Group,
        how: Arithmetic,
    ) -> tuple[Any, list[Tensor]]:
        """Carries out an op that has no method here; see `by_collective.multiplied_and_moved`."""
        return multiplied_and_moved(spec, x, weights, biases, shards, group, how)

    def _by_collective(
        self, problem: Problem, shards: Shards, group: Group, how: Arithmetic
    ) -> Callable[..., Any]:
        """Returns `by_collective` with the arguments of an op's method."""
        spec, common = problem.spec, (shards, group, how)
        if spec.takes_lists:
            return lambda x, weights, biases: self.by_collective(spec, x, weights, biases, *common)

        def run(x: Any, weight: Any, bias: Tensor | None) -> Tensor:
            biases = [] if bias is None else [bias]
            _, (result,) = self.by_collective(spec, x, [weight], biases, *common)
            return result

        return run

    def bind(
        self, problem: Problem, x: Tensor, weight: Any, bias: Any, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """See `Backend.bind`: there is nothing to find out."""
        how = arithmetic_of(problem.promises, group.size)
        method: Callable[..., Any] = self._by_collective(problem, shards, group, how)
        if hasattr(self, problem.op):
            method = partial(getattr(self, problem.op), shards=shards, group=group, how=how)
        if problem.out_dtype is not None:
            gather = partial(all_gather_rows, shards=shards, group=group) if problem.keep else None
            method = with_scales(method, problem.out_dtype, self.operand, problem.blocks, gather)
        return method if x.is_contiguous() else lambda x, *others: method(x.contiguous(), *others)
