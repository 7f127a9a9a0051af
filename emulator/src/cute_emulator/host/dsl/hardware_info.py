"""Replacement of the DSL's queries of the hardware."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from cute_emulator.host.device import L2_BYTES, DeviceProperties
from cute_emulator.host.replace import replaced


def hardware_info(
    device: Callable[[], DeviceProperties],
) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Replaces `cutlass.utils.HardwareInfo`, the source of cluster counts for host code of kernels."""
    from cutlass.utils import HardwareInfo

    def init(self: Any, device_id: int = 0) -> None:
        self.device_id = device_id

    def max_active_clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        if not 0 < cluster_size <= 32:
            raise ValueError(f"Cluster size must be between 1 and 32, {cluster_size} is not supported")
        return max(device().num_sms // cluster_size, 1)

    yield replaced(HardwareInfo, "__init__", init)
    yield replaced(HardwareInfo, "get_max_active_clusters", max_active_clusters)
    yield replaced(HardwareInfo, "get_l2_cache_size_in_bytes", lambda self: L2_BYTES)
    yield replaced(HardwareInfo, "get_device_multiprocessor_count", lambda self: device().num_sms)
