"""Ranks that call a parallelized model must call it with the same inputs: what is compared, and when.

On CPUs every tensor's shape, dtype and a digest of its bytes, before each forward pass, which costs a small
message to every rank. On GPUs a digest would wait for the device, so that shapes alone are compared, those of
the tensors on which the collectives' sizes depend, and once for each kind of call. `OVERLAP_GEMM_CHECK=1` has
everything compared, at every call.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..runtime import agree
from ..runtime.group import resolve
from .places import Sharding

SIZES = ("input", "input_ids", "inputs_embeds")
"""Inputs on whose shape the collectives' sizes depend."""
NOT_OF_THE_DECODER = ("labels", "logits_to_keep")


class Labels:
    """Pre-forward hook of a causal language model: keeps what its decoder does not see for `SameInputs`.

    It refuses labels where the loss would be of sharded logits, and not torch's for these.
    """

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        self.kept: dict[str, Any] = {}

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before the model."""
        if self.sharding.logits_are_sharded and kwargs.get("labels") is not None and not in_loss_parallel():
            raise ValueError(
                "labels= of a model with logits='sharded': its loss and backward() belong in torch's "
                "loss_parallel() (torch.distributed.tensor.parallel); logits='replicated' needs nothing"
            )
        if not torch.compiler.is_compiling():
            self.kept = {key: kwargs.get(key) for key in NOT_OF_THE_DECODER}

    def fetch(self) -> dict[str, Any]:
        """What was kept, once."""
        kept, self.kept = self.kept, {}
        return kept


def in_loss_parallel() -> bool:
    """Returns whether torch's `loss_parallel()` is in force: it lends DTensor a handler of its own."""
    return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers


class SameInputs:
    """Pre-forward hook of a decoder: raises on every rank unless all have the same inputs.

    On CPUs it also raises on every rank what `Watch` or `WatchParameters` refuses on any of them. A cache
    that the model has not made itself (prefix tuning's) has all heads, and is refused.

    Args:
        sharding: Of the model.
        labels: Inputs that the decoder does not see.
        heads: Key/value heads of a rank.
    """

    def __init__(self, sharding: Sharding, labels: Labels, heads: int):
        self.sharding, self.labels, self.heads = sharding, labels, heads

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before the decoder."""
        named = {**dict(zip(SIZES[1:2], args, strict=False)), **kwargs}
        if not torch.compiler.is_compiling():
            named |= self.labels.fetch()
        sharding = self.sharding
        if not torch.compiler.is_compiling():
            self._look_at_cache(named.get("past_key_values"))
        refusal, sharding.refusal = sharding.refusal, None
        named |= {f"the parameter {name}, assigned since": digest for name, digest in sharding.assigned}
        sharding.assigned.clear()
        same_inputs(sharding.group, "forward", named, sharding.replicated_dropout, refusal)
        if refusal is not None:
            raise refusal

    def _look_at_cache(self, cache: Any) -> None:
        keys = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", ())]
        given = {part.shape[1] for part in keys if isinstance(part, Tensor) and part.ndim == 4}
        if given - {self.heads}:
            self.sharding.refusal = self.sharding.refusal or ValueError(
                f"forward: past_key_values has {sorted(given)} key/value heads, but a rank of this model has "
                f"{self.heads}: caches are made by the model's own forward pass. Prefix tuning is not carried"
            )


def same_inputs(
    group: str, what: str, named: dict[str, Any], random: bool = False, refusal: Exception | None = None
) -> None:
    """Raises on every rank of a group unless all have the same inputs; see above for what is compared.

    Args:
        group: Every rank of which calls.
        what: Is called, for messages.
        named: The inputs by name; other things than tensors, numbers, texts and caches are not looked at.
        random: Compare the states of torch's generators, too.
        refusal: Reason of this rank not to run the call, sent to the others in place of its inputs.

    Raises:
        DisagreementError: They differ; the message names the input, and which rank has what.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return
    ranks = resolve(group)
    device = next((value.device for value in named.values() if isinstance(value, Tensor)), None)
    if ranks.size == 1 or device is None or device.type not in ranks.device_types:
        return
    if device.type == "cpu" or agree.checking():
        facts = [fact for name, value in named.items() for fact in _facts(name, value)]
        if random:
            facts.append(("torch's random numbers", digest_of(torch.get_rng_state())))
        if refusal is not None:
            facts = [agree.failure(refusal)]
    elif refusal is not None:
        raise refusal
    else:
        sizes = ((name, named.get(name)) for name in SIZES)
        facts = [(name, str(list(value.shape))) for name, value in sizes if value is not None]
    agree.same(ranks, device, (("op", what), *facts), every_time=device.type == "cpu")


def _facts(name: str, value: Any) -> agree.Facts:
    if isinstance(value, Tensor):
        return ((name, f"{list(value.shape)} {value.dtype}, digest {digest_of(value)}"),)
    if isinstance(value, dict):
        return tuple(fact for key, part in value.items() for fact in _facts(f"{name}.{key}", part))
    if hasattr(value, "get_seq_length"):
        return ((f"length of {name}", int(value.get_seq_length())),)
    return ((name, value),) if value is None or isinstance(value, (bool, int, str)) else ()


def digest_of(tensor: Tensor) -> str:
    """Returns a digest of a tensor's bytes."""
    own = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.blake2b(own.view(torch.uint8).numpy(), digest_size=6).hexdigest()
