"""Torch's devices, streams and process groups, played on a CPU."""
