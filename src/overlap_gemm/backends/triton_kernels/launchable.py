"""Check of GPUs: does Triton run its kernels there?"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec

import torch


@cache
def is_launchable(device: torch.device) -> bool:
    """Returns whether Triton compiles and launches kernels on a device; cached.

    False without Triton, and before sm_90: the conversion to 8 bits must round once. If Triton is installed
    but does not work, one RuntimeWarning per device states the reason.

    Args:
        device: A CUDA device.
    """
    if torch.cuda.get_device_capability(device) < (9, 0) or find_spec("triton") is None:
        return False
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # creates Triton's launcher, which needs a C compiler
    except Exception as error:
        warnings.warn(
            f"torch's operations quantize rows and apply epilogues after ops, which takes several times as "
            f"long as Triton's kernels, since Triton does not work here: {error}",
            RuntimeWarning,
            stacklevel=5,
        )
        return False
    return True
