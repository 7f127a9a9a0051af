"""Results of a gather that several linears share, for each of these linears."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...dispatch.autocast import result_dtype
from ...dispatch.calls import needs_grad


class ProductState(NamedTuple):
    """State of torch and of the input on which a product depends.

    Attributes:
        records: Whether gradients are recorded.
        dtype: dtype of the product, by the autocast state.
        version: Number of changes of the input in place.
        hooks: Hooks on saved tensors; a checkpoint within the module sets its own.
    """

    records: bool
    dtype: torch.dtype
    version: int
    hooks: Any


def product_state(x: Tensor) -> ProductState:
    """Returns the state of a product of x that is computed now."""
    records, dtype = torch.is_grad_enabled(), result_dtype(x)
    if torch.compiler.is_compiling():  # Dynamo can compare neither versions nor hooks
        return ProductState(records, dtype, 0, None)
    version = 0 if x.is_inference() else x._version
    return ProductState(records, dtype, version, torch._C._autograd._top_saved_tensors_default_hooks(True))


class Gathered(NamedTuple):
    """A linear's result of a shared gather, valid while the module around it runs.

    Attributes:
        stand_in: Tensor that the module's forward gets: in place of the gathered input, or its input.
        rows: Input of the module: this rank's rows, or a replicated input.
        product: Product of the gathered input and the linear's weight; None after it was fetched.
        total: Number of rows over all ranks; None if the input is replicated.
        state: State in which the product was computed.
    """

    stand_in: Tensor
    rows: Tensor
    product: Tensor | None
    total: int | None
    state: ProductState

    def product_for(self, x: Tensor, linear: nn.Module, source: nn.Module) -> Tensor | None:
        """Returns the product for a call of the linear; None if the linear multiplies a replicated x itself.

        Args:
            x: Input of the call.
            linear: Linear of the call.
            source: Module whose parameters it multiplies with as well; it may be the linear.

        Raises:
            RuntimeError: The input is sharded, and the product is not the call's result.
        """
        out, state = self.product, product_state(self.stand_in)
        is_input = (x is self.stand_in or x is self.rows) and state.version == self.state.version
        if not is_input or out is None:
            if self.total is None:
                return None
            raise RuntimeError(
                f"{linear} shares the gather of its input with other linears: call it once, with the "
                f"unchanged input of the module around it (hooks that change it belong on that module)"
            )
        difference = self._difference(out, state, (linear, source))
        if self.total is None:
            return out if difference is None and state.hooks == self.state.hooks else None
        if difference is not None:
            raise RuntimeError(
                f"{linear} is called {difference}, unlike the gather that it shares with other linears: call "
                f"the module around it in the same way, or freeze it"
            )
        return out

    def _difference(self, out: Tensor, state: ProductState, modules: Sequence[nn.Module]) -> str | None:
        if state.dtype != self.state.dtype:
            return f"for a product in {state.dtype} (by another autocast region)"
        if out.requires_grad and not state.records:
            return "without gradients (by reentrant recomputation?)"
        if self.state.records or not state.records:
            return None
        parameters = [parameter for one in modules for parameter in one.parameters()]
        return "with gradients" if needs_grad(self.rows, parameters) else None
