"""Figures that a driver reports of a device; the constants of unmeasured devices are scaled by them.

They are peaks (clocks, buses, limits), not achieved rates. Only their ratios to those of a measured device
are used (`machine.scaled`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch


class DriverFacts(NamedTuple):
    """Figures of one device; 0 if the driver does not report one.

    Attributes:
        sms: Number of SMs.
        clock: Highest clock of the SMs, Hz.
        memory: Bandwidth of the memory bus, bytes/s.
        power: Default power limit, W.
        links: Number of active NVLink links; -1 if NVML is missing.
    """

    sms: int
    clock: float
    memory: float
    power: float = 0.0
    links: int = -1


MOST_LINKS = 18
"""Maximum number of NVLink links of a Hopper or Blackwell GPU."""


def driver_facts(index: int) -> DriverFacts:
    """Returns the figures of a CUDA device of this process."""
    properties = torch.cuda.get_device_properties(index)
    sms = properties.multi_processor_count
    clock = getattr(properties, "clock_rate", 0) * 1e3  # emulated devices have none
    bus = getattr(properties, "memory_clock_rate", 0) * 1e3 * getattr(properties, "memory_bus_width", 0)
    memory = bus * 2 / 8  # two transfers a clock
    facts = DriverFacts(sms, clock, memory)
    with suppress(OSError, AttributeError, RuntimeError), _nvml(index) as (library, device):
        limit, state = ctypes.c_uint(), ctypes.c_uint()
        _check(library.nvmlDeviceGetPowerManagementDefaultLimit(device, ctypes.byref(limit)))
        states = []
        for link in range(MOST_LINKS):
            status = library.nvmlDeviceGetNvLinkState(device, ctypes.c_uint(link), ctypes.byref(state))
            states.append(status == 0 and state.value == 1)
        return facts._replace(power=limit.value / 1e3, links=sum(states))
    return facts


def power_limit(index: int) -> int:
    """Returns the enforced power limit of a CUDA device in W; 0 if NVML is missing."""
    with suppress(OSError, AttributeError, RuntimeError), _nvml(index) as (library, device):
        limit = ctypes.c_uint()
        _check(library.nvmlDeviceGetEnforcedPowerLimit(device, ctypes.byref(limit)))
        return round(limit.value / 1e3)
    return 0


class Load(NamedTuple):
    """State of a device under load.

    Attributes:
        clock: Clock of the SMs, MHz.
        power: Mean power over the last second, W.
    """

    clock: int
    power: int


def load(index: int) -> Load | None:
    """Returns the current state of a CUDA device; None if NVML is missing."""
    with suppress(OSError, AttributeError, RuntimeError), _nvml(index) as (library, device):
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        _check(library.nvmlDeviceGetClockInfo(device, _SM_CLOCK, ctypes.byref(clock)))
        _check(library.nvmlDeviceGetPowerUsage(device, ctypes.byref(power)))
        return Load(clock.value, round(power.value / 1e3))
    return None


_SM_CLOCK = 1
"""NVML_CLOCK_SM."""


@contextmanager
def _nvml(index: int) -> Iterator[tuple[Any, Any]]:
    """Yields the NVML library and its handle of a CUDA device.

    Raises:
        OSError: NVML is missing.
        RuntimeError: NVML does not find the device.
    """
    library, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    _check(library.nvmlInit_v2())
    try:
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        name = (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode()
        _check(library.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(name), ctypes.byref(device)))
        yield library, device
    finally:
        library.nvmlShutdown()


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVML returned {status}")
