"""`python -m overlap_gemm.cli`, for environments whose scripts are not on PATH."""

from . import app

app(prog_name="overlap-gemm")
