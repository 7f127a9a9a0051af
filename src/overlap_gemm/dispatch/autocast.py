"""`torch.autocast` for the ops, with the dtype rules of `nn.Linear`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backends.op_call import CallOperands, OpCall

DEVICES = ("cpu", "cuda")
"""Device types that support both autocast and the ops of this package."""


def autocast(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Returns x, weights and biases in the dtypes that `torch.autocast` requires; unchanged outside of it.

    As for torch's matrix products, floating-point operands on the region's device type are cast to its dtype,
    except float64. Autograd casts gradients back to each operand's original dtype.

    Args:
        x: Operand x, of any shape.
        weights: Weights.
        biases: Biases; may be empty.
    """
    device = x.device.type if isinstance(x, Tensor) else "cpu"
    if not is_autocast(device):
        return x, list(weights), list(biases)
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        eligible = (
            isinstance(tensor, Tensor)
            and tensor.is_floating_point()
            and tensor.device.type == device
            and tensor.dtype != torch.float64
        )
        return tensor.to(dtype) if eligible else tensor

    return cast(x), [cast(weight) for weight in weights], [cast(bias) for bias in biases]


def result_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a product of x under the current autocast state."""
    device = x.device.type
    is_cast = is_autocast(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else x.dtype


def is_autocast(device: str) -> bool:
    """Returns whether `torch.autocast` is enabled for a device type, such as "cuda"."""
    # Not torch.amp.is_autocast_available: Dynamo of torch 2.11 breaks its graph there.
    return device in DEVICES and torch.is_autocast_enabled(device)


def autocast_call(operands: CallOperands, call: OpCall) -> tuple[CallOperands, OpCall]:
    """Applies `autocast` to the operands of an op; those with scales are unchanged.

    Args:
        operands: Operands of the caller.
        call: Options of the call.

    Returns:
        Operands in the autocast dtypes, and the call. `call.copied_weight` is set if a weight was cast.
    """
    if operands.scales:
        return operands, call
    x, weight, bias, *_ = operands
    several = isinstance(weight, list)
    weights = weight if several else [weight]
    x, cast, biases = autocast(x, weights, (bias or []) if several else [] if bias is None else [bias])
    pairs = zip(cast, weights, strict=True)
    copied = any(isinstance(new, Tensor) and new.dtype != old.dtype for new, old in pairs)
    call = call._replace(copied_weight=call.copied_weight or copied)
    if several:
        return CallOperands(x, cast, biases or None), call
    return CallOperands(x, cast[0], biases[0] if biases else None), call
