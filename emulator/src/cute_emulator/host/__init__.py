"""Replacement of a process with GPUs: the host paths of the DSL and of torch, run by the emulator."""
