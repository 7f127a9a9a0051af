"""The public functions and classes, which `overlap_gemm` exports."""
