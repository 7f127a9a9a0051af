"""What users call; `overlap_gemm` itself offers it."""
