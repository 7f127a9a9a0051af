import importlib.metadata

import overlap_gemm


def test_the_installed_distribution_is_this_package():
    assert importlib.metadata.version("overlap-gemm")
    assert overlap_gemm.__doc__
