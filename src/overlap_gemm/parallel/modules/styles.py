"""`ParallelStyle` classes for `torch.distributed.tensor.parallel.parallelize_module`.

Parameters become DTensors as with torch's own styles, so optimizers, gradient clipping and distributed
checkpoints work unchanged.
"""

from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ...api.ahead import LayerOp
from ...api.float8 import COPIES, Float8, Products, products
from ...api.functional import Length
from ...api.kept_weights import STORED, Stored
from ...api.layer_epilogues import LOCAL_PRODUCTS, Fusion, plus_residual
from ...backends.op_call import BackendName
from ...backends.select import check_name
from ...spec import ALL_GATHER_GEMM, GEMM_ALL_GATHER, GEMM_ALL_REDUCE, GEMM_REDUCE_SCATTER
from ...spec.promises import Invariant, Partials, Promises, check_promises
from .gathered import Gathered, product_state
from .kept_linears import weight_of
from .layouts import Rows, as_output, default_rows, distribute, extent, local, local_part

if TYPE_CHECKING:  # typing's own is newer than Python 3.10
    from typing_extensions import Self


class StyleKeywords(TypedDict):
    """Keyword arguments that a style passes to all its ops."""

    backend: BackendName
    partials: Partials | None
    invariant: Invariant | None


class _OverlapStyle(ParallelStyle):
    """Base of the styles: backend, promises and 8-bit settings of their products."""

    def __init__(
        self,
        backend: BackendName,
        float8: Float8 | None,
        partials: Partials | None,
        invariant: Invariant | None,
    ):
        super().__init__()
        promises = Promises(partials, invariant)
        check_promises(promises)
        check_name(backend, promises=promises)
        self.products = products(float8)
        self.keywords = StyleKeywords(backend=backend, partials=partials, invariant=invariant)

    @property
    def promises(self) -> Promises:
        """Returns the promises that all its ops get."""
        return Promises(self.keywords["partials"], self.keywords["invariant"])

    def without_float8(self) -> "Self":
        """Returns a copy without `float8`."""
        style = copy(self)
        style.products = products(None)
        return style


class OverlapColwiseParallel(_OverlapStyle):
    """Shards an `nn.Linear` by output features and gathers its input while multiplying.

    | input_layouts | output_layouts | op |
    |---|---|---|
    | `Replicate()` | `Shard(-1)` | local product; backward all-reduces |
    | `Shard(d)`, d a row dimension | `Shard(-1)` | `all_gather_gemm(dim=d)` |
    | `Replicate()` | `Replicate()` | `gemm_all_gather` |

    Args:
        input_layouts: Placement of the input (a local tensor or a DTensor); default `Replicate()`.
        output_layouts: Placement of the output; default `Shard(-1)`.
        use_local_output: Return a local tensor, not a DTensor.
        rows: Total number of input rows as in `overlap_gemm.all_gather_gemm`, or a function that returns it.
        backend: Backend of the ops, as in `overlap_gemm.all_gather_gemm`.
        float8: 8-bit settings, as in `overlap_gemm.nn.ColumnParallelLinear`.
        partials: Type of partial sums, as in `overlap_gemm.gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `overlap_gemm.gemm_reduce_scatter`.

    Raises:
        ValueError: The pair of layouts is not in the table.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        rows: Rows = None,
        backend: BackendName = "auto",
        float8: Float8 | None = None,
        partials: Partials | None = None,
        invariant: Invariant | None = None,
    ):
        super().__init__(backend, float8, partials, invariant)
        self.input_layout = input_layouts or Replicate()
        self.output_layout = output_layouts or Shard(-1)
        self.use_local_output, self.rows = use_local_output, rows
        pair = (self.input_layout, self.output_layout)
        gathers_both = isinstance(self.input_layout, Shard) and isinstance(self.output_layout, Replicate)
        if gathers_both or not all(isinstance(layout, (Shard, Replicate)) for layout in pair):
            raise ValueError(
                f"OverlapColwiseParallel: (input_layouts, output_layouts) must be (Replicate, Shard(-1)), "
                f"(Shard(d), Shard(-1)) or (Replicate, Replicate), got {pair}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, {"weight": Shard(0), "bias": Shard(0)}, self.src_data_rank)
        module.forward = ColwiseForward(module, device_mesh, self)
        return module


class OverlapRowwiseParallel(_OverlapStyle):
    """Shards an `nn.Linear` by input features and sums the partial results while multiplying.

    | output_layouts | op |
    |---|---|
    | `Replicate()` | `gemm_all_reduce` |
    | `Shard(d)`, d a row dimension | `gemm_reduce_scatter(dim=d)` |

    Args:
        input_layouts: Placement of the input; must be `Shard(-1)`.
        output_layouts: Placement of the output; default `Replicate()`.
        use_local_output: Return a local tensor, not a DTensor.
        backend: Backend of the ops, as in `overlap_gemm.gemm_reduce_scatter`.
        float8: 8-bit settings, as in `overlap_gemm.nn.ColumnParallelLinear`.
        partials: Type of partial sums, as in `overlap_gemm.gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `overlap_gemm.gemm_reduce_scatter`.

    Raises:
        ValueError: A layout is not listed above.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        backend: BackendName = "auto",
        float8: Float8 | None = None,
        partials: Partials | None = None,
        invariant: Invariant | None = None,
    ):
        super().__init__(backend, float8, partials, invariant)
        self.input_layout = input_layouts or Shard(-1)
        self.output_layout = output_layouts or Replicate()
        self.use_local_output = use_local_output
        if self.input_layout != Shard(-1) or not isinstance(self.output_layout, (Shard, Replicate)):
            raise ValueError(
                f"OverlapRowwiseParallel: input_layouts must be Shard(-1), output_layouts Replicate or "
                f"Shard, got {self.input_layout} and {self.output_layout}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, device_mesh, {"weight": Shard(1), "bias": Replicate()}, self.src_data_rank)
        module.forward = RowwiseForward(module, device_mesh, self)
        return module


class OverlapSharedGather(_OverlapStyle):
    """One exchange for several column-parallel linears of a module (q/k/v of attention, gate/up of an MLP).

    | input_layouts | op of the named children | gradient of the module's input |
    |---|---|---|
    | `Shard(d)`, d a row dimension | `all_gather_gemm` | `gemm_reduce_scatter` |
    | `Replicate()` | local products | `gemm_all_reduce` |

    Each child is styled `OverlapColwiseParallel()`. Hooks of the module see its input. The module's forward
    passes its input once to each of those children, as Hugging Face's attention and MLP do.

    With `Shard(d)` the forward sees a stand-in: a tensor with the gathered input's shape and no values
    (reading it gives NaN). The forward may read the stand-in's shape. A child raises RuntimeError if it gets
    another tensor, or if the module is called in another gradient mode or autocast region. With `Replicate()`
    such a child multiplies its own input, and sums the gradient itself. The same holds in a checkpoint within
    the module. It holds after a change of the input in place, too, but not in graphs and inference mode.

    Args:
        *children: Names of the linears, as `get_submodule` takes them.
        input_layouts: Placement of the module's input; default `Shard(1)`, the sequence of `[b, s, h]`.
        argument: Name of the input, for callers that pass it by keyword.
        rows: Total number of input rows as in `overlap_gemm.all_gather_gemm`, or a function that returns it.
        backend: Backend of the op, as in `overlap_gemm.all_gather_gemm`.
        float8: 8-bit settings, as in `overlap_gemm.nn.ColumnParallelLinear`.
        partials: Type of partial sums, as in `overlap_gemm.gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `overlap_gemm.gemm_reduce_scatter`.

    Raises:
        ValueError: `input_layouts` is neither `Shard(d)` nor `Replicate()`.
        TypeError: At a call with `Shard(d)`: a named child is not styled `OverlapColwiseParallel`.
    """

    def __init__(
        self,
        *children: str,
        input_layouts: Placement | None = None,
        argument: str = "hidden_states",
        rows: Rows = None,
        backend: BackendName = "auto",
        float8: Float8 | None = None,
        partials: Partials | None = None,
        invariant: Invariant | None = None,
    ):
        super().__init__(backend, float8, partials, invariant)
        layout = input_layouts or Shard(1)
        if not isinstance(layout, (Shard, Replicate)):
            raise ValueError(f"OverlapSharedGather: input_layouts must be Shard or Replicate, got {layout}")
        self.layout, self.children, self.argument, self.rows = layout, children, argument, rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linears = [module.get_submodule(name) for name in self.children]
        module.forward = _SharedGatherForward(module, self, linears, device_mesh)
        return module


class _SharedGatherForward:
    """Forward of a module styled `OverlapSharedGather`; unlike a closure, it is copied with the module."""

    def __init__(
        self, module: nn.Module, style: OverlapSharedGather, linears: list[nn.Module], mesh: DeviceMesh
    ):
        self.module, self.style, self.linears, self.mesh = module, style, linears, mesh
        self.replaced = vars(module).get("forward")
        """`forward` that was set on the module before, or None."""
        self.gating: Any = None
        """Of an MLP a `fusing.MlpGating`, or why it has none."""

    def fusions(self, name: str) -> Iterator[Fusion]:
        """Yields whether an MLP's activation is an epilogue; see `overlap_gemm.explain`."""
        if self.gating is not None:
            gating = self.gating if isinstance(self.style.layout, Shard) else LOCAL_PRODUCTS
            what, why = "the activation", gating
            if not isinstance(gating, str):
                what, why = gating.name, gating.why_not(self.module, self.linears)
            yield Fusion(name, what, ALL_GATHER_GEMM.name, why)

    def layer_ops(self, name: str) -> Iterator[LayerOp]:
        """Yields the op, if it has one; see `overlap_gemm.explain`."""
        first: Any = self.linears[0]
        if isinstance(self.style.layout, Shard):
            yield LayerOp(name, ALL_GATHER_GEMM.name, extent(first, 1), first.weight, self.mesh)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Multiplies, then runs the module's own forward on the stand-in, or on its input."""
        argument = self.style.argument
        x = kwargs[argument] if argument in kwargs or not args else args[0]
        operands = None
        if not isinstance(self.gating, str | None):
            operands = self.gating.operands(self.module, self.linears, x)
        if operands is not None:
            style, (*tensors, columns) = self.style, operands
            x, rows = local_part(x, self.mesh, style.layout, style.rows)
            how, multiply = {"group": self.mesh, **style.keywords}, self.gating.of_replicated
            if isinstance(style.layout, Shard):
                how |= {"dim": style.layout.dim, "rows": rows, "columns": columns}
                multiply = self.gating.of_gathered
            module: Any = self.module
            products = _products(style, tensors[0][0])
            return module.down_proj(multiply(products, x, *tensors, **how))
        forwards = [one.forward for one in self.linears if isinstance(one.forward, ColwiseForward)]
        outer = [forward.gathered for forward in forwards]  # of a call that this one is in
        stand_in = self._multiply(x)
        if argument in kwargs:
            kwargs = {**kwargs, argument: stand_in}
        else:
            args = (stand_in, *args[1:])
        try:
            if self.replaced is not None:
                return self.replaced(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            for forward, gathered in zip(forwards, outer, strict=True):
                forward.gathered = gathered

    def _multiply(self, x: Tensor) -> Tensor:
        style, linears = self.style, self.linears
        for name, linear in zip(style.children, linears, strict=True):
            if not isinstance(linear.forward, ColwiseForward):
                if isinstance(style.layout, Replicate):
                    return x
                raise TypeError(f"{name} must be styled OverlapColwiseParallel, got {linear}")
        replicated = x
        x, rows = local_part(x, self.mesh, style.layout, style.rows)
        weights, biases, columns = zip(*(linear.forward.operands() for linear in linears), strict=True)
        product = _products(style, weights[0])
        if len({isinstance(weight, Stored) for weight in weights}) > 1:  # adapters of some have been merged
            weights = tuple(w.dequantized(x.dtype) if isinstance(w, Stored) else w for w in weights)
            product = COPIES if type(style.products) is Products else style.products
        if any(bias is not None for bias in biases):  # the op takes one for each weight, or none
            rows_of = [len(weight.values if isinstance(weight, Stored) else weight) for weight in weights]
            biases_and_rows = zip(biases, rows_of, strict=True)
            biases = tuple(x.new_zeros(n) if bias is None else bias for bias, n in biases_and_rows)
        bias = None if biases[0] is None else list(biases)
        if isinstance(style.layout, Shard):
            dim = style.layout.dim
            outs = product.all_gather_gemm(
                x, weights, bias=bias, group=self.mesh, dim=dim, rows=rows, columns=sum(columns),
                **style.keywords,
            )  # fmt: skip
            stand_in = x.new_full((), float("nan")).expand(*outs[0].shape[:-1], x.shape[-1])
            total = outs[0].shape[dim]
        else:
            outs = product.column_parallel_gemm(x, weights, bias, self.mesh, **style.keywords)
            stand_in, x, total = replicated, replicated, None
        state = product_state(stand_in)
        for linear, out in zip(linears, outs, strict=True):
            linear.forward.gathered = Gathered(stand_in, x, out, total, state)
        return stand_in


class ColwiseForward:
    """Forward of a linear styled `OverlapColwiseParallel`."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, style: OverlapColwiseParallel):
        self.module, self.mesh, self.style = module, mesh, style
        self.source = module
        """Module that holds the weight; another one if weights are tied."""
        self.gathered: Gathered | None = None
        """Result of the shared gather while the module of an `OverlapSharedGather` runs; otherwise None."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x; placements of x and the output are the style's."""
        style = self.style
        if (shared := self._fetch(x)) is not None:
            return self._output(shared)
        x, rows = local_part(x, self.mesh, style.input_layout, style.rows)
        weight, bias, columns = self.operands()
        products = _products(style, weight)
        if isinstance(style.input_layout, Shard):
            out = products.all_gather_gemm(
                x, weight, bias=bias, group=self.mesh, dim=style.input_layout.dim, rows=rows,
                columns=columns, **style.keywords,
            )  # fmt: skip
        elif isinstance(style.output_layout, Replicate):
            out = products.gemm_all_gather(
                x, weight, bias=bias, group=self.mesh, columns=columns, **style.keywords
            )
        else:
            out = products.column_parallel_gemm(x, weight, bias, self.mesh, **style.keywords)
        return self._output(out)

    def layer_ops(self, name: str) -> Iterator[LayerOp]:
        """Yields the op, if it has one; see `overlap_gemm.explain`."""
        style, weight = self.style, self.module.weight
        if isinstance(style.input_layout, Shard):
            yield LayerOp(name, ALL_GATHER_GEMM.name, extent(self.module, 1), weight, self.mesh)
        elif isinstance(style.output_layout, Replicate):
            yield LayerOp(name, GEMM_ALL_GATHER.name, extent(self.module, 0), weight, self.mesh)

    def operands(self) -> tuple[Any, Tensor | None, int]:
        """Returns this rank's weight and bias, and the number of columns over all ranks."""
        module = self.module
        bias = None if module.bias is None else local(module.bias, Shard(0))
        return weight_of(self.source, Shard(0)), bias, extent(module, 0)

    def local_rows(self, x: Tensor) -> Tensor:
        """Returns this rank's rows if x is the stand-in of a shared gather, otherwise x."""
        return self.gathered.rows if self.gathered is not None and x is self.gathered.stand_in else x

    def total_rows(self) -> Length:
        """Returns the number of input rows over all ranks during a shared gather.

        Outside of one it returns `default_rows()`.
        """
        return default_rows() if self.gathered is None else self.gathered.total

    def _fetch(self, x: Tensor) -> Tensor | None:
        """Returns the product of a shared gather; None if there is none, or none of a replicated x."""
        if self.gathered is None:
            return None
        if (out := self.gathered.product_for(x, self.module, self.source)) is not None:
            self.gathered = self.gathered._replace(product=None)
        return out

    def _output(self, out: Tensor) -> Tensor:
        full_shape = torch.Size((*out.shape[:-1], extent(self.module, 0)))
        return as_output(out, full_shape, self.mesh, self.style.output_layout, self.style.use_local_output)


class RowwiseForward:
    """Forward of a linear styled `OverlapRowwiseParallel`."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, style: OverlapRowwiseParallel):
        self.module, self.mesh, self.style = module, mesh, style
        self.residual: tuple[Tensor | None, bool | None] | None = None
        """Residual that the next call adds, and whether as an epilogue (`fuse`)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x; placements of x and the output are the style's."""
        style, module = self.style, self.module
        x, _ = local_part(x, self.mesh, style.input_layout, None)
        weight = weight_of(module, Shard(1))
        products, (residual, fuse) = _products(style, weight), self.residual or (None, None)
        self.residual = None
        how: dict[str, Any] = {"group": self.mesh, "k": extent(module, 1), **style.keywords}
        how["bias"] = None if module.bias is None else local(module.bias, Replicate())
        if isinstance(style.output_layout, Shard):
            how["dim"] = style.output_layout.dim
        out = plus_residual(products, self.op, x, weight, residual, fuse, **how)
        full_shape = torch.Size((*x.shape[:-1], out.shape[-1]))
        return as_output(out, full_shape, self.mesh, style.output_layout, style.use_local_output)

    @property
    def op(self) -> str:
        """Returns the name of the op."""
        is_sharded = isinstance(self.style.output_layout, Shard)
        return (GEMM_REDUCE_SCATTER if is_sharded else GEMM_ALL_REDUCE).name

    def layer_ops(self, name: str) -> Iterator[LayerOp]:
        """Yields the op; see `overlap_gemm.explain`."""
        yield LayerOp(name, self.op, extent(self.module, 0), self.module.weight, self.mesh)


def _products(style: Any, weight: Any) -> Products:
    """Returns the functions that multiply by a weight: those of kept weights, or of the style."""
    plain: Products = style.products
    return STORED if isinstance(weight, Stored) else plain
