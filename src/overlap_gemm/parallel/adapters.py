"""Adapters of peft that a parallelized model supports, recognized without importing peft.

    get_peft_model(parallelize(model, mesh), LoraConfig(...))     # or the other way round

LoRA of a linear is sharded as the linear is (`modules/lora.py`). Copies of full modules (`modules_to_save`)
are copies of the sharded modules. Other adapters are refused by name when they are put around a module.
"""

import functools
from typing import Any

from torch import nn

LORA = ("peft.tuners.lora.layer", "Linear")
LORA_LAYERS = (LORA, ("overlap_gemm.parallel.modules.lora", "ShardedLoraLinear"))
TUNER = ("peft.tuners.lora.model", "LoraModel")
PACKED = ("overlap_gemm.parallel.modules.parts", "PackedLinear")
HOLDERS = "peft.peft_model"
"""Module of the classes that peft puts around a model."""
SAVED = ("peft.utils.other", "ModulesToSaveWrapper")

WRAPPED = ("base_layer", "original_module")
"""Attributes in which peft's wrappers hold the wrapped module."""

ADAPTED = ("column", "packed", "row", "head", "shared column", "shared row")
"""Roles of modules that support LoRA."""

COPIED = ("embedding", "norm", "head norm", "spread norm", "final norm", "head")
"""Roles of modules that `modules_to_save` supports."""


def kind(module: nn.Module) -> tuple[str, str]:
    """Returns the module and the name of a class, of an `nn.Module` object."""
    return type(module).__module__, type(module).__name__


def is_lora(module: nn.Module) -> bool:
    """Returns whether a module is peft's LoRA of a linear, or our subclass `ShardedLoraLinear`."""
    return kind(module) in LORA_LAYERS


def is_adapter(module: nn.Module) -> bool:
    """Returns whether a module wraps another one with an adapter of a supported kind."""
    return is_lora(module) or kind(module) == SAVED


def bases(module: nn.Module) -> list[nn.Module]:
    """Returns the modules at a place of the model, without adapters.

    A plain module is its own base. LoRA has one base; `modules_to_save` has the original and its copies.
    """
    wrapper: Any = module
    named = kind(module)
    if named in LORA_LAYERS:
        return [wrapper.base_layer]
    if named == SAVED:
        return [wrapper.original_module, *wrapper.modules_to_save.values()]
    return [module]


def inject_or_restore(tuner: Any, model: nn.Module) -> None:
    """Makes a tuner of peft restore a parallelized model if an adapter fails or is refused.

    Args:
        tuner: Tuner that is about to get the model.
        model: Parallelized model.
    """
    if hasattr(type(tuner), "inject_adapter"):
        vars(tuner)["inject_adapter"] = functools.partial(_inject, tuner)
    if hasattr(type(tuner), "_pre_injection_hook") and kind(tuner) != TUNER:
        vars(tuner)["_pre_injection_hook"] = functools.partial(_prepare, tuner)


def _prepare(tuner: Any, *args: Any) -> None:
    """Runs `_pre_injection_hook` of an unsupported tuner, whose errors are refusals.

    peft's VeRA reads the weight of a packed linear, which has none.
    """
    try:
        type(tuner)._pre_injection_hook(tuner, *args)
    except Exception as error:
        raise NotImplementedError(_unsupported(tuner)) from error


def _unsupported(module: nn.Module) -> str:
    """Returns the refusal of an adapter's tuner or layer."""
    return f"adapters of the kind {'.'.join(kind(module))} are not supported; LoRA of linears is"


def _inject(tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """Runs `inject_adapter`, and undoes it on errors: it adapts one module after the other."""
    children = [(module, dict(module._modules)) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    layers = [module for module in model.modules() if is_lora(module)]
    adapted = [layer for layer in layers if adapter_name in layer.r]  # type: ignore[operator]
    try:
        _target_packed_linears(tuner.peft_config[adapter_name], model)
        return type(tuner).inject_adapter(tuner, model, adapter_name, *args, **kwargs)
    except Exception:
        for layer in layers:
            if layer not in adapted:
                layer.delete_adapter(adapter_name)  # type: ignore[operator]
        for module, before in children:
            if not is_adapter(module):
                module._modules.clear()
                module._modules.update(before)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        tuner.peft_config.pop(adapter_name, None)
        raise


def _target_packed_linears(config: Any, model: nn.Module) -> None:
    """Resolves the targets "all-linear" without the parts of packed linears, which are linears, too."""
    if str(getattr(config, "target_modules", None)).lower() == "all-linear":
        from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

        _maybe_include_all_linear_layers(config, model)
        packed = [(name, module) for name, module in model.named_modules() if kind(module) == PACKED]
        parts = {f"{name}.{part}" for name, module in packed for part, _ in module.named_children()}
        config.target_modules = set(config.target_modules) - parts


def forbid_weighted_adapters(tuner: Any) -> None:
    """Makes peft's `LoraModel.add_weighted_adapter` raise: it assigns `.data`, which a DTensor ignores.

    Args:
        tuner: peft's `LoraModel` around a parallelized model; other objects are left unchanged.
    """
    if kind(tuner) == TUNER:
        tuner.add_weighted_adapter = _refuse_weighted_adapter


def _refuse_weighted_adapter(*_: Any, **__: Any) -> None:
    """Replaces `add_weighted_adapter`."""
    raise NotImplementedError(
        "add_weighted_adapter is not supported for adapters of a parallelized model: sum them in an "
        "unsharded model, and load the result"
    )


def why_not_peft(holder: nn.Module, role: str | None) -> str | None:
    """Returns why an adapter cannot be put around a module of a role, or None if it can."""
    if kind(holder) == LORA:
        return None if role in ADAPTED else _must(role, "LoRA", ADAPTED)
    if kind(holder) == SAVED:
        return None if role in COPIED else _must(role, "modules_to_save", COPIED)
    return _unsupported(holder)


def why_not_lora(layer: Any) -> str | None:
    """Returns why the adapters of a LoRA layer, not yet parallelized, are not supported, or None."""
    for name, variant in layer.lora_variant.items():
        return f"adapter {name!r} is a {type(variant).__name__}, which is not supported; LoRA is"
    if layer.fan_in_fan_out:
        return "fan_in_fan_out=True is for transposed weights; an nn.Linear needs False"
    return None


def _must(role: str | None, what: str, roles: tuple[str, ...]) -> str:
    if role is None:
        return f"{what} is not supported on this kind of module, nor on a packed projection's part"
    return f"{what} is supported on modules of the roles {', '.join(roles)}, not {role!r}"
