"""Tools of those who develop overlap_gemm, as commands: `bench`, `emulate`, `compile-check`."""

__version__ = "0.1.0"
