"""Workloads of benchmarks and tests: an op on one shape, its operands on this rank, and its calls."""

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
from ..backends.select import Choice
from ..config.scale_blocks import Blocks
from ..epilogues import Applied
from ..runtime.group import Group
from ..spec import OPS, OpSpec
from ..spec.sharding import Shards
from ..tuning.prediction import Facts

Call = Callable[[], object]

Scales = Literal["rows", "tensor", "blocks", "mx"]
"""Group of elements of an 8-bit operand that share a scale.

``"rows"``: a row. ``"tensor"``: the full operand. ``"blocks"``: 1 x 128 elements of x, 128 x 128 of the
weight. ``"mx"``: 32 elements along K of a row, as in MX types.
"""

MOST = 8
"""Assumed upper limit of an operand's magnitude, in standard deviations; sets the scale of "tensor"."""


def in_turn(calls: Sequence[Call]) -> Call:
    """Returns a call that makes the next of several calls each time, starting again after the last one."""
    if len(calls) == 1:
        return calls[0]
    turns = cycle(calls)
    return lambda: next(turns)()


class OpTensors(NamedTuple):
    """Tensors of one call of an op on this rank.

    Attributes:
        x: Operand x.
        weight: Weight.
        scale_x: Scales of x, in the form that `overlap_gemm.gemm_reduce_scatter` takes; None without scales.
            For "mx" these are powers of two in `torch.float8_e8m0fnu`, as `swizzle_scales` returns them.
        scale_w: Scales of the weight, in the same form.
    """

    x: Tensor
    weight: Tensor
    scale_x: Tensor | None = None
    scale_w: Tensor | None = None

    @property
    def scales(self) -> dict[str, Tensor | None]:
        """Returns the op's keyword arguments `scale_x` and `scale_w`."""
        return {"scale_x": self.scale_x, "scale_w": self.scale_w}


@dataclass(frozen=True)
class Workload:
    """An op with the shape of its unsharded product `[M, K] x [N, K]^T`.

    Attributes:
        name: Name of the layer in a model, for tables.
        op: Public name of the op.
        m: Rows M over all ranks.
        n: Output features N over all ranks.
        k: Input features K over all ranks.
        dtype: Dtype of operands and result; the result of 8-bit operands is bfloat16.
        scales: Elements that share a scale, for 8-bit operands; None: operands without scales.
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
        """Returns the dtype of the result."""
        return self.dtype if self.scales is None else OUT_DTYPES[0]

    @property
    def spec(self) -> OpSpec:
        """Returns the definition of the op."""
        return OPS[self.op]

    def flops(self, ranks: int) -> float:
        """Returns the number of floating-point operations of one rank, of `ranks`."""
        return 2.0 * self.m * self.n * self.k / ranks

    def facts(self, ranks: int) -> Facts:
        """Returns the workload as an input of the time model, for a number of ranks."""
        kind = (DTYPES | FLOAT8).get(self.dtype, "f32")
        return Facts(self.op, self.m, self.n, self.k, kind, ranks, blocks=self.blocks)

    @property
    def blocks(self) -> Blocks | None:
        """Returns the extents of the blocks that share a scale; None for scales of rows or of a tensor."""
        return None if self.block is None else NAMED_BLOCKS[self.block]

    @property
    def block(self) -> Block:
        """Returns the op's argument `block`."""
        names: dict[str, Block] = {"blocks": BLOCK, "mx": "mx"}
        return names.get(self.scales or "")

    def shapes(self, group: Group) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of this rank's x and weight."""
        return self.spec.shapes(self.m, self.n, self.k, Shards.owned_by(group.size, group.rank))

    def operands(self, group: Group, device: torch.device) -> OpTensors:
        """Returns this rank's operands on a device: normal random values, drawn in `out_dtype`.

        The seed is the rank, so values differ between ranks, also of an x that the op expects to be equal.
        Only the weight of an all-to-all op is equal on all ranks: its seed is the number of ranks.

        The weight is divided by sqrt(K), so the results' standard deviation is near 1. 8-bit operands are
        rounded with scales that map the largest magnitude of a group to the type's largest value. A scale of
        a full operand is a float32 constant from `MOST`, because torch's all-gather needs equal scales.
        """
        x_shape, weight_shape = self.shapes(group)
        generator = torch.Generator(device).manual_seed(group.rank)
        x = torch.randn(x_shape, generator=generator, device=device, dtype=self.out_dtype)
        if self.spec.weight is None:  # the weight is replicated: same seed on every rank
            generator.manual_seed(group.size)
        weight = torch.randn(weight_shape, generator=generator, device=device, dtype=self.out_dtype)
        weight, deviation = weight / self.k**0.5, self.k**-0.5
        (x, scale_x), (weight, scale_w) = self._rounded(x, 1), self._rounded(weight, BLOCK, deviation)
        return OpTensors(x, weight, scale_x, scale_w)

    def num_sets(self, group: Group, device: torch.device) -> int:
        """Returns the number of operand sets to use in turn, so that GPU caches hold none; 1 on CPUs."""
        nbytes = sum(math.prod(shape) for shape in self.shapes(group)) * self.dtype.itemsize
        return num_sets(nbytes, device)

    def warm_up(self, group: Group, device: torch.device) -> None:
        """Calls `overlap_gemm.warmup`: compiles, allocates, and measures candidates of backend "auto".

        Collective: runs the op on every rank of the group.
        """
        options = {"group": group.process_group, "dtype": self.dtype, "block": self.block, "device": device}
        overlap_gemm.warmup(self.op, (self.m, self.n, self.k), **options)  # type: ignore[arg-type]

    def gathered(self, operands: OpTensors) -> OpTensors:
        """Returns the operands with x replaced by random values `[M, K]`, without communication.

        This x has the shape and dtype of the one that an all-gather over the ranks would return, but other
        values.
        """
        x = torch.randn(self.m, self.k, device=operands.x.device, dtype=self.out_dtype)
        x, scale_x = self._rounded(x, 1)
        return operands._replace(x=x, scale_x=scale_x)

    def _rounded(self, matrix: Tensor, rows: int, deviation: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """Returns a matrix in `dtype`, and its scales or None.

        Args:
            matrix: `[rows, K]` in a 16-bit or wider dtype.
            rows: Rows of a block, if `scales` is "blocks".
            deviation: Standard deviation of the values, if `scales` is "tensor".
        """
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
        padded = F.pad(matrix, (0, -width % BLOCK, 0, -height % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, BLOCK)).transpose(1, 2)
        values, scale = overlap_gemm.quantize_rows(blocks.flatten(2), self.dtype)
        values = values.view(blocks.shape).transpose(1, 2).reshape(padded.shape)
        return values[:height, :width].contiguous(), scale.squeeze(-1)

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the op's keyword arguments besides tensors: extents over all ranks, and `block`."""
        return {**self.spec.arguments(self.m, self.n, self.k), "block": self.block}

    def by(self, backend: str, operands: OpTensors, group: Group, epilogue: Applied | None = None) -> Call:
        """Returns a call of the op with a backend's name, which may be "auto"; each call runs the op."""
        op, how = getattr(overlap_gemm, self.op), {**self.arguments, **operands.scales}
        if epilogue is not None:
            how["epilogue"] = epilogue
        x, weight = operands.x, operands.weight
        return lambda: op(x, weight, group=group.process_group, backend=backend, **how)

    def explained(
        self, backend: str, operands: OpTensors, group: Group, epilogue: Applied | None = None
    ) -> Choice:
        """Returns the choice of a backend if `backend` (also "auto") is requested.

        Calls `overlap_gemm.explain`, which does not run the op. For "auto" it communicates once per group.
        """
        how: dict[str, Any] = {"backend": backend, **self.arguments, **operands.scales}
        if epilogue is not None:
            how["epilogue"] = epilogue
        return overlap_gemm.explain(self.op, operands.x, operands.weight, group=group.process_group, **how)

    def taken_by(self, backend: str, operands: OpTensors, group: Group) -> str:
        """Returns the name of the backend that runs the op if `backend` is requested, by `explained`."""
        return self.explained(backend, operands, group).backend.name
