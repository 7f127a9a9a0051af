"""The emulated machine's state: memory, warps, barriers, what is in flight, and the checks on them."""
