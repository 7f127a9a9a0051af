"""Compiled kernels, one compilation per configuration and session."""

import functools

import pytest

from overlap_gemm.kernels.build import compile_kernel, make_kernel
from overlap_gemm.transports import PeerBulk


@pytest.fixture(scope="session")
def ptx_of(tmp_path_factory):
    """``ptx_of(config, pattern)``: the PTX of a kernel, None for a plain GEMM; compiled without a GPU."""
    folder = tmp_path_factory.mktemp("ptx")  # dumps of two processes in one folder get swapped

    @functools.cache
    def compiled(config, pattern):
        kernel = make_kernel(config) if pattern is None else make_kernel(config, PeerBulk(), pattern=pattern)
        return compile_kernel(kernel, f"--keep-ptx --dump-dir={folder}").__ptx__

    return compiled
