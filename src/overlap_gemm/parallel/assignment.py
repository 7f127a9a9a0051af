"""Roles of a decoder's modules in tensor parallelism, and the refusal of modules without a rule.

A wrong guess trains wrongly without an error: the gradient of a norm between sharded heads is summed by no
rank, or a tied weight is sharded in two different ways. Therefore every module that holds parameters needs a
role. Every role checks its module's type and shapes, and a module that fails the check is refused by name.
"""

import re
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeAlias

from torch import nn
from torch.distributed.tensor import DTensor

from .adapters import ADAPTED, COPIED, bases, is_adapter, is_lora, why_not_lora, why_not_peft

Role: TypeAlias = Literal[
    "decoder", "embedding", "layer", "attention", "mlp", "norm", "head norm", "final norm", "column",
    "packed", "row", "head", "shared head", "spread norm", "mixture", "router", "experts", "shared expert",
    "shared column", "shared row",
]  # fmt: skip

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "mixtral",
    "qwen3_moe", "llama4_text",
)  # fmt: skip
"""The `config.model_type` of the tested families (tests/multi/test_parallelize.py)."""

ROLES: dict[str, Role] = {
    "embed_tokens": "embedding",
    "layers.*": "layer",
    "layers.*.input_layernorm": "norm",
    "layers.*.post_attention_layernorm": "norm",
    "layers.*.pre_feedforward_layernorm": "norm",
    "layers.*.post_feedforward_layernorm": "norm",
    "layers.*.self_attn": "attention",
    "layers.*.self_attn.q_proj": "column",
    "layers.*.self_attn.k_proj": "column",
    "layers.*.self_attn.v_proj": "column",
    "layers.*.self_attn.qkv_proj": "packed",
    "layers.*.self_attn.q_norm": "head norm",
    "layers.*.self_attn.k_norm": "head norm",
    "layers.*.self_attn.o_proj": "row",
    "layers.*.mlp": "mlp",
    "layers.*.mlp.gate_proj": "column",
    "layers.*.mlp.up_proj": "column",
    "layers.*.mlp.gate_up_proj": "packed",
    "layers.*.mlp.down_proj": "row",
    "layers.*.mlp.gate": "router",
    "layers.*.mlp.experts": "experts",
    "layers.*.mlp.shared_expert": "shared expert",
    "layers.*.mlp.shared_expert.gate_proj": "shared column",
    "layers.*.mlp.shared_expert.up_proj": "shared column",
    "layers.*.mlp.shared_expert.down_proj": "shared row",
    "norm": "final norm",
}
"""Roles by a module's path below the decoder, layer numbers replaced by `*`. `lm_head` is next to the
decoder.

All tokens pass through a shared expert. Its linears therefore get all tokens, even under sequence
parallelism.
"""

ALIASES = {".feed_forward": ".mlp", ".mlp.router": ".mlp.gate"}
"""Llama 4's names of these modules."""

PAIRED = "gate_up_proj"
"""Name of the parameter that holds the experts' gate and up projections."""

GROUPED_BYTES = 16
"""Row size in bytes that torch's grouped product requires a multiple of."""

PROJECTIONS: dict[Role, tuple[tuple[str, ...], ...]] = {
    "attention": (("q_proj", "k_proj", "v_proj", "o_proj"), ("qkv_proj", "o_proj")),
    "mlp": (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")),
    "mixture": (("gate", "experts"), ("router", "experts", "shared_expert")),
}
"""Names of the projections of a module, by its role; a module must have exactly one of these sets."""


class UnknownModuleError(ValueError):
    """A module that `parallelize` has no rule for; the message names it."""


def plan(model: nn.Module, ranks: int) -> dict[str, Role]:
    """Returns the role of each module of `model` that has one. Changes nothing.

    Args:
        model: Causal language model of Hugging Face's transformers, or its decoder.
        ranks: Number of ranks P.

    Returns:
        Roles by module name, in the model's order.

    Raises:
        UnknownModuleError: A module, or the model, has no rule.
    """
    inner = model.model if isinstance(getattr(model, "model", None), nn.Module) else model
    prefix = "" if inner is model else "model."
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            _refuse(name, model, "it is a DTensor: this model has been parallelized already")
    roles: dict[str, Role] = {}
    adapter_prefix = None
    for name, module in model.named_modules():
        if adapter_prefix is not None and name.startswith(adapter_prefix):  # inside an adapter
            continue
        role: Role | None = "decoder" if module is inner else "head" if name == "lm_head" else None
        if name.startswith(prefix):
            role = role or ROLES.get(_path(name.removeprefix(prefix)))
        role = _refined_by_module(role, name, module, model.config, ranks)
        if role is not None:
            if is_adapter(module):
                _check_adapter(name, module, role)
                adapter_prefix = f"{name}."
            elif type(module).__module__.startswith("peft."):
                _refuse(name, module, why_not_peft(module, role) or "")
            for base in bases(module):
                _CHECKS[role](name, base, model.config, ranks)
                if "forward" in vars(base):
                    _refuse(name, base, "its forward has been replaced already")
            roles[name] = role
        elif list(module.parameters(recurse=False)):
            _refuse(name, module, "it holds parameters and has no known place in a decoder")
        if not is_carried_dropout(name, module, roles):
            for base in bases(module):
                if why := unsupported_setting(role, base):
                    _refuse(name, base, why)
    _check_ties(model, prefix)
    family = getattr(model.config, "model_type", None)
    if family not in FAMILIES:
        _refuse("", model, f"model_type {family!r} is not among the families tested: {', '.join(FAMILIES)}")
    for needed in ("embedding", "layer", "final norm"):
        if needed not in roles.values():
            _refuse("", model, f"it has no {needed}")
    return roles


def is_carried_dropout(name: str, module: nn.Module, roles: dict[str, Role]) -> bool:
    """Returns whether a module is dropout of hidden states: directly in a layer, or outside of all layers."""
    parent = name.rpartition(".")[0]
    return type(module) is nn.Dropout and (roles.get(parent) == "layer" or ".layers." not in f".{name}")


def unsupported_setting(role: Role | None, module: Any) -> str | None:
    """Returns why a module's settings are not supported, or None. Settings may change at any time."""
    if role == "embedding":
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return "max_norm, sparse and scale_grad_by_freq need all rows, and a rank has some of them"
    elif role == "mixture":
        if noise := getattr(module, "jitter_noise", 0):
            return f"jitter_noise={noise} would need the same random numbers on each rank"
    elif any(type(one).__name__ == "_WeightNorm" for one in _parametrizations(module)):
        return "weight_norm needs the norms of full rows, and torch has no gradient of it on DTensors"
    elif isinstance(module, nn.Dropout) and module.p:
        return f"dropout p={module.p} would need its own random numbers on each rank"
    return None


def _parametrizations(module: nn.Module) -> list[nn.Module]:
    lists = getattr(module, "parametrizations", {})
    return [one for name in lists for one in lists[name]]


def _path(name: str) -> str:
    path = re.sub(r"\blayers\.\d+", "layers.*", name)
    for alias, canonical in ALIASES.items():
        path = path.replace(alias, canonical)
    return path


def _refined_by_module(role: Role | None, name: str, module: Any, config: Any, ranks: int) -> Role | None:
    """Returns the role, refined by the module where the path alone does not determine it."""
    if role == "mlp" and hasattr(module, "experts"):
        return "mixture"
    if role == "head norm" and getattr(module, "weight", None) is not None:
        return role if module.weight.numel() == head_dim(config) else "spread norm"
    if role == "column" and name.endswith((".k_proj", ".v_proj")) and kv_heads(config) < ranks:
        return "shared head"
    return role


def _refuse(name: str, module: nn.Module, why: str) -> NoReturn:
    raise unknown(name, module, why)


def unknown(name: str, module: nn.Module, why: str) -> UnknownModuleError:
    """Returns the error that refuses a module; the empty name stands for the model."""
    what = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
    return UnknownModuleError(f"parallelize has no rule for {what}: {why}")


def _check_ties(model: nn.Module, prefix: str) -> None:
    """Raises unless embedding and head are the only tied weights; both are sharded by vocabulary."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.replace(".base_layer.", "."))
    for names in owners.values():
        if len(names) > 1 and set(names) != {f"{prefix}embed_tokens.weight", "lm_head.weight"}:
            _refuse(names[1], model, f"it is tied to {names[0]!r}; only embedding and lm_head may be tied")


def _check_adapter(name: str, module: Any, role: Role) -> None:
    if role not in (ADAPTED if is_lora(module) else COPIED):
        _refuse(name, module, f"its kind of adapter is not supported on a module of role {role!r}")
    if is_lora(module):
        why = why_not_lora(module)
        if why is not None:
            _refuse(name, module, why)


def _check_linear(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    if type(module) is not nn.Linear:
        _refuse(name, module, "a projection must be a plain nn.Linear")


def _check_packed(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    _check_linear(name, module, config, ranks)
    if module.bias is not None:
        _refuse(name, module, "a packed projection must have no bias; no tested family has one")


def _check_embedding(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    scaled = type(module).__name__.endswith("TextScaledWordEmbedding") and hasattr(module, "embed_scale")
    if type(module) is not nn.Embedding and not (isinstance(module, nn.Embedding) and scaled):
        _refuse(name, module, "an embedding must be an nn.Embedding, or Gemma's scaled one")
    rows = module.num_embeddings
    if -(-rows // ranks) * (ranks - 1) >= rows:
        _refuse(name, module, f"{rows} rows leave the last of P={ranks} ranks without rows; use fewer ranks")


def _check_norm(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    _check_norm_of(name, module, config.hidden_size, "hidden_size")


def _check_head_norm(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    _check_norm_of(name, module, head_dim(config), "head_dim")


def _check_spread_norm(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    heads = config.num_attention_heads if name.endswith("q_norm") else kv_heads(config)
    _check_norm_of(name, module, heads * head_dim(config), "head_dim, or head_dim times the heads")
    if heads % ranks:
        _refuse(
            name, module, f"a norm over all heads needs a number of heads that P={ranks} divides, got {heads}"
        )
    if not hasattr(module, "variance_epsilon"):
        _refuse(name, module, "a norm over all heads must be an RMSNorm with variance_epsilon (OLMo2's)")


def _check_norm_of(name: str, module: nn.Module, width: int, what: str) -> None:
    shapes = _shapes(module)
    if not type(module).__name__.endswith("RMSNorm") or shapes != {"weight": [width]}:
        _refuse(name, module, f"it must be an RMSNorm with a weight [{width}] ({what}), got {shapes}")


def _check_attention(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    _check_projections(name, module, "attention")
    if config.num_attention_heads % ranks:
        _refuse(
            name, module, f"num_attention_heads={config.num_attention_heads} is not divisible by P={ranks}"
        )
    heads = kv_heads(config)
    if heads % ranks and (ranks % heads or hasattr(module, "qkv_proj")):
        _refuse(name, module, f"num_key_value_heads={heads} is neither a multiple nor a divisor of P={ranks}")


def _check_mlp(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    _check_projections(name, module, "mlp")


def _check_shared_expert(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    _check_projections(name, module, "mlp")
    if hasattr(module, "gate_up_proj"):
        _refuse(name, module, "a shared expert must have separate gate_proj and up_proj")


def _check_mixture(name: str, module: Any, config: Any, ranks: int) -> None:
    _check_projections(name, module, "mixture")


def _check_router(name: str, module: Any, config: Any, ranks: int) -> None:
    shapes = _shapes(module)
    if shapes != {"weight": [module.num_experts, config.hidden_size]}:
        _refuse(name, module, f"a router must have a weight [experts, hidden_size], got {shapes}")


def _check_experts(name: str, module: Any, config: Any, ranks: int) -> None:
    shapes, expected, dim = _shapes(module), expert_shapes(module), features_dim(module)
    if shapes != expected:
        _refuse(name, module, f"experts must have the shapes {expected}, got {shapes}")
    inner = shapes[PAIRED][dim] // 2
    local_features, rest = divmod(inner, ranks)
    if rest:
        _refuse(name, module, f"the {inner} features of an expert are not divisible by P={ranks}")
    size = local_features * module.down_proj.element_size()
    is_grouped = dim == 1 and getattr(config, "_experts_implementation", None) == "grouped_mm"
    if size % GROUPED_BYTES and is_grouped:
        why = (
            f"a rank's {local_features} features of an expert are {size} bytes; torch's grouped product "
            f"needs a multiple of {GROUPED_BYTES}: use experts_implementation='eager'"
        )
        _refuse(name, module, why)


def _check_projections(name: str, module: nn.Module, role: Role) -> None:
    if direct := [key for key, _ in module.named_parameters(recurse=False)]:
        _refuse(name, module, f"it must hold no parameters of its own, got {', '.join(direct)}")
    present = {key for key, child in module.named_children() if list(child.parameters())}
    present -= {"q_norm", "k_norm"}
    if present not in map(set, PROJECTIONS[role]):
        sets = " or ".join(", ".join(names) for names in PROJECTIONS[role])
        _refuse(
            name, module, f"its children with parameters must be {sets}, got {', '.join(sorted(present))}"
        )


def _check_layer(name: str, module: nn.Module, config: Any, ranks: int) -> None:
    for part, *aliases in (("self_attn",), ("mlp", "feed_forward")):
        if not any(isinstance(getattr(module, key, None), nn.Module) for key in (part, *aliases)):
            _refuse(name, module, f"a decoder layer must have {part}")


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    """Returns the shapes of all parameters of a module and its children, by name."""
    return {key: list(value.shape) for key, value in module.named_parameters()}


def features_dim(experts: Any) -> int:
    """Returns the dimension of the 2I features in `gate_up_proj`.

    It is 1 in [E, 2I, H], and 2 in Llama 4's [E, H, 2I].
    """
    return 2 if hasattr(experts, "expert_dim") else 1


def expert_shapes(experts: Any) -> dict[str, list[Any]]:
    """Returns the parameter shapes that transformers gives the experts of a family."""
    count = getattr(experts, "num_experts", None)
    if features_dim(experts) == 2:
        inner, hidden = experts.expert_dim, getattr(experts, "hidden_size", None)
        return {PAIRED: [count, hidden, 2 * inner], "down_proj": [count, inner, hidden]}
    inner, hidden = getattr(experts, "intermediate_dim", 0), getattr(experts, "hidden_dim", None)
    return {PAIRED: [count, 2 * inner, hidden], "down_proj": [count, hidden, inner]}


def kv_heads(config: Any) -> int:
    """Returns the number of key/value heads."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim(config: Any) -> int:
    """Returns the width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


_CHECKS: dict[Role, Callable[[str, Any, Any, int], None]] = {
    "decoder": lambda *_: None,
    "embedding": _check_embedding,
    "layer": _check_layer,
    "attention": _check_attention,
    "mlp": _check_mlp,
    "norm": _check_norm,
    "head norm": _check_head_norm,
    "final norm": _check_norm,
    "column": _check_linear,
    "packed": _check_packed,
    "row": _check_linear,
    "head": _check_linear,
    "shared head": _check_linear,
    "spread norm": _check_spread_norm,
    "mixture": _check_mixture,
    "router": _check_router,
    "experts": _check_experts,
    "shared expert": _check_shared_expert,
    "shared column": _check_linear,
    "shared row": _check_linear,
}
