"""Places of the modules of a parallelized model, and the refusal of hooks and forwards without a rule.

What `parallelize` has checked holds only while no module, hook or forward is replaced. `Watch` checks hooks
and forwards before each forward pass; `replacements` checks modules when they are assigned.
"""

import copy
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
"""Tensors of a module of which a rank has only a part: none, its input, or input and output."""

PLACE = "_overlap_gemm_place"
KNOWN = ("torch", "peft", "transformers", "overlap_gemm")
"""Packages whose hooks are accepted without `sees_shards`."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


GROUPS: set[str] = set()
"""Names of the process groups over which models have been parallelized."""


@dataclass
class Sharding:
    """State of a parallelized model that its modules and hooks share.

    Attributes:
        mesh: 1-D DeviceMesh of the ranks.
        sequence_parallel: True if activations between the layers' products are sharded by sequence.
        logits_are_sharded: True if `parallelize` was called with `logits="sharded"`.
        changes: Number of modules and parameters put into the model so far.
        replicated_dropout: True if some dropout must draw the same numbers on all ranks.
        are_tied: True if embedding and head share one weight.
        assigned: (name, digest) of the parameters assigned since the last forward pass; the ranks compare
            them.
        refusal: Reason not to run the forward pass in progress; `SameInputs` raises it on every rank.
        model: Parallelized model. A copy of it has a state of its own; copies of its modules share this one.
    """

    mesh: DeviceMesh
    sequence_parallel: bool
    logits_are_sharded: bool = False
    changes: int = 0
    replicated_dropout: bool = False
    are_tied: bool = False
    assigned: list[tuple[str, str]] = field(default_factory=list)
    refusal: Exception | None = None
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        GROUPS.add(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sharding":
        """Returns this state for the copy of a module alone, as modules_to_save makes it; else a new one."""
        if self.model is not None and id(self.model) not in memo:
            return self
        memo[id(self)] = new = object.__new__(Sharding)
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    @property
    def group(self) -> str:
        """Returns the name of the process group of the mesh."""
        return group_name(self.mesh)


@dataclass
class Place:
    """Place of a module in a parallelized model.

    Attributes:
        name: Path of the module in the model before adapters were added.
        role: Role of the module; None: it has no parameters.
        part: Tensors of the module of which a hook sees a part only.
        sharding: State of the model.
        forward: `forward` that was set on the module itself, or None.
        children: Child modules by name, without adapters.
        layouts: Placement and full shape of each parameter, by name.
    """

    name: str
    role: Role | None
    part: Part
    sharding: Sharding
    forward: Any = None
    children: dict[str, nn.Module] = field(default_factory=dict)
    layouts: dict[str, tuple[Placement, torch.Size]] = field(default_factory=dict)


def place_of(module: nn.Module) -> Place | None:
    """Returns a module's place, or None."""
    return vars(module).get(PLACE)


def give_places(module: nn.Module, roles: dict[str, Role], sharding: Sharding, name: str = "") -> None:
    """Assigns their places to `module` and all modules in it.

    Args:
        module: Model, or a module of it, adapted or not.
        roles: Roles of the model's modules, by name.
        sharding: State of the model.
        name: Path of `module` in the model.
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


def set_parameter(module: nn.Module, name: str, tensor: DTensor) -> None:
    """Registers a frozen parameter in a module, and updates the layout in the module's place."""
    module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    place = place_of(module)
    if place is not None and name in place.layouts:
        place.layouts[name] = tensor.placements[-1], tensor.shape


def layouts_of(module: nn.Module) -> dict[str, tuple[Placement, torch.Size]]:
    """Returns placement and full shape of each DTensor parameter directly in a module, by name."""
    parameters = module.named_parameters(recurse=False)
    return {name: (p.placements[-1], p.shape) for name, p in parameters if isinstance(p, DTensor)}


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
    """Marks a hook or an optimizer of a parallelized model as correct on one rank's part of the data.

    Unmarked forward, pre-forward and backward hooks on modules with sharded inputs or outputs are refused at
    the next forward pass: the hidden states of a decoder layer are this rank's rows of the sequence, the
    output of a projection is this rank's features. Hooks of the packages in `KNOWN`, and hooks on embedding
    and head, are accepted. An unmarked optimizer that has not been tested is refused at its first step, with
    ValueError.

    A refused hook on all ranks raises `UnknownModuleError` on each. On some ranks only: on CPUs, or with
    ``OVERLAP_GEMM_CHECK=1``, every rank raises `DisagreementError`; on GPUs those ranks raise alone.

    Args:
        hook: Function or callable object as `register_forward_hook` takes it, or an optimizer whose step
            treats each element by itself or supports DTensors.

    Returns:
        `hook`.
    """
    hook.sees_shards = True  # type: ignore[attr-defined]
    return hook


class Watch:
    """Pre-forward hook of a model or decoder: refuses hooks, forwards and settings changed afterwards.

    Does nothing while torch.compile traces; the eager call before the trace has checked the model.

    Args:
        sharding: State of the model.
        decoder: Submodule that is skipped because it has its own hook; None: check all modules.
    """

    def __init__(self, sharding: Sharding, decoder: nn.Module | None = None):
        self.sharding, self.decoder = sharding, decoder
        self.places: list[tuple[nn.Module, Place]] = []
        self.attributes: list[dict[str, Any]] = []
        self.forwards: list[Any] = []
        self.settings: list[tuple[nn.Module, Place]] = []
        self.changes = self.hooks = -1

    def __reduce__(self) -> Any:
        """Returns a new hook without recorded state: a copied model records its own."""
        return Watch, (self.sharding, self.decoder)

    def __call__(self, model: nn.Module, _: tuple[Any, ...]) -> None:
        """Checks the model. Called by torch before each forward pass.

        It takes 20 us for 32 unchanged layers.
        """
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
                self._check_forward(module, place)
        for module, place in self.settings:
            if why := unsupported_setting(place.role, module):
                refuse(module, place, why)
        if self.hooks != RemovableHandle.next_id:  # torch's count of hooks on all modules and tensors
            for module, place in self.places:
                for name in HOOKS if place.part != "none" else ():
                    self._check_hooks(module, place, name)
            self.hooks = RemovableHandle.next_id

    def _check_forward(self, module: nn.Module, place: Place) -> None:
        new = vars(module).get("forward")
        if new is place.forward or not place.name:  # the model's own inputs and outputs are full tensors
            return
        compiled = getattr(new, "_torchdynamo_orig_callable", None)
        if compiled is None or getattr(compiled, "__self__", compiled) not in (module, place.forward):
            refuse(module, place, "its forward was replaced after parallelize")

    def _check_hooks(self, module: nn.Module, place: Place, which: str) -> None:
        if place.part == "input" and which == "_forward_hooks":
            return
        for hook in vars(module)[which].values():
            origin = _unwrapped(hook)
            package = (getattr(origin, "__module__", None) or "").partition(".")[0]
            if package not in KNOWN and not getattr(origin, "sees_shards", False):
                name = _address.sub("", repr(origin))
                why = (
                    f"the hook {name} would see this rank's part of the input or output only; if that is "
                    f"right, register overlap_gemm.parallel.sees_shards(hook)"
                )
                refuse(module, place, why)


def placed(model: nn.Module, without: nn.Module | None) -> Iterator[tuple[nn.Module, Place]]:
    """Yields (module, place) of the modules of a model that have places, without those inside `without`."""
    skipped = set() if without is None else set(without.modules())
    for module in model.modules():
        if module not in skipped and (place := place_of(module)) is not None:
            yield module, place


def _has_settings(module: nn.Module, place: Place) -> bool:
    is_dropout = isinstance(module, nn.Dropout) and place.forward is None
    return place.role in ("embedding", "mixture") or is_dropout or hasattr(module, "parametrizations")


def refuse(module: nn.Module, place: Place, why: str) -> None:
    """Stores the first refusal of the forward pass in progress; `SameInputs` raises it on every rank."""
    place.sharding.refusal = place.sharding.refusal or unknown(place.name, module, why)


_address = re.compile(r" at 0x[0-9a-f]+")
"""Address of an object in its `repr`; removed because ranks compare messages."""


def _unwrapped(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook
