"""State of the emulated machine: memory, warps, barriers, operations in flight, and the checks on them."""
