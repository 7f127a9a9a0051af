"""The time model and its constants, measured choices, settings of kernels, and the timing protocol."""
