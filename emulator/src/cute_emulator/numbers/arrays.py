"""Names for types of arrays."""

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger]
"""Bit patterns of any width."""
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
