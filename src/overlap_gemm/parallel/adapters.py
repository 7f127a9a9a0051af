"""Which adapters (peft's) a parallelized model carries, told without importing peft.

    get_peft_model(parallelize(model, mesh), LoraConfig(...))     # or the other way round

LoRA of a linear is cut as the linear is (`lora`). Copies of whole modules (`modules_to_save`) are copies of
what has been cut. All else is refused by name, when it is put around a module.
"""

import functools
from typing import Any

from torch import nn

LORA = ("peft.tuners.lora.layer", "Linear")
TUNER = ("peft.tuners.lora.model", "LoraModel")
HOLDERS = "peft.peft_model"
"""The module of peft's models around a model."""
SAVED = ("peft.utils.other", "ModulesToSaveWrapper")

WRAPPED = ("base_layer", "original_module")
"""The names by which peft's wrappers hold what they wrap."""

ADAPTED = ("column", "packed", "row", "head", "shared column", "shared row")
"""Roles of modules that may have LoRA."""

COPIED = ("embedding", "norm", "head norm", "spread norm", "final norm", "head")
"""Roles of modules that may be in `modules_to_save`."""


def kind(module: nn.Module) -> tuple[str, str]:
    """Where a module's class is from, and its name."""
    return type(module).__module__, type(module).__name__


def is_lora(module: nn.Module) -> bool:
    """Whether it is peft's LoRA of a linear, ours (`lora.ShardedLora`) or not yet."""
    return kind(module) in (LORA, ("overlap_gemm.parallel.modules.lora", "ShardedLora"))


def is_adapter(module: nn.Module) -> bool:
    """Whether it wraps a module with an adapter of a kind that can be carried."""
    return is_lora(module) or kind(module) == SAVED


def bases(module: nn.Module) -> list[nn.Module]:
    """What has the module's place in the model: itself, or what adapters have around it and instead of it."""
    given: Any = module
    if is_lora(module):
        return [given.base_layer]
    if kind(module) == SAVED:
        return [given.original_module, *given.modules_to_save.values()]
    return [module]


def inject_or_restore(tuner: Any, model: nn.Module) -> None:
    """Makes a tuner of peft's leave a parallelized model as it was where an adapter fails or is refused.

    Args:
        tuner: Tuner that is about to get the model.
        model: A parallelized model.
    """
    if hasattr(type(tuner), "inject_adapter"):
        vars(tuner)["inject_adapter"] = functools.partial(_inject, tuner)


def _inject(tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """In the place of `inject_adapter`, which puts adapters around one module after the other."""
    children = [(module, dict(module._modules)) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    layers = [module for module in model.modules() if is_lora(module)]
    adapted = [layer for layer in layers if adapter_name in layer.r]  # type: ignore[operator]
    try:
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


def forbid_sums(tuner: Any) -> None:
    """Makes peft's `LoraModel.add_weighted_adapter` raise: it assigns `.data`, which no DTensor minds.

    Args:
        tuner: peft's `LoraModel` around a parallelized model; of others nothing is changed.
    """
    if kind(tuner) == TUNER:
        tuner.add_weighted_adapter = no_sums


def no_sums(*_: Any, **__: Any) -> None:
    """In the place of `add_weighted_adapter`."""
    raise NotImplementedError(
        "add_weighted_adapter is not carried for adapters of a parallelized model: sum them in one that is "
        "not, and load the sum"
    )


def why_not_peft(holder: nn.Module, role: str | None) -> str | None:
    """Why an adapter cannot be put around a module of a role; None: it can."""
    if kind(holder) == LORA:
        return None if role in ADAPTED else _must(role, "LoRA", ADAPTED)
    if kind(holder) == SAVED:
        return None if role in COPIED else _must(role, "modules_to_save", COPIED)
    return f"adapters of the kind {'.'.join(kind(holder))} are not carried, LoRA of linears is"


def why_not_lora(layer: Any) -> str | None:
    """Why the adapters of a layer of peft's, of a model not yet parallelized, cannot be carried; or None."""
    for name, variant in layer.lora_variant.items():
        return f"of the adapter {name!r} {type(variant).__name__} is not carried, LoRA is"
    if layer.fan_in_fan_out:
        return "fan_in_fan_out is for linears that lie otherwise"
    return None


def _must(role: str | None, what: str, roles: tuple[str, ...]) -> str:
    if role is None:
        return f"{what} is carried for no module of its kind, nor for a packed projection's part"
    return f"{what} is carried for modules that are {', '.join(roles)} to tensor parallelism, not {role!r}"
