"""Backends, that is implementations of the ops: fused, decomposed, torch, sequential; and their selection."""
