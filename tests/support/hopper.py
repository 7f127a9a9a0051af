"""Kernels to try on sm_90 devices."""

from typing import Any

HOPPER_KERNELS: dict[str, dict[str, Any]] = {
    "default": {},
    "pingpong": {"mma": "pingpong", "tile": (64, 128)},
    "cooperative": {"mma": "cooperative", "tile": (128, 256)},
    "cluster": {"mma": "pingpong", "tile": (128, 128), "cluster": (2, 1)},
    "swap_ab": {"mma": "swap_ab", "tile": (32, 64)},
    "split": {"mma": "swap_ab", "tile": (16, 64), "k_split": 4},
    "whole-partials": {"slot_dtype": "f32"},
}
"""Each as fields for `tuning.space.configured`."""
