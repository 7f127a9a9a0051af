"""What the tests of our kernels in the emulator share."""

import pytest

from overlap_gemm.backends.fused import compiled
from tests.support.emulated.kernel_cases import compiled_kernel


@pytest.fixture
def changed_kernels(monkeypatch):
    """For a test that changes kernels in place: none from other tests, and none of these for them.

    The cache on disk knows kernels by their source text. Yields a function that forgets what was compiled so
    far.
    """
    monkeypatch.setenv("OVERLAP_GEMM_CACHE", "0")

    def forget():
        compiled._cache.cache_clear()
        compiled_kernel.cache_clear()

    forget()
    yield forget
    forget()
