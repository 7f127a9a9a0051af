"""Properties and attributes of the emulated device."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cute_emulator.errors import EmulatorError
from cute_emulator.execution.grid import max_smem
from cute_emulator.machine.residency import (
    CTAS_PER_SM,
    REGISTERS_PER_SM,
    SMEM_PER_SM,
    THREADS_PER_SM,
)
from cute_emulator.machine.window import SMEM_BASE

L2_BYTES = 126 << 20
ALIGNMENT = 256
"""Alignment of device memory, that of `cudaMalloc`."""


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of the emulated device.

    Attributes:
        arch: Target in the DSL's notation, such as ``"sm_100a"``.
        num_sms: Number of streaming multiprocessors.
    """

    arch: str
    num_sms: int

    @property
    def capability(self) -> tuple[int, int]:
        """Returns the compute capability: (10, 0) of ``"sm_100a"``."""
        number = int(re.sub(r"\D", "", self.arch))
        return divmod(number, 10)

    def attribute(self, number: int) -> int:
        """Returns the value of a `cudaDeviceAttr`.

        Raises:
            EmulatorError: The emulator does not model the attribute.
        """
        major, minor = self.capability
        values = {
            1: 1024,  # maxThreadsPerBlock
            2: 1024, 3: 1024, 4: 64,  # maxBlockDim
            5: 2**31 - 1, 6: 65_535, 7: 65_535,  # maxGridDim
            8: 49_152,  # maxSharedMemoryPerBlock
            10: 32,  # warpSize
            12: REGISTERS_PER_SM,  # maxRegistersPerBlock
            16: self.num_sms,  # multiProcessorCount
            39: THREADS_PER_SM,  # maxThreadsPerMultiProcessor
            75: major, 76: minor,  # computeCapability
            81: SMEM_PER_SM,  # maxSharedMemoryPerMultiprocessor
            95: 1,  # cooperativeLaunch
            97: max_smem(self.arch),  # maxSharedMemoryPerBlockOptin
            106: CTAS_PER_SM,  # maxBlocksPerMultiprocessor
            111: SMEM_BASE,  # reservedSharedMemoryPerBlock
        }  # fmt: skip
        if number not in values:
            raise EmulatorError(f"the emulated device has no value for cudaDeviceAttr {number}")
        return values[number]
