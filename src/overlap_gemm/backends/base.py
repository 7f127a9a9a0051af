"""The surface every backend has: the seam at which a new way to carry out the ops plugs in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..config.scale_blocks import Blocks, in_words
from ..runtime.group import Group
from ..runtime.order import is_capturing
from ..spec import ARGUMENTS, OPS, OpSpec
from ..spec.promises import NO_PROMISES, Promises
from ..spec.sharding import Shards
from ..tuning.measured import Measured
from .collectives import all_gather_rows
from .known import known_of, may_know
from .portable_arithmetic import Arithmetic, arithmetic_of
from .reach import Reach, reach_of
from .scales.scaling import Operand, dequantised, with_scales

BackendName = Literal["auto", "torch", "sequential", "decomposed", "fused"]
"""What callers may ask for; `select.BACKENDS` has them."""

FALLBACK = " or auto"
"""After a backend's name: where that backend has no such op, it falls back to what `auto` chooses."""

VIRTUAL = "virtual ranks exchange tiles inside kernels; torch.distributed does not know them"
"""Why a portable backend does not serve virtual ranks."""


@dataclass(frozen=True)
class Problem:
    """What a choice of backend may depend on.

    All of it is equal on every rank, so that all ranks choose alike. The local extents (N_local of
    all_gather_gemm, K_local of gemm_reduce_scatter) are left out on purpose: with uneven shards they differ
    between ranks. What they sum up to is here where the caller said it.

    Attributes:
        op: The op's public name.
        m: Rows of the product over all ranks.
        n: Columns over all ranks; None if they are not known, which all_gather_gemm's need not be.
        k: K over all ranks; None likewise, of the other ops.
        dtype: Of operands and result.
        device_type: "cpu" or "cuda".
        world_size: Ranks of the group, P.
        virtual: Whether the ranks are virtual (`runtime.virtual`), which torch.distributed does not know.
        deterministic: Whether the sums must come out bitwise the same from call to call.
        reach: What the ranks found out about each other's GPUs; None where they have not been probed.
        captured: Whether the call is being captured in a CUDA graph, which replays without the host's time.
        keep: Whether the gathered operand of all_gather_gemm is wanted, too.
        weight_dtype: Of the weight, where operands have scales; else None.
        out_dtype: Of the result, likewise: `dtype` is x's then.
        blocks: Which blocks the scales are of; None: of rows, or of all of an operand.
        promises: Of the result's bits.
        known: What was measured in the group by kind of call (`autotuning`), the same on all ranks.
    """

    op: str
    m: int
    n: int | None
    k: int | None
    dtype: torch.dtype
    device_type: str
    world_size: int
    virtual: bool = False
    deterministic: bool = False
    reach: Reach | None = None
    captured: bool = False
    keep: bool = False
    weight_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    blocks: Blocks | None = None
    promises: Promises = Promises()
    known: Mapping[str, Measured | None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        op: str,
        m: int,
        n: int | None,
        k: int | None,
        x: Tensor,
        group: Group,
        deterministic: bool | None,
        requested: str = "auto",
        keep: bool = False,
        scaled: tuple[Any, ...] = (None, None),
        promises: Promises = NO_PROMISES,
    ) -> "Problem":
        """The problem of calling `op` with `x` in `group`.

        `deterministic` None asks torch's own switch. Where `auto` may choose fused kernels (`requested` is
        the caller's `backend=`), or shards may go by copy engines, the group's first call finds out what its
        GPUs reach, which is collective. `scaled` is (weight_dtype, out_dtype), or those and blocks.
        """
        if promises.invariant is not None:
            deterministic = True
        elif deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        is_open = requested == "auto" or requested.endswith(FALLBACK)
        copies = OPS[op].gathers_operand and requested.startswith("decomposed")
        asks = (
            x.is_cuda
            and not group.is_virtual
            and (copies or (is_open and (x.dtype.itemsize == 2 or scaled[1] is not None)))
        )
        weight_dtype, out_dtype, blocks = (*scaled, None)[:3]
        knows = may_know(requested, group) and promises.invariant is None  # measured kernels differ in bits
        return cls(
            op,
            m,
            n,
            k,
            x.dtype,
            x.device.type,
            group.size,
            group.is_virtual,
            deterministic,
            reach_of(group, x.device) if asks else None,
            is_capturing(x.device),
            keep,
            weight_dtype,
            out_dtype,
            blocks,
            promises,
            known_of(group, x.device).kinds if knows else {},
        )

    def agreed(self) -> tuple[tuple[str, Any], ...]:
        """What must be the same on all ranks, extents by the names of users' arguments."""
        names: Mapping[Any, str] = ARGUMENTS
        facts = {name: value for name, value in vars(self).items() if name not in ("known", "promises")}
        named = ((names.get(name, name), value) for name, value in facts.items())
        return (*named, *self.promises._asdict().items(), ("measured", self.measured))

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
        return None if self.spec.dual is None else replace(self, op=self.spec.dual, n=self.k, k=self.n)

    @property
    def bytes(self) -> int:
        """Size of the whole tensor that the collective moves (S in the usual (P - 1) / P * S accounting)."""
        travels = self.dtype if self.out_dtype is None or self.spec.gathers_operand else self.out_dtype
        return self.m * self.width * travels.itemsize


class Backend(Protocol):
    """One way to carry out the four ops.

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

    def bind(
        self, problem: Problem, x: Tensor, weight: Any, bias: Any, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """What carries `problem` out on tensors laid out as these: a function of `(x, weight, bias)`.

        Where `problem.is_scaled`, of `(x, weight, bias, scale_x, scale_w)`, see `scaling`. Everything that a
        call need not find out again is found out here, under the caller's `settings`, which hold for what is
        returned. All tensors are 2-D, on one device and of one dtype; x may be any matrix; a weight is
        `[N, K]` and may be the transpose of a contiguous matrix (the backward passes call with `weight.t()`).
        Shapes are validated before. Calls are collective over `group`, stream-ordered on CUDA, and return new
        tensors. The bias is added once, after the sum over the ranks.
        """


class Portable(ABC):
    """A `Backend` of torch.distributed's transfers and torch's products: a method for each op.

    Their tensors are those of `Backend.bind`, but x is contiguous; `how` multiplies and sums.
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

    def bind(
        self, problem: Problem, x: Tensor, weight: Any, bias: Any, shards: Shards, group: Group
    ) -> Callable[..., Any]:
        """See `Backend.bind`: there is nothing to find out."""
        method: Callable[..., Any] = partial(
            getattr(self, problem.op),
            shards=shards,
            group=group,
            how=arithmetic_of(problem.promises, group.size),
        )
        if problem.out_dtype is not None:
            gather = partial(all_gather_rows, shards=shards, group=group) if problem.keep else None
            method = with_scales(method, problem.out_dtype, self.operand, problem.blocks, gather)
        return method if x.is_contiguous() else lambda x, *others: method(x.contiguous(), *others)
