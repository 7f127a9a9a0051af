"""Old name of :mod:`cute_emulator`, for one version."""

import warnings

from cute_emulator import *  # noqa: F403
from cute_emulator import __all__ as __all__

warnings.warn("overlap_gemm.emulator is cute_emulator now", FutureWarning, stacklevel=2)
