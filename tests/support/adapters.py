"""Small models with peft's adapters, unsharded and parallelized, for tests."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from overlap_gemm.api.linears import gather_dtensor
from overlap_gemm.parallel import parallelize
from tests.support.models import VOCABULARY, tiny

SINGLE = {"rtol": 3e-5, "atol": 3e-6}
"""Hugging Face's norms turn to float32 in a float64 model, too."""

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ALL = ATTENTION + MLP


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Raises AssertionError, with `what`, unless two tensors are the same but for float32's rounding."""
    torch.testing.assert_close(found, expected, **SINGLE, msg=lambda text: f"{what}: {text}")


def config_of(targets: tuple[str, ...], **options: Any) -> Any:
    """Peft's `LoraConfig`; B is random, since with the usual zeros A would have no gradient."""
    from peft import LoraConfig

    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options}
    return LoraConfig(target_modules=list(targets), **options)


def adapted_pair(
    size: int,
    family: str,
    first: bool,
    sequence_parallel: bool,
    config: Any,
    names: tuple[str, ...] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """The unsharded model with adapters and the sharded one.

    Args:
        size: P.
        family: As for `tiny`.
        first: peft before `parallelize`, or after.
        sequence_parallel: As for `parallelize`.
        config: peft's.
        names: Of the mesh's dimension.
        **options: As for `tiny`.
    """
    from peft import get_peft_model

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=names)
    base: Any = tiny(family, size, **options)
    torch.manual_seed(5)
    plain = get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
    if first:
        return plain, parallelize(copy.deepcopy(plain), mesh, sequence_parallel=sequence_parallel)
    parallelize(base, mesh, sequence_parallel=sequence_parallel)
    torch.manual_seed(5)
    return plain, get_peft_model(base, copy.deepcopy(config))


def same(pair: Any, what: str = "parameters") -> None:
    """Raises AssertionError unless a pair's parameters, or their "gradients", are the same."""
    plain, sharded = (dict(model.named_parameters()) for model in pair)
    assert plain.keys() == sharded.keys()
    for name, parameter in plain.items():
        found = sharded[name]
        assert found.requires_grad == parameter.requires_grad, name
        assert isinstance(found, DTensor), name
        if what == "gradients":
            assert (found.grad is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                close(gather_dtensor(found.grad), parameter.grad, f"gradient of {name}")
        else:
            close(gather_dtensor(found), parameter, name)


def train(pair: Any, steps: int = 2) -> None:
    """AdamW steps of a pair, clipped; raises AssertionError where they differ."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3) for model in pair]
    for step in range(steps):
        torch.manual_seed(step)
        ids = torch.randint(3, VOCABULARY, (2, 7 + step))
        outs = [model(ids, labels=ids) for model in pair]
        close(outs[1].logits, outs[0].logits, "logits")
        for out in outs:
            out.loss.backward()
        same(pair, "gradients")
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.5) for model in pair]
        close(gather_dtensor(norms[1]), norms[0], "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(pair)
