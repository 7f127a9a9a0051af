"""Places of the modules of a parallelized model, and the refusal of hooks and forwards without a rule.

What parallelize has understood stays so only while nothing else is put in its place. Hooks and other forwards
are looked at before each forward pass (`Watch`), other modules when they are put there (`replacements`).
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from ..runtime.group import group_name
from . import adapters
from .assignment import Role, unknown, unsupported_setting

Hook = TypeVar("Hook")
Part: TypeAlias = Literal["none", "input", "all"]
"""What of a module's inputs and outputs is this rank's part only."""

PLACE = "_overlap_gemm_place"
KNOWN = ("torch", "peft", "transformers", "overlap_gemm")
"""Packages whose own hooks know what they see, or do not care."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


GROUPS: set[str] = set()
"""Names of the groups over which models have been parallelized."""


@dataclass
class Sharding:
    """Of a parallelized model.

    Attributes:
        mesh: The ranks.
        sequence_parallel: As for `parallelize`.
        logits_are_sharded: Whether `parallelize` was called with `logits="sharded"`.
        changes: How often a module has been put into the model.
        replicated_dropout: Whether some dropout must draw the same on all ranks.
        are_tied: Whether embedding and head have one weight.
        assigned: Parameters assigned since the last forward pass, and digests of them, for comparison.
        refusal: Reason not to run the forward pass in progress, raised by `SameInputs` on every rank.
    """

    mesh: DeviceMesh
    sequence_parallel: bool
    logits_are_sharded: bool = False
    changes: int = 0
    replicated_dropout: bool = False
    are_tied: bool = False
    assigned: list[tuple[str, str]] = field(default_factory=list)
    refusal: Exception | None = None

    def __post_init__(self) -> None:
        GROUPS.add(self.group)

    @property
    def group(self) -> str:
        """The ranks' group, by its name."""
        return group_name(self.mesh)


@dataclass
class Place:
    """Of a module in a parallelized model.

    Attributes:
        name: The module's, before it was adapted.
        role: The module's; None: it has no parameters.
        part: What a hook on it would see a part of.
        sharding: The model's.
        forward: The module's own `forward`, where it has one.
        children: Its modules by their names, without adapters.
        layouts: Placement and full shape of each of its parameters.
    """

    name: str
    role: Role | None
    part: Part
    sharding: Sharding
    forward: Any = None
    children: dict[str, nn.Module] = field(default_factory=dict)
    layouts: dict[str, tuple[Placement, torch.Size]] = field(default_factory=dict)


def place_of(module: nn.Module) -> Place | None:
    """A module's place, if it has one."""
    return vars(module).get(PLACE)


def give_places(module: nn.Module, roles: dict[str, Role], sharding: Sharding, name: str = "") -> None:
    """Gives `module`, and what is in it, their places in a parallelized model.

    Args:
        module: The model, or a module of it, adapted or not.
        roles: Of its modules, by their names.
        sharding: Of the model.
        name: The module's.
    """
    role = roles.get(name)
    inside = ".layers." in f".{name}."
    for base in adapters.bases(module):
        children = {key: adapters.bases(child)[0] for key, child in base.named_children()}
        part = _part(role, sharding.sequence_parallel) if role or inside else "none"
        place = Place(name, role, part, sharding, vars(base).get("forward"), children, layouts_of(base))
        vars(base)[PLACE] = place
        for key, child in base.named_children():
            give_places(child, roles, sharding, f"{name}.{key}" if name else key)


def set_layout(module: nn.Module, name: str, tensor: DTensor) -> None:
    """Gives a module of a parallelized model a frozen parameter, and its place that parameter's layout."""
    module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    place = place_of(module)
    if place is not None and name in place.layouts:
        place.layouts[name] = tensor.placements[-1], tensor.shape


def layouts_of(module: nn.Module) -> dict[str, tuple[Placement, torch.Size]]:
    """Returns placement and full shape of each DTensor parameter of a module itself."""
    own = module.named_parameters(recurse=False)
    return {name: (p.placements[-1], p.shape) for name, p in own if isinstance(p, DTensor)}


def _part(role: Role | None, sequence_parallel: bool) -> Part:
    match role:
        case "decoder" | "embedding" | "head" | "router" | "experts" | "shared expert":
            return "none"
        case "final norm":
            return "input" if sequence_parallel else "none"
        case "layer" | "attention" | "mlp" | "norm" | "mixture":
            return "all" if sequence_parallel else "none"
        case _:
            return "all"


def sees_shards(hook: Hook) -> Hook:
    """Says that a hook of a parallelized model's module, or an optimizer, knows that it sees a rank's part.

    Without it a forward, pre-forward or backward hook on a module whose input or output is sharded is refused
    at the next forward pass: a decoder layer's hidden states are this rank's rows of the sequence, a
    projection's output its features. An optimizer that is none of those tested is refused at its first step.

    Args:
        hook: A function, or an object of a class of your own, as `register_forward_hook` takes it; or an
            optimizer, whose step treats each element by itself, or knows DTensors.

    Returns:
        `hook`.
    """
    hook.sees_shards = True  # type: ignore[attr-defined]
    return hook


class Watch:
    """Pre-forward hook of a model, or decoder: refuses hooks, forwards and settings changed since.

    Not while torch.compile traces; the eager call that found the model in order was before that.

    Args:
        sharding: Of the model.
        decoder: Module whose modules are not looked at, since it has a hook of its own; None: there is none.
    """

    def __init__(self, sharding: Sharding, decoder: nn.Module | None = None):
        self.sharding, self.decoder = sharding, decoder
        self.places: list[tuple[nn.Module, Place]] = []
        self.attributes: list[dict[str, Any]] = []
        self.forwards: list[Any] = []
        self.settings: list[tuple[nn.Module, Place]] = []
        self.changes = self.hooks = -1

    def __reduce__(self) -> Any:
        """A copy looks for itself."""
        return Watch, (self.sharding, self.decoder)

    def __call__(self, model: nn.Module, _: tuple[Any, ...]) -> None:
        """Called by torch before the model. Where nothing has changed it takes 20 us for 32 layers."""
        if torch.compiler.is_compiling():
            return
        if self.changes != self.sharding.changes:
            self.places = list(placed(model, self.decoder))
            self.attributes = [vars(module) for module, _ in self.places]
            self.forwards = [place.forward for _, place in self.places]
            self.settings = [each for each in self.places if _has_settings(*each)]
            self.changes, self.hooks = self.sharding.changes, -1
        if [attributes.get("forward") for attributes in self.attributes] != self.forwards:
            for module, place in self.places:
                self._look_at_forward(module, place)
        for module, place in self.settings:
            if why := unsupported_setting(place.role, module):
                refuse(module, place, why)
        if self.hooks != RemovableHandle.next_id:  # torch counts hooks, of all modules and tensors
            for module, place in self.places:
                for name in HOOKS if place.part != "none" else ():
                    self._look_at_hooks(module, place, name)
            self.hooks = RemovableHandle.next_id

    def _look_at_forward(self, module: nn.Module, place: Place) -> None:
        new = vars(module).get("forward")
        if new is place.forward:
            return
        compiled = getattr(new, "_torchdynamo_orig_callable", None)
        if compiled is None or getattr(compiled, "__self__", compiled) not in (module, place.forward):
            refuse(module, place, "its forward has been replaced since")

    def _look_at_hooks(self, module: nn.Module, place: Place, which: str) -> None:
        if place.part == "input" and which == "_forward_hooks":
            return
        for hook in vars(module)[which].values():
            origin = _unwrapped(hook)
            package = (getattr(origin, "__module__", None) or "").partition(".")[0]
            if package not in KNOWN and not getattr(origin, "sees_shards", False):
                name = _address.sub("", repr(origin))
                why = (
                    f"the hook {name} would see this rank's part of its input or output only; one that "
                    f"knows is registered as overlap_gemm.parallel.sees_shards(hook)"
                )
                refuse(module, place, why)


def placed(model: nn.Module, without: nn.Module | None) -> Iterator[tuple[nn.Module, Place]]:
    """Returns the modules of a model that have places, but for those of the module `without`."""
    skipped = set() if without is None else set(without.modules())
    for module in model.modules():
        if module not in skipped and (place := place_of(module)) is not None:
            yield module, place


def _has_settings(module: nn.Module, place: Place) -> bool:
    is_dropout = isinstance(module, nn.Dropout) and place.forward is None
    return place.role in ("embedding", "mixture") or is_dropout or hasattr(module, "parametrizations")


def refuse(module: nn.Module, place: Place, why: str) -> None:
    """Notes a refusal, the first one, for every rank to raise in the forward pass in progress."""
    place.sharding.refusal = place.sharding.refusal or unknown(place.name, module, why)


_address = re.compile(r" at 0x[0-9a-f]+")
"""Of an object, in its `repr`, which ranks compare."""


def _unwrapped(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook
