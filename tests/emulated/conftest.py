"""What the tests of our kernels in the emulator share."""

import pytest

from overlap_gemm.backends.fused import compiled


@pytest.fixture
def changed_kernels(monkeypatch):
    """For a test that changes kernels in place: none from other tests, and none of these for them.

    The cache on disk knows kernels by their source text. Yields a function that forgets what was compiled so
    far.
    """
    monkeypatch.setenv("OVERLAP_GEMM_CACHE", "0")
    compiled._cache.cache_clear()
    yield compiled._cache.cache_clear
    compiled._cache.cache_clear()
