"""Check that all ranks call a parallelized model with the same inputs.

| device | compared | when |
|---|---|---|
| CPU | shape, dtype and digest of tensors; numbers, texts | every forward pass, by a small message |
| GPU | shapes of `SIZES` only: a digest would wait for the device | once per call signature |

`OVERLAP_GEMM_CHECK=1` compares everything at every call, on every device.
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
"""Inputs whose shapes determine the sizes of the collectives."""
NOT_OF_THE_DECODER = ("labels", "logits_to_keep")


class Labels:
    """Pre-forward hook of a causal language model: keeps the inputs that its decoder does not get.

    `SameInputs` compares them. The hook refuses labels of a model with sharded logits outside of torch's
    `loss_parallel()`.
    """

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        self.kept: dict[str, Any] = {}

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the inputs, or raises. Called by torch before the model."""
        if self.sharding.logits_are_sharded and kwargs.get("labels") is not None and not in_loss_parallel():
            raise ValueError(
                "labels= of a model with logits='sharded': run its forward and backward() within torch's "
                "loss_parallel() (torch.distributed.tensor.parallel), or use logits='replicated'"
            )
        if not torch.compiler.is_compiling():
            self.kept = {key: kwargs.get(key) for key in NOT_OF_THE_DECODER}

    def fetch(self) -> dict[str, Any]:
        """Returns the kept inputs and clears them."""
        kept, self.kept = self.kept, {}
        return kept


def in_loss_parallel() -> bool:
    """Returns whether torch's `loss_parallel()` is active: it installs a handler in DTensor's dispatcher."""
    return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers


class SameInputs:
    """Pre-forward hook of a decoder: raises on every rank unless all ranks have the same inputs.

    It also raises the refusals of `Watch` and `WatchParameters`: on CPUs on every rank, on GPUs on the
    refusing rank alone. It refuses a cache that the model has not made itself (prefix tuning's), which has
    the heads of all ranks.

    Args:
        sharding: State of the parallelized model.
        labels: Hook that keeps the inputs that the decoder does not get.
        heads: Number of key/value heads of a rank.
    """

    def __init__(self, sharding: Sharding, labels: Labels, heads: int):
        self.sharding, self.labels, self.heads = sharding, labels, heads

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares the inputs. Called by torch before the decoder."""
        named = {**dict(zip(SIZES[1:2], args, strict=False)), **kwargs}
        if not torch.compiler.is_compiling():
            named |= self.labels.fetch()
        sharding = self.sharding
        if not torch.compiler.is_compiling():
            self._check_caches(named)
        refusal, sharding.refusal = sharding.refusal, None
        named |= {f"the parameter {name}, assigned since": digest for name, digest in sharding.assigned}
        sharding.assigned.clear()
        same_inputs(sharding.group, "forward", named, sharding.replicated_dropout, refusal)
        if refusal is not None:
            raise refusal

    def _check_caches(self, named: dict[str, Any]) -> None:
        # By what they are: transformers 5.24 has named past_key_values cache.
        caches = {name: value for name, value in named.items() if hasattr(value, "get_seq_length")}
        for name, cache in caches.items():
            keys = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", ())]
            heads = {part.shape[1] for part in keys if isinstance(part, Tensor) and part.ndim == 4}
            if heads - {self.heads}:
                self.sharding.refusal = self.sharding.refusal or ValueError(
                    f"forward: {name} must have the {self.heads} key/value heads of a rank, got "
                    f"{sorted(heads)}: use a cache made by this model's forward pass. Prefix tuning is not "
                    f"supported"
                )


def same_inputs(
    group: str, what: str, named: dict[str, Any], random: bool = False, refusal: Exception | None = None
) -> None:
    """Raises on every rank of a group unless all have the same inputs.

    The module's table lists what is compared.

    Args:
        group: Name of the process group; every rank of it calls.
        what: Name of the call, for messages.
        named: Inputs by name. Tensors, numbers, texts and caches are compared; other types are ignored.
        random: Also compare the states of torch's random number generators.
        refusal: Why this rank refuses the call; None: it does not. On CPUs the other ranks get it in place of
            the inputs.

    Raises:
        DisagreementError: The inputs differ, or some ranks refuse the call. The message names the input and
            each rank's value.
        Exception: `refusal`, on this rank, on a GPU without the comparison of everything.
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
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy(), digest_size=6).hexdigest()
