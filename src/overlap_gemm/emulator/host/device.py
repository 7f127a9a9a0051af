"""What the emulated device says of itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

from overlap_gemm.emulator.errors import EmulatorError
from overlap_gemm.emulator.run.grid import max_smem

L2_BYTES = 126 << 20
ALIGNMENT = 256
"""Of device memory, as `cudaMalloc` gives it."""


@dataclass(frozen=True)
class DeviceProperties:
    """What the emulated device says of itself.

    Attributes:
        arch: Target as the DSL writes it, e.g. ``"sm_100a"``.
        num_sms: Streaming multiprocessors.
    """

    arch: str
    num_sms: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: (10, 0) of ``"sm_100a"``."""
        number = int(re.sub(r"\D", "", self.arch))
        return divmod(number, 10)

    def attribute(self, number: int) -> int:
        """Value of a `cudaDeviceAttr`.

        Raises:
            EmulatorError: An attribute this emulator has no answer for.
        """
        major, minor = self.capability
        values = {
            1: 1024,  # maxThreadsPerBlock
            2: 1024, 3: 1024, 4: 64,  # maxBlockDim
            5: 2**31 - 1, 6: 65_535, 7: 65_535,  # maxGridDim
            8: 49_152,  # maxSharedMemoryPerBlock
            10: 32,  # warpSize
            12: 65_536,  # maxRegistersPerBlock
            16: self.num_sms,  # multiProcessorCount
            39: 2048,  # maxThreadsPerMultiProcessor
            75: major, 76: minor,  # computeCapability
            81: 233_472,  # maxSharedMemoryPerMultiprocessor
            95: 1,  # cooperativeLaunch
            97: max_smem(self.arch),  # maxSharedMemoryPerBlockOptin
            106: 32,  # maxBlocksPerMultiprocessor
            111: 1024,  # reservedSharedMemoryPerBlock
        }  # fmt: skip
        if number not in values:
            raise EmulatorError(f"the emulated device has no value for cudaDeviceAttr {number}")
        return values[number]
