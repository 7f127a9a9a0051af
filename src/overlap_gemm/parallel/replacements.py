"""Refusal of modules without a rule that are put into a parallelized model.

A module that is replaced, or wrapped in an adapter, is checked at that moment: torch calls `_registered` for
every child that any module gets.
"""

import functools

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from . import adapters
from .assignment import unknown
from .checkpoints.state import save_adapters
from .parameters import watch_prompts
from .places import place_of


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Checks a child that `parent` is about to get. Called by torch for every registration of a module."""
    if child is None:
        return
    place, new = place_of(parent), place_of(child)
    model = getattr(child, "model", child)
    if type(parent).__module__ == adapters.HOLDERS and isinstance(model, nn.Module) and place_of(model):
        parent.save_pretrained = functools.partial(save_adapters, parent)
        watch_prompts(parent)
    if place is not None and name == "parametrizations":  # checked before the next forward pass
        place.sharding.changes += 1
    if place is not None and name in place.children:
        place.sharding.changes += 1
        path = f"{place.name}.{name}" if place.name else name
        if not _may_replace(place.children[name], child, path):
            raise unknown(path, child, "it was put into a model after parallelize")
    if new is not None:
        new.sharding.changes += 1
        adapters.forbid_weighted_adapters(parent)
        if not new.name:
            adapters.inject_or_restore(parent, child)
    if new is not None and name in adapters.WRAPPED and type(parent).__module__.startswith("peft."):
        why = adapters.why_not_peft(parent, new.role)
        if why is not None:
            raise unknown(new.name, child, why)
        if adapters.is_lora(parent):
            from .modules.lora import take_over

            take_over(parent, child)


def _may_replace(old: nn.Module, new: nn.Module, name: str) -> bool:
    if old in adapters.bases(new) or old is new:
        return adapters.is_adapter(new) or old is new
    place = place_of(new)
    if place is not None and place.name == name:  # a copy, by modules_to_save or by a merge
        return True
    origin = type(new).__module__
    is_wrapper = origin.startswith("torch.") and not origin.startswith("torch.nn.")  # recomputes, compiles
    return is_wrapper and old in new.modules()


register_module_module_registration_hook(_registered)
