"""Epilogues of layers: a residual added to a sum over the ranks, an activation applied to gate and up.

Values of a layer's `fuse`:

- None: kernels that support epilogues apply the operation; otherwise torch operations follow the op.
- True: the epilogue is an argument of the op in every call.
- False: torch operations always follow.

With a layer's argument `invariant`, None is True for a residual, so that no choice changes the bits.

Torch operations also follow, whatever `fuse` is:

- with a promised `invariant`, for other operations, and for a residual of 8-bit products,
- with an `invariant` of a block or the environment and `fuse=None`: compiled layers do not see those,
- for a residual of another dtype than the product's (autocast); the sum has the promoted dtype,
- for gate and up without sequence parallelism, whose products are local. In eager inference they are one
  kernel, unless `fuse` is False.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from ..backends.op_call import promises_of
from ..dispatch.autocast import result_dtype
from ..dispatch.epilogue_checks import why_not_invariant
from ..dispatch.ops import all_gather_gemm
from ..dispatch.with_epilogue import apply_to_results
from ..epilogues import Applied, Epilogue, add_residual, add_residual_rms_norm, geglu, geglu_tanh, swiglu
from ..spec.promises import Promises
from .float8 import Float8, Products

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"] | Epilogue
"""Activation of a gated MLP; or an epilogue of gate and up (`pairs=True`) without inputs and outputs."""


class Gating(NamedTuple):
    """Function of gates and ups, such as activated gates times ups.

    Attributes:
        epilogue: Epilogue of both sums.
        by_torch: The same on both results, by operations of torch.
    """

    epilogue: Epilogue
    by_torch: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def of_gates(cls, epilogue: Epilogue, activate: Callable[[Tensor], Tensor]) -> "Gating":
        """Returns the gating of ups multiplied by activated gates."""
        return cls(epilogue, partial(_times_up, activate))

    @classmethod
    def of(cls, activation: Activation) -> "Gating":
        """Returns the gating of a layer's `activation`.

        Raises:
            ValueError: There is no such activation, or the epilogue is not of pairs alone.
        """
        if not isinstance(activation, Epilogue):
            if activation not in GATINGS:
                raise ValueError(f"activation must be one of {', '.join(GATINGS)}, got {activation!r}")
            return GATINGS[activation]
        if not activation.pairs or activation.inputs or activation.returned or activation.result:
            raise ValueError(
                f"activation must be an epilogue of pairs without inputs, outputs and 8-bit result; "
                f"{activation.name} has pairs={activation.pairs}, inputs={dict(activation.inputs)}, "
                f"outputs={dict(activation.returned)}, result={activation.result!r}"
            )
        return cls(activation, partial(_by_function, activation))


def _times_up(activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activate(gate) * up


def _by_function(epilogue: Epilogue, gate: Tensor, up: Tensor) -> Tensor:
    """Returns an epilogue's function of both results, rounded to their type."""
    return epilogue.on_tensors((gate, up), ())[0].to(gate.dtype)  # type: ignore[no-any-return]


GATINGS: dict[str, Gating] = {
    "silu": Gating.of_gates(swiglu, F.silu),
    "gelu": Gating.of_gates(geglu, F.gelu),
    "gelu_tanh": Gating.of_gates(geglu_tanh, partial(F.gelu, approximate="tanh")),
}


RESIDUAL = "a residual"
NORM_ROWS = 64
"""Rows up to which a norm in the kernel is faster than one after the op (`h200x2-norms.json`)."""

NORM = f"the norm of a result of up to {NORM_ROWS} rows"
NORM_OF_SHARDS = "with sequence parallelism its op shards the rows"
LOCAL_PRODUCTS = "without sequence parallelism gate and up are local products"


def gating_text(epilogue: Epilogue) -> str:
    """Returns the text for a `Fusion` of gate and up."""
    return f"{epilogue.name} of gate and up"


class Fusion(NamedTuple):
    """Operation of a module that may be applied as an epilogue of an op.

    Attributes:
        module: Name of the module.
        epilogue: Text for the epilogue.
        op: Name of the op.
        why_not: Why it is not an epilogue; None: it is, if the op's kernel supports epilogues.
    """

    module: str
    epilogue: str
    op: str
    why_not: str | None = None

    def __str__(self) -> str:
        """Returns a sentence for the report of `overlap_gemm.explain`."""
        if self.why_not is not None:
            return f"{self.module}: {self.epilogue} follows {self.op}: {self.why_not}"
        return f"{self.module}: {self.epilogue} is an epilogue of {self.op}"


def why_not_fused(
    op: str,
    epilogue: Epilogue,
    products: Products,
    fuse: bool | None,
    promises: Promises,
) -> str | None:
    """Returns why a layer's op never takes an epilogue, or None.

    Args:
        op: Name of the op.
        epilogue: The epilogue.
        products: Products of the layer.
        fuse: `fuse` of the layer.
        promises: Arguments `partials` and `invariant` of the layer.
    """
    if fuse is False:
        return "fuse=False"
    promised = promises_of(*promises).invariant
    dtype = products.dtype if isinstance(products, Float8) else None
    why = why_not_invariant(op, epilogue, dtype, promised)
    if why is None and promised is not None and promises.invariant is None and not fuse:
        why = "it is no argument of the layer, and compiled layers do not see others"
    return None if why is None else f"invariant={promised!r}: {why}"


def plus_residual(
    products: Products,
    op: str,
    x: Tensor,
    weight: Any,
    residual: Tensor | None,
    fuse: bool | None,
    **how: Any,
) -> Tensor:
    """Returns the residual plus the result of an op that sums over the ranks.

    Args:
        products: Products of the layer.
        op: Name of the op.
        x: Operand of the op.
        weight: Weight of the op.
        residual: Tensor of the result's shape, or None.
        fuse: `fuse` of the layer.
        **how: Other arguments of the op.
    """
    call = getattr(products, op)
    if residual is None:
        return call(x, weight, **how)  # type: ignore[no-any-return]
    promises = _promises(how)
    why = why_not_fused(op, add_residual, products, fuse, promises)
    if why is None and residual.dtype == result_dtype(x):
        always = fuse or promises.invariant is not None
        applied = Applied(add_residual, (residual,), None if always else lambda out: residual + out)
        return call(x, weight, epilogue=applied, **how)  # type: ignore[no-any-return]
    return residual + call(x, weight, **how)  # type: ignore[no-any-return]


def plus_residual_normed(
    products: Products,
    op: str,
    x: Tensor,
    weight: Any,
    residual: Tensor,
    norm: nn.RMSNorm,
    fuse: bool | None,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """Returns the norm of a residual plus the result of an op, and that sum, as `plus_residual` does.

    Args:
        products: Products of the layer.
        op: Name of the op.
        x: Operand of the op.
        weight: Weight of the op.
        residual: Tensor of the result's shape.
        norm: Norm with a weight and eps.
        fuse: `fuse` of the layer.
        **how: Other arguments of the op.
    """

    def after(out: Tensor) -> tuple[Tensor, Tensor]:
        stream = residual + out
        return norm(stream), stream

    why = why_not_fused(op, add_residual_rms_norm, products, fuse, _promises(how))
    if why is None and residual.dtype == norm.weight.dtype == result_dtype(x):
        inputs = residual, norm.weight, norm.eps
        applied = Applied(add_residual_rms_norm, inputs, None if fuse else after)
        return getattr(products, op)(x, weight, epilogue=applied, **how)  # type: ignore[no-any-return]
    stream = plus_residual(products, op, x, weight, residual, fuse, **how)
    return norm(stream), stream


def _promises(how: Mapping[str, Any]) -> Promises:
    return Promises(how.get("partials"), how.get("invariant"))


def gated(
    products: Products,
    x: Tensor,
    weights: Sequence[Any],
    biases: Sequence[Tensor] | None,
    gating: Gating,
    fuse: bool | None,
    **how: Any,
) -> Tensor:
    """Returns the gating of gate and up, with one gather of x.

    Args:
        products: Products of the layer.
        x: Operand `[M_local, ..., K]`.
        weights: Gate and up.
        biases: Biases of gate and up, or None.
        gating: The gating.
        fuse: `fuse` of the layer.
        **how: Other arguments of `all_gather_gemm`.
    """
    applied = Applied(gating.epilogue, (), None if fuse else gating.by_torch)
    gather: Any = products.all_gather_gemm
    return gather(x, list(weights), bias=biases, epilogue=applied, **how)  # type: ignore[no-any-return]


def gated_products(gate: Tensor, up: Tensor, gating: Gating) -> Tensor:
    """Returns the gating of gate and up, of local products.

    Args:
        gate: Gates `[..., N]`.
        up: Ups `[..., N]` of the same dtype.
        gating: The gating.
    """
    applied = Applied(gating.epilogue, (), gating.by_torch)
    return apply_to_results(all_gather_gemm, (gate, up), applied)[0]
