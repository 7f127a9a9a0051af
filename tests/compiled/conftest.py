"""Compiled kernels, one compilation per configuration and session."""

import functools

import pytest

from overlap_gemm.build import compile_kernel, make_kernel
from overlap_gemm.transports import PeerBulk
from overlap_gemm_tools.lint import inspect


@pytest.fixture(scope="session")
def compiled():
    """``compiled(config, pattern)``: a kernel's PTX and report; of a plain GEMM with pattern None."""

    @functools.cache
    def compiled(config, pattern):
        kernel = make_kernel(config) if pattern is None else make_kernel(config, PeerBulk(), pattern=pattern)
        return inspect(functools.partial(compile_kernel, kernel))

    return compiled
