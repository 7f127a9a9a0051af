"""The host side: how a compiled CuTe DSL function reaches the machine, and what stands in for CUDA."""
