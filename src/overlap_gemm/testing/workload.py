"""One op on one shape: its operands on this rank, and the calls that carry it out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import overlap_gemm

from ..backends.autotuning import num_sets
from ..backends.fused.plan_cache import DTYPES
from ..backends.scales.mx_scales import WIDTH
from ..backends.scales.scaling import BLOCK, FLOAT8, NAMED_BLOCKS, OUT_DTYPES, Block
from ..config.scale_blocks import Blocks
from ..runtime.group import Group
from ..spec import OPS, OpSpec
from ..spec.sharding import Shards
from ..tuning.prediction import Facts

Call = Callable[[], object]

Scales = Literal["rows", "tensor", "blocks", "mx"]
"""What shares a scale, of operands of 8 bits: a row, all of an operand, a block, 1 x 128 of x, 128 x 128
of the weight, or 32 of K of a row, as MX types have it."""


MOST = 8
"""Standard deviations that no operand exceeds."""


def in_turn(calls: Sequence[Call]) -> Call:
    """Returns what makes one of several calls after the other."""
    if len(calls) == 1:
        return calls[0]
    turns = cycle(calls)
    return lambda: next(turns)()


class OpTensors(NamedTuple):
    """An op's tensors. The scales are as `overlap_gemm.gemm_reduce_scatter` takes them, None of 16 bits."""

    x: Tensor
    weight: Tensor
    scale_x: Tensor | None = None
    scale_w: Tensor | None = None

    @property
    def scales(self) -> dict[str, Tensor | None]:
        """Keyword arguments of the op."""
        return {"scale_x": self.scale_x, "scale_w": self.scale_w}


@dataclass(frozen=True)
class Workload:
    """An op on the unsharded product `[M, K] x [N, K]^T`.

    Attributes:
        name: What it is in a model, for tables.
        op: The op's public name.
        m: Rows M over all ranks.
        n: Output features N over all ranks.
        k: Input features K over all ranks.
        dtype: Of operands and result; the result of 8-bit operands is bfloat16.
        scales: Of 8-bit operands; else None.
    """

    name: str
    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    scales: Scales | None = None

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the result."""
        return self.dtype if self.scales is None else OUT_DTYPES[0]

    @property
    def spec(self) -> OpSpec:
        """The op."""
        return OPS[self.op]

    def flops(self, ranks: int) -> float:
        """Floating-point operations of one rank."""
        return 2.0 * self.m * self.n * self.k / ranks

    def facts(self, ranks: int) -> Facts:
        """The same for the model."""
        kind = (DTYPES | FLOAT8).get(self.dtype, "f32")
        return Facts(self.op, self.m, self.n, self.k, kind, ranks, blocks=self.blocks)

    @property
    def blocks(self) -> Blocks | None:
        """Which blocks the scales are of; None: of rows, or of all of an operand."""
        return None if self.block is None else NAMED_BLOCKS[self.block]

    @property
    def block(self) -> Block:
        """What callers call these."""
        names: dict[str, Block] = {"blocks": BLOCK, "mx": "mx"}
        return names.get(self.scales or "")

    def shapes(self, group: Group) -> tuple[tuple[int, int], tuple[int, int]]:
        """Those of this rank's x and weight."""
        return self.spec.shapes(self.m, self.n, self.k, Shards.owned_by(group.size, group.rank))

    def operands(self, group: Group, device: torch.device) -> OpTensors:
        """This rank's x and weight, random normal, the weight scaled so that results stay near 1.

        8-bit ones are those rounded, with the scales that make the largest magnitude the type's largest; a
        scale for all of an operand is the same on every rank, as torch's all-gather wants it.
        """
        x_shape, weight_shape = self.shapes(group)
        generator = torch.Generator(device).manual_seed(group.rank)
        x = torch.randn(x_shape, generator=generator, device=device, dtype=self.out_dtype)
        if self.spec.weight is None:  # every rank has the same
            generator.manual_seed(group.size)
        weight = torch.randn(weight_shape, generator=generator, device=device, dtype=self.out_dtype)
        weight, deviation = weight / self.k**0.5, self.k**-0.5
        (x, scale_x), (weight, scale_w) = self._rounded(x, 1), self._rounded(weight, BLOCK, deviation)
        return OpTensors(x, weight, scale_x, scale_w)

    def num_sets(self, group: Group, device: torch.device) -> int:
        """Sets of operands that calls take in turn, so that no GPU's caches hold them; one on CPUs."""
        nbytes = sum(math.prod(shape) for shape in self.shapes(group)) * self.dtype.itemsize
        return num_sets(nbytes, device)

    def warm_up(self, group: Group, device: torch.device) -> None:
        """Makes what calls need, and measures what `auto` takes (`overlap_gemm.warmup`)."""
        given = {"group": group.process_group, "dtype": self.dtype, "block": self.block, "device": device}
        overlap_gemm.warmup(self.op, (self.m, self.n, self.k), **given)  # type: ignore[arg-type]

    def gathered(self, operands: OpTensors) -> OpTensors:
        """The same with an x like that which an all-gather makes of the ranks', without asking them."""
        x = torch.randn(self.m, self.k, device=operands.x.device, dtype=self.out_dtype)
        x, scale_x = self._rounded(x, 1)
        return operands._replace(x=x, scale_x=scale_x)

    def _rounded(self, matrix: Tensor, rows: int, deviation: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """An operand of `dtype` and its scales, if any; `rows` is how many rows a block has."""
        if self.scales is None:
            return matrix, None
        height, width = matrix.shape
        if self.scales == "tensor":
            scale = matrix.new_full(
                (1, 1), MOST * deviation / torch.finfo(self.dtype).max, dtype=torch.float32
            )
            return (matrix / scale).to(self.dtype), scale
        if self.scales == "mx":
            values, scale = overlap_gemm.quantize_rows(matrix, self.dtype, block=WIDTH, power_of_two=True)
            return values, overlap_gemm.swizzle_scales(scale)
        if self.scales == "rows" or rows == 1:
            return overlap_gemm.quantize_rows(
                matrix, self.dtype, block=BLOCK if self.scales == "blocks" else None
            )
        whole = F.pad(matrix, (0, -width % BLOCK, 0, -height % rows))
        blocks = whole.unflatten(0, (-1, rows)).unflatten(2, (-1, BLOCK)).transpose(1, 2)
        values, scale = overlap_gemm.quantize_rows(blocks.flatten(2), self.dtype)
        values = values.view(blocks.shape).transpose(1, 2).reshape(whole.shape)
        return values[:height, :width].contiguous(), scale.squeeze(-1)

    @property
    def arguments(self) -> dict[str, Any]:
        """What an op takes besides tensors: extents over all ranks, known here as in a model, and `block`."""
        return {**self.spec.arguments(self.m, self.n, self.k), "block": self.block}

    def by(self, backend: str, operands: OpTensors, group: Group) -> Call:
        """The op by a backend of this library."""
        op, how = getattr(overlap_gemm, self.op), {**self.arguments, **operands.scales}
        x, weight = operands.x, operands.weight
        return lambda: op(x, weight, group=group.process_group, backend=backend, **how)

    def taken_by(self, backend: str, operands: OpTensors, group: Group) -> str:
        """The backend that carries it out when asked for `backend`, which may be "auto"."""
        how: dict[str, Any] = {"backend": backend, **self.arguments, **operands.scales}
        choice = overlap_gemm.explain(self.op, operands.x, operands.weight, group=group.process_group, **how)
        return choice.backend.name
