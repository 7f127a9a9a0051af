"""Replacement of a process with GPUs.

Host path of the DSL and of torch, and the emulator that runs their work.
"""
