"""What the tests of our kernels in the emulator share."""

import pytest

from overlap_gemm.backends import compiled


@pytest.fixture
def changed_kernels(tmp_path, monkeypatch):
    """For a test that changes kernels in place: none from other tests, and none of these for them.

    The cache knows kernels by their source text. Yields a function that forgets what was compiled so far.
    """

    def forget():
        compiled._cache.cache_clear()
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        monkeypatch.setenv("OVERLAP_GEMM_CACHE_DIR", str(folder))

    forget()
    yield forget
    compiled._cache.cache_clear()
