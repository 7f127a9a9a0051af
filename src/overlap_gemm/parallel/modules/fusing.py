"""Residuals of decoder layers, and activations of MLPs, as epilogues of the products around them.

A family's own forward runs: where it adds what an attention or MLP returns to the layer's hidden states, the
last projection has added them already (`Summed`). A run on stand-ins, when the model is parallelized, shows
whether a forward does that and nothing else in between; if not, nothing is fused.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...api.float8 import Products
from ...api.kept_weights import Stored
from ...api.layer_epilogues import (
    GATINGS,
    LOCAL_PRODUCTS,
    RESIDUAL,
    Fusion,
    Gating,
    gated,
    gated_products,
    gating_text,
    why_not_fused,
)
from ...backends.epilogues import why_one_weight
from ...backends.op_call import promises_of
from ...backends.scales.scale_layouts import LAYOUTS
from ...backends.scales.scaling import NAMED_BLOCKS
from ...dispatch.calls import needs_grad
from ...epilogues import Epilogue, add_residual
from ...spec import ALL_GATHER_GEMM
from ..adapters import bases
from .kept_linears import KeptLinear

HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Hooks on a module that would see another result."""


class NoPatternError(Exception):
    """A forward does something else with a result than to add it."""


class Summed:
    """Result of an attention or MLP that has the residual in it: adding this again returns the sum.

    Args:
        total: The sum.
        residual: The tensor that has been added.
        part: Name of the module, for messages.
    """

    def __init__(self, total: Any, residual: Any, part: str):
        self.total, self.residual, self.part = total, residual, part
        self.is_added = False

    def __radd__(self, residual: Any) -> Any:
        if residual is not self.residual:
            raise NoPatternError(f"{self.part}'s output is added to something else than its norm's input")
        self.is_added = True
        return self.total

    __add__ = __radd__

    def __mul__(self, factor: Any) -> Any:
        raise NoPatternError(f"{self.part}'s output is multiplied before it is added")

    def view(self, *_: Any) -> "Summed":
        """Returns itself: the residual's shape is the sum's."""
        return self


class LayerForward:
    """The forward of a decoder layer whose projections add the residuals.

    Args:
        module: The layer; its attention and MLP have their forwards.
        rows: Last projection of each of its parts, by the part's name.
        fuse: Argument of `parallelize`.
    """

    def __init__(self, module: nn.Module, rows: dict[str, str], fuse: bool | None):
        self.module, self.rows, self.fuse = module, rows, fuse
        self.parts = {name: module.get_submodule(name) for name in rows}
        self.dropouts = [child for child in module.children() if isinstance(child, nn.Dropout)]
        self.why_not = {name: self._why_no_pattern(name) for name in rows}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the family's own forward."""
        module = self.module
        if not torch.compiler.is_compiling():  # which cannot trace `tensor + Summed`, and fuses the addition
            parts = [name for name in self.rows if self._why_not_now(name) is None]
            if parts and not any(child.training and child.p for child in self.dropouts):
                adding = {name: _Adding(self, name) for name in parts}
                return type(module).forward(_class_for(module)(module, adding), *args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def row(self, name: str) -> Any:
        """Returns the forward of a part's last projection."""
        return bases(getattr(self.parts[name], self.rows[name]))[0].forward

    def fusions(self, name: str) -> Iterator[Fusion]:
        """Yields what is an epilogue; see `overlap_gemm.explain`."""
        for part, row in self.rows.items():
            forward = self.row(part)
            yield Fusion(f"{name}.{part}.{row}", RESIDUAL, forward.op, self._why_not_now(part))
            mlp: Any = self.parts[part]
            if part != "self_attn" and not hasattr(vars(mlp).get("forward"), "fusions"):
                yield Fusion(f"{name}.{part}", "the activation", ALL_GATHER_GEMM.name, LOCAL_PRODUCTS)

    def _why_not_now(self, name: str) -> str | None:
        """Returns why a part's projection does not add the residual, as the module is now."""
        part, row = self.parts[name], getattr(self.parts[name], self.rows[name])
        if self.why_not[name] is not None:
            return self.why_not[name]
        if getattr(self.module, name) is not part:
            return f"{name} is wrapped"
        if is_hooked(part, row, *bases(row)):
            return f"{name} or {self.rows[name]} has a hook on its output"
        forward = self.row(name)
        style = forward.style
        why = why_not_fused(forward.op, add_residual, style.products, self.fuse, style.promises)
        if why is None and (promised := promises_of(*style.promises).invariant) is not None:
            return f"invariant={promised!r}: in compiled models it follows, so it always does"
        return why

    def _why_no_pattern(self, name: str) -> str | None:
        first, module = _Hidden(), self.module
        stubs = {part: _Stub(part, part == name) for part in ("self_attn", "mlp", "feed_forward")}
        try:
            last = type(module).forward(_class_for(module)(module, stubs, is_dry=True), first)
        except NoPatternError as error:
            return str(error)
        except Exception as error:
            return f"{type(module).__name__}.forward is of another form: {error}"
        last = last[0] if isinstance(last, tuple) else last
        added = stubs[name].result
        if not isinstance(last, _Hidden) or added is None or not added.is_added:
            return f"{type(module).__name__}.forward does not add {name}'s output to its hidden states"
        return None


class _Layer:
    """The `self` that a decoder layer's own forward gets: parts return `Summed`, norms record their input.

    Args:
        module: The layer.
        parts: Callable in place of each part, by the part's name.
        is_dry: True: nothing is computed.
    """

    def __init__(self, module: nn.Module, parts: dict[str, Any], is_dry: bool = False):
        self._module, self._parts, self._is_dry = module, parts, is_dry

    def __getattr__(self, name: str) -> Any:
        if name in self._parts:
            return self._parts[name]
        if self._is_dry and name == "gradient_checkpointing":
            return False
        value = getattr(self._module, name)
        if isinstance(value, nn.Dropout):
            return _same
        if name.endswith("norm") and isinstance(value, nn.Module):  # by its name: PEFT wraps what it saves
            return _Norm(value, self._parts, name, self._is_dry)
        return value


_classes: dict[Any, type[_Layer]] = {}
"""Subclass of `_Layer` for each forward, with that forward as `type(self).forward`.

transformers' layers compare `type(self).forward` to decide about recomputation (gradient checkpointing).
"""


def _class_for(module: nn.Module) -> type[_Layer]:
    forward = type(module).forward
    if forward not in _classes:
        _classes[forward] = type("_Layer", (_Layer,), {"forward": forward})
    return _classes[forward]


def _same(x: Any) -> Any:
    return x


class _Norm:
    def __init__(self, norm: Any, parts: dict[str, Any], name: str, is_dry: bool):
        self.norm, self.parts, self.name, self.is_dry = norm, parts, name, is_dry

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Summed):
            raise NoPatternError(f"{self.name} follows {x.part}, before the residual is added")
        for part in self.parts.values():
            part.residual = x
        if not self.is_dry:
            return self.norm(x)
        if not isinstance(x, _Hidden):
            raise NoPatternError(f"{self.name} is of something else than hidden states")
        return _Normed()


class _Adding:
    """An attention or MLP whose last projection adds the residual."""

    def __init__(self, layer: LayerForward, name: str):
        self.layer, self.name = layer, name
        self.residual: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part, row, residual = self.layer.parts[self.name], self.layer.row(self.name), self.residual
        row.residual = residual, self.layer.fuse
        try:
            out = part(*args, **kwargs)
            if row.residual is not None:
                raise RuntimeError(f"{self.name} has not called its {self.layer.rows[self.name]}")
        finally:
            row.residual = None
        if isinstance(out, tuple):
            return Summed(out[0], residual, self.name), *out[1:]
        return Summed(out, residual, self.name)


class _Hidden:
    """A stand-in of hidden states."""

    shape = ()

    def __add__(self, other: Any) -> Any:
        return other.__radd__(self) if isinstance(other, Summed) else _Hidden()

    __radd__ = __add__


class _Normed:
    """A stand-in of what a norm returns."""


class _Anything(_Hidden):
    """A stand-in of the result of a part that is not looked at."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __iter__(self) -> Iterator[Any]:
        return iter((self, None))

    def __mul__(self, _: Any) -> Any:
        return self


class _Stub:
    """A part in a run on stand-ins."""

    def __init__(self, name: str, is_examined: bool):
        self.name, self.is_examined = name, is_examined
        self.residual: Any = None
        self.result: Summed | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
        if not self.is_examined:
            return _Anything()
        if not isinstance(x, _Normed):
            raise NoPatternError(f"{self.name} is called with something else than a norm's result")
        if self.result is not None:
            raise NoPatternError(f"{self.name} is called twice")
        self.result = Summed(_Hidden(), self.residual, self.name)
        return (self.result, None) if self.name == "self_attn" else self.result


class MlpGating(NamedTuple):
    """The gating of an MLP: activated gates are multiplied by ups.

    Attributes:
        epilogue: Epilogue of gate and up.
        activate: Its module.
        packed: Projection that holds gate and up, without adapters, or None.
        fuse: Argument of `parallelize`.
    """

    epilogue: Epilogue
    activate: Any
    packed: nn.Module | None
    fuse: bool | None

    @property
    def name(self) -> str:
        """Returns the name of a `Fusion`."""
        return gating_text(self.epilogue)

    def operands(self, module: Any, linears: list[Any], x: Tensor) -> tuple[Any, Any, int] | None:
        """Returns weights, biases and columns over all ranks; None where no epilogue is to be applied.

        Args:
            module: The MLP.
            linears: Gate and up.
            x: Input of the MLP.
        """
        if self.why_not(module, linears) is not None or (self.fuse is None and torch.compiler.is_compiling()):
            return None
        weights, biases, columns = zip(*(linear.forward.operands() for linear in linears), strict=True)
        present = [bias for bias in biases if bias is not None]
        if len({isinstance(weight, Stored) for weight in weights}) > 1 or len(present) == 1:
            return None
        if self.fuse is None and needs_grad(x, weights, present):
            return None
        return weights, present or None, sum(columns)

    @property
    def gating(self) -> Gating:
        """Returns the gating by the module's own activation."""
        return Gating.of_gates(self.epilogue, self.activate)

    def of_gathered(self, products: Products, x: Tensor, weights: Any, biases: Any, **how: Any) -> Tensor:
        """Returns activated gates times ups, of all ranks' rows.

        Args:
            products: Products of the weights.
            x: This rank's rows of the input of the MLP.
            weights: Weights of gate and up.
            biases: Biases, or None.
            **how: Options of `all_gather_gemm`.
        """
        return gated(products, x, weights, biases, self.gating, self.fuse, **how)

    def of_replicated(self, products: Products, x: Tensor, weights: Any, biases: Any, **how: Any) -> Tensor:
        """Returns activated gates times ups, of a replicated input; arguments as in `of_gathered`.

        Options are those of `column_parallel_gemm`.
        """
        gate, up = products.column_parallel_gemm(x, weights, biases, **how)
        return gated_products(gate, up, self.gating)

    def why_not(self, module: Any, linears: list[Any]) -> str | None:
        """Returns why gate and up of an MLP get no epilogue, as the module is now."""
        present = [module.gate_up_proj] if self.packed is not None else [module.gate_proj, module.up_proj]
        expected = [self.packed] if self.packed is not None else linears
        if any(one is not other for one, other in zip(present, expected, strict=True)):
            return "gate and up have adapters, which add to them before the activation"
        if is_hooked(*present, *linears, self.activate, names=("_forward_pre_hooks", *HOOKS)):
            return "gate, up or their activation has a hook"
        if isinstance(linears[0], KeptLinear) and linears[0].block is not None:
            return why_one_weight(LAYOUTS[NAMED_BLOCKS[linears[0].block]])
        style = linears[0].forward.style
        return why_not_fused(ALL_GATHER_GEMM.name, self.epilogue, style.products, self.fuse, style.promises)


def gating_of_mlp(module: Any, fuse: bool | None, epilogue: Epilogue | None = None) -> MlpGating | str:
    """Returns how an MLP's forward gates, or why it is no `down(activation(gate) * up)`.

    Args:
        module: The MLP, its projection packed or not.
        fuse: Argument of `parallelize`.
        epilogue: Epilogue that computes the gating; None: one of the predefined.
    """
    activate = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    try:
        if type(module).forward(_Mlp(), _Normed()) is not _Mlp.out:
            return f"{type(module).__name__}.forward is of another form"
    except Exception as error:
        return f"{type(module).__name__}.forward is of another form: {error}"
    x = torch.linspace(-4, 4, 65, dtype=torch.float64, device="cpu")
    up = x.flip(0) + 0.5
    known = [epilogue] if epilogue is not None else [gating.epilogue for gating in GATINGS.values()]
    for one in known:
        computed = one.on_tensors((x, up), ())[0]
        if activate is not None and torch.allclose(activate(x) * up, computed, rtol=0, atol=1e-8):
            packed = bases(module.gate_up_proj)[0] if hasattr(module, "gate_up_proj") else None
            return MlpGating(one, activate, packed, fuse)
    which = "no epilogue has" if epilogue is None else f"{epilogue.name} does not compute"
    return f"{which} its activation, {type(activate).__name__}"


class _Mlp:
    """The `self` that an MLP's own forward gets in a run on stand-ins."""

    gate, up, activated, product, out, both = (object() for _ in range(6))

    def gate_proj(self, x: Any) -> Any:
        return self._checked(x, self.gate)

    def up_proj(self, x: Any) -> Any:
        return self._checked(x, self.up)

    def gate_up_proj(self, x: Any) -> Any:
        return _Packed() if isinstance(x, _Normed) else None

    def act_fn(self, x: Any) -> Any:
        return _Activated() if x is self.gate else None

    activation_fn = act_fn

    def down_proj(self, x: Any) -> Any:
        return self.out if x is self.product else None

    @staticmethod
    def _checked(x: Any, result: Any) -> Any:
        return result if isinstance(x, _Normed) else None


class _Packed:
    def chunk(self, chunks: int, dim: int) -> Any:
        return (_Mlp.gate, _Mlp.up) if (chunks, dim) == (2, -1) else None


class _Activated:
    def __mul__(self, other: Any) -> Any:
        return _Mlp.product if other is _Mlp.up else None

    __rmul__ = __mul__


def is_hooked(*modules: nn.Module, names: Sequence[str] = HOOKS) -> bool:
    """Returns whether one of the modules has hooks in an attribute in `names`, by default on its output."""
    for module in modules:
        of_module = vars(module)
        for name in names:
            if of_module[name]:
                return True
    return False
